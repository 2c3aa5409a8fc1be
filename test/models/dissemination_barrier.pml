/* Schedule replay across hosts, as core/negotiation/dissemination_barrier.cpp does it: docs/models.md.
 *
 * H hosts with R ranks each, POSITIONS batches. To the ranks of a host all other hosts are one more word, the outside, which the relay of
 * their host writes. Relays hear of each other by messages that stay in order between two hosts. At each position a rank is ready, leaves, or
 * (unless it is rank 0) offers nothing until it is asked to leave. After a position at which the ranks left, the next lock begins when all
 * ranks have negotiated.
 *
 * Checked: no deadlock; a batch runs only where every rank has arrived ready; all ranks run or leave at the same positions; no news
 * is older or younger than a relay can hold.
 *
 * H, R, POSITIONS; IDLE: how often a rank may offer nothing; LEAVERS: how often one may want to leave;
 * ASKS: how often one may lose patience though all will come
 *
 * Mutants, each of which must fail:
 *   MUT_ABSENT  a relay tells that its host is ready when its first rank is
 *   MUT_ROUNDS  a relay tells the hosts of all rounds at once, without having heard from those before
 *   MUT_WAIT    a relay that hears of a rank that leaves waits for its own ranks before it passes that on
 *   MUT_ONCE    a relay that knows of a rank that leaves tells the host of the next round only
 *   MUT_INBOX   a relay keeps one inbox, not one for each parity of the position
 *   MUT_STALE   news of a position that is over is put into the inbox of its parity
 *   MUT_CLEAR   the inbox is not emptied when a position is over
 *   MUT_LATEST  of two wishes the one that comes last counts, not the one for the later position
 *   MUT_ASK     a wish that others leave stays on its host
 *   MUT_REPORT  a host's first rank negotiates as soon as it has left, before its relay has looked at the words
 */
#ifndef H
#define H 2
#endif
#ifndef R
#define R 1
#endif
#ifndef POSITIONS
#define POSITIONS 3
#endif
#ifndef IDLE
#define IDLE 1
#endif
#ifndef ASKS
#define ASKS 0
#endif
#ifndef LEAVERS
#define LEAVERS 2
#endif
#define N (H * R)
#if H == 2
#define ROUNDS 1
#else
#define ROUNDS 2
#endif
#if defined(MUT_INBOX)
#define BOX(p) (h * 2)
#else
#define BOX(p) (h * 2 + (p) % 2)
#endif

/* Written by one process each: position * 2, + 1 to leave there. */
byte arrived[N], asked[N];                /* a rank's */
byte outside[H], outside_asked[H];        /* a host's */
byte at[H];                               /* a relay's position */
byte heard[H * 2];                        /* a relay's, by the position's parity: bit r of round r, bit 3 somebody leaves */

chan wire[H * H] = [8] of { byte, byte, bool, bool }; /* position, round, leaves, asks; [from * H + to] */

byte ready_at[POSITIONS + 1];             /* ghosts: how many arrived ready, */
byte left_at[POSITIONS + 1];              /* how many left, */
byte negotiated[POSITIONS + 1];           /* how many have negotiated after that */
byte idled = 0, idling = 0;               /* how often, and where last */
byte early_asks = 0, wanted = 0;

#define FIRST(host) ((host) * R)
#define LEAVES(word, p) ((word) == (p) * 2 + 1)
#define HERE(word, p) ((word) / 2 >= (p))

#if R == 1
#define ASKED_ON_HOST(h, p) (asked[FIRST(h)] == (p) || outside_asked[h] == (p))
#define LEAVES_ON_HOST(h, p) (LEAVES(arrived[FIRST(h)], p))
#define HERE_ON_HOST(h, p) (HERE(arrived[FIRST(h)], p))
#else
#define ASKED_ON_HOST(h, p) (asked[FIRST(h)] == (p) || asked[FIRST(h) + 1] == (p) || outside_asked[h] == (p))
#define LEAVES_ON_HOST(h, p) (LEAVES(arrived[FIRST(h)], p) || LEAVES(arrived[FIRST(h) + 1], p))
#define HERE_ON_HOST(h, p) (HERE(arrived[FIRST(h)], p) && HERE(arrived[FIRST(h) + 1], p))
#endif

proctype rank(byte i) {
  byte p = 1;
  byte h = i / R;

  do
  :: p > POSITIONS -> break
  :: else ->
     if
     :: atomic { ready_at[p]++; arrived[i] = p * 2 }
     :: atomic { wanted < LEAVERS -> wanted++; arrived[i] = p * 2 + 1 }
     :: atomic { i > 0 && idled < IDLE -> idled++; idling = p };
        /* Its engine goes on, though its application does not. */
        atomic { ASKED_ON_HOST(h, p) || LEAVES_ON_HOST(h, p) || LEAVES(outside[h], p) -> arrived[i] = p * 2 + 1 }
     fi;
     /* A word says the same whenever it is read, so those of a position need not be read at once. */
     do
     :: atomic { LEAVES_ON_HOST(h, p) || LEAVES(outside[h], p) -> left_at[p]++; break }
     :: atomic {
          !LEAVES_ON_HOST(h, p) && !LEAVES(outside[h], p) && HERE_ON_HOST(h, p) && HERE(outside[h], p) ->
          assert(ready_at[p] == N);
          assert(left_at[p] == 0);
          break
        }
     :: atomic { /* out of patience */
          asked[i] != p && !(HERE_ON_HOST(h, p) && HERE(outside[h], p)) && (idling == p || early_asks < ASKS) ->
          if
          :: idling == p -> skip
          :: else -> early_asks++
          fi;
          asked[i] = p
        }
     od;
     if
     :: left_at[p] > 0 ->
#ifndef MUT_REPORT
        i != FIRST(h) || at[h] > p;                     /* one thread does both, see Engine::step() */
#endif
        negotiated[p]++;
        negotiated[p] == N                              /* and locked again */
     :: else
     fi;
     p++
  od
}

#define SOMEBODY_LEAVES ((heard[BOX(at[h])] & 8) || LEAVES_ON_HOST(h, at[h]))
#define HAS_HEARD(round) (heard[BOX(at[h])] >> (round) & 1)
#ifdef MUT_ABSENT
#define ALL_HERE HERE(arrived[FIRST(h)], at[h])
#else
#define ALL_HERE HERE_ON_HOST(h, at[h])
#endif
#ifdef MUT_ROUNDS
#define MAY_GO_ON (SOMEBODY_LEAVES || ALL_HERE)
#elif defined(MUT_WAIT)
#define MAY_GO_ON (ALL_HERE && (told == 0 || HAS_HEARD(told - 1)))
#else
#define MAY_GO_ON (SOMEBODY_LEAVES || (ALL_HERE && (told == 0 || HAS_HEARD(told - 1))))
#endif
#define MAY_TELL (at[h] <= POSITIONS && told < ROUNDS && MAY_GO_ON)
#define IS_OVER (at[h] <= POSITIONS && told == ROUNDS && (SOMEBODY_LEAVES || (ALL_HERE && HAS_HEARD(ROUNDS - 1))))

/* `told` and `at` as told_ and position_ in DisseminationBarrier. */
inline tell(says) {
  wire[h * H + (h + (1 << told)) % H] ! at[h], told, says, false;
  told++
}

inline take_in(from) {
  wire[from * H + h] ? news_p, news_round, news_leaves, news_asks;
  if
#ifndef MUT_STALE
  :: news_p < at[h] -> skip
#endif
  :: else ->
     assert(news_p <= at[h] + 1);
     if
#ifndef MUT_LATEST
     :: news_asks && news_p < outside_asked[h] -> skip
     :: news_asks && news_p >= outside_asked[h] -> outside_asked[h] = news_p
#else
     :: news_asks -> assert(news_p >= outside_asked[h]); /* the wish for the later position is lost */ outside_asked[h] = news_p
#endif
     :: else ->
        heard[BOX(news_p)] = heard[BOX(news_p)] | (1 << news_round) | (news_leaves -> 8 : 0)
     fi
  fi;
  news_p = 0; news_round = 0; news_leaves = false; news_asks = false
}

proctype relay(byte h) {
  byte told = 0, wished = 0;
  byte news_p, news_round, to;
  bool news_leaves, news_asks, leaves;

  do
  :: at[h] > POSITIONS -> break
  :: d_step { H > 1 && at[h] <= POSITIONS && nempty(wire[((h + H - 1) % H) * H + h]) -> take_in(((h + H - 1) % H)) }
#if H > 2
  :: d_step { at[h] <= POSITIONS && nempty(wire[((h + H - 2) % H) * H + h]) -> take_in(((h + H - 2) % H)) }
#endif
#if H > 3
  :: d_step { at[h] <= POSITIONS && nempty(wire[((h + H - 3) % H) * H + h]) -> take_in(((h + H - 3) % H)) }
#endif
#ifndef MUT_ASK
  /* pass_on_wish() */
  :: d_step {
       at[h] <= POSITIONS && wished != at[h] && (asked[FIRST(h)] == at[h] || asked[FIRST(h) + R - 1] == at[h]) ->
       wished = at[h];
       to = 0;
       do
       :: to < H && to != h -> wire[h * H + to] ! at[h], 0, false, true; to++
       :: to == h -> to++
       :: to >= H -> break
       od;
       to = 0
     }
#endif
  :: d_step {
       MAY_TELL || IS_OVER ->
       do
       :: MAY_TELL ->
          leaves = SOMEBODY_LEAVES;
          tell(leaves)
#ifdef MUT_ONCE
          ;
          if
          :: leaves -> told = ROUNDS
          :: else
          fi
#endif
       :: else ->
          if
          :: IS_OVER ->
             outside[h] = at[h] * 2 + (SOMEBODY_LEAVES -> 1 : 0);
#ifndef MUT_CLEAR
             heard[BOX(at[h])] = 0;
#endif
             at[h]++;
             told = 0
          :: else -> break
          fi
       od;
       leaves = false
     }
  od
}

init {
  byte k = 0;
  atomic {
    do
    :: k < H -> at[k] = 1; run relay(k); k++
    :: else -> break
    od;
    k = 0;
    do
    :: k < N -> run rank(k); k++
    :: else -> break
    od
  }
}
