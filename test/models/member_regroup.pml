/* Generations of an elastic job (core/member): members die or stop, also while a generation is formed or state is
 * handed over, a joiner joins, and the survivors go on with one state. Worker w's state is commit c, made in generation
 * o; t is the generation in which its parameters were written since (0: none), and valid is whether it is whole. A step
 * of generation g is complete when all its members have contributed to (g, step). Each member sees that at a moment of
 * its own, or receives the reset to the next generation first.
 *
 * `want` is the last Reset and `ready` the answers, `assigned`, `members` and `root` are Assign, `given` are the answers
 * Synced with Go behind them, `ended` the messages AtEnd with End behind them, `lost` is what the coordinator has
 * recorded, and life == DEAD means that the process is known not to run any more. Each worker reads each of them at any
 * later moment, so messages may be under way for any time.
 *
 * Mutants: MUT_ROOT the root is any member with a state; MUT_BEHIND a member that is behind keeps its state; MUT_TOUCHED
 * a member that has written parameters since its commit counts as whole; MUT_NOGEN contributions do not carry their
 * generation; MUT_DEAF a member that waits for the state ignores a reset; MUT_HALF a member receives a state into the
 * memory of its own commit, which it still reports as whole when it is interrupted; MUT_FENCE the next generation does
 * not wait for the end of a lost member, which may only have been stopped; MUT_LEAVE a member at its end leaves without
 * the others. */
#define N 3
#ifndef K
#define K 1
#endif
#ifndef STEPS
#define STEPS 1
#endif
#define G (K + 3)
#define LIVE 0
#define STOPPED 1
#define DEAD 2
byte life[N]; bool lost[N]; bool known[N]; bool finished[N];
byte want; byte assigned; byte members; byte root;     /* of the generation assigned last */
byte ready[N]; byte c[N]; byte o[N]; bool valid[N]; byte says_c[N]; bool says_valid[N];
byte t[N]; bool says_t[N];
byte given; byte ended;                                /* in the generation assigned last */
byte contributed[STEPS];                               /* likewise; with MUT_NOGEN it is never cleared */
byte start_c; byte start_o; bool started;              /* likewise */
byte deaths; bool stateless; bool complete; byte end_o; /* generation of the last step, at those that have finished */
byte made[N];  /* generation in which a member made its last contribution */
#define BIT(w) (1 << (w))

proctype worker(byte me) {
  byte g; byte s;
again:
  if
  :: atomic { life[me] == LIVE && known[me] && !complete -> g = want; ready[me] = g; says_c[me] = c[me]; says_valid[me] = valid[me];
#ifndef MUT_TOUCHED
       says_t[me] = t[me] != 0;
#endif
     }
  :: atomic { life[me] == DEAD || stateless || (complete && life[me] == LIVE && !known[me]) -> goto out }
  :: atomic { life[me] == LIVE && known[me] && complete && valid[me] && c[me] == STEPS -> finished[me] = true; goto out }
  :: atomic { life[me] == LIVE && known[me] && complete && !(valid[me] && c[me] == STEPS) -> finished[me] = true; goto out } /* a joiner that came too late */
  fi;
  if
  :: atomic { life[me] == LIVE && want > g -> goto again }
  :: atomic { life[me] == LIVE && assigned == g && (members & BIT(me)) -> skip }
  :: atomic { complete && life[me] == LIVE && assigned != g -> goto again }
  :: atomic { stateless || life[me] == DEAD -> goto out }
  fi;
  if
#ifdef MUT_BEHIND
  :: atomic { me != root && !valid[me] -> skip }
  :: atomic { me == root || valid[me] -> goto has }
#else
#define HAS_STATE (valid[me] && c[me] == says_c[root] && !says_t[me] && !says_t[root])
  :: atomic { me != root && !HAS_STATE && assigned == g ->
#ifdef MUT_HALF
       o[me] = 99; t[me] = 0
#else
       skip   /* the state arrives in memory of its own, so an interrupted member keeps its commit */
#endif
     }
  :: atomic { me == root || HAS_STATE || assigned != g -> goto has }
#endif
  fi;
  if   /* the state is on its way */
  :: atomic { life[me] == LIVE && assigned == g && life[root] == LIVE -> assert(c[root] >= c[me]); c[me] = c[root]; o[me] = o[root]; t[me] = t[root]; valid[me] = true; }
#ifndef MUT_DEAF
  :: atomic { life[me] == LIVE && want > g -> goto again }
#endif
  :: atomic { life[me] == DEAD -> goto out }
  fi;
has:
  atomic { if :: assigned == g -> given = given | BIT(me) :: else fi }
  if   /* no member steps before all have the state: the root must not change it while it is read */
  :: atomic { life[me] == LIVE && assigned == g && (given & members) == members ->
       assert(valid[me] && o[me] != 99);
       if :: t[me] != 0 -> o[me] = 16 + t[me]; t[me] = 0 :: else fi;   /* it is the state of the commit from here on */
       if :: !started -> started = true; start_c = c[me]; start_o = o[me]
          :: else -> if :: c[me] == start_c -> assert(start_o == o[me]) :: else -> assert(false) fi
       fi }
  :: atomic { life[me] == LIVE && want > g -> goto again }
  :: atomic { life[me] == DEAD -> goto out }
  fi;
  do
  :: atomic { life[me] == LIVE && c[me] == STEPS -> if :: assigned == g -> ended = ended | BIT(me) :: else fi };
     if   /* at its end: stays until all members are */
#ifdef MUT_LEAVE
     :: atomic { life[me] == LIVE -> finished[me] = true; assert(end_o == 0 || end_o == o[me]); end_o = o[me]; goto out }
#else
     :: atomic { life[me] == LIVE && assigned == g && (ended & members) == members -> complete = true; finished[me] = true; assert(end_o == 0 || end_o == o[me]); end_o = o[me]; goto out }
#endif
     :: atomic { life[me] == LIVE && want > g -> goto again }
     :: atomic { life[me] == DEAD -> goto out }
     fi
  :: atomic { life[me] == DEAD -> goto out }
  :: atomic { c[me] < STEPS -> s = c[me] };   /* it need not have received a reset yet */
     if
     :: atomic { life[me] == LIVE -> assert(assigned <= g); /* a late store would hit memory that a later generation uses */
          contributed[s] = contributed[s] | BIT(me); made[me] = g }
     :: atomic { life[me] == DEAD -> goto out }
     fi;
     if
     :: atomic { life[me] == LIVE && assigned == g && (contributed[s] & members) == members ->
          assert((!(members & 1) || made[0] == g) && (!(members & 2) || made[1] == g) && (!(members & 4) || made[2] == g));
          t[me] = g }   /* the optimizer writes the parameters */
     :: atomic { life[me] == LIVE && want > g -> goto again }
     :: atomic { life[me] == DEAD -> goto out }
     fi;
     if
     :: atomic { life[me] == LIVE -> c[me] = s + 1; o[me] = g; t[me] = 0 }
     :: atomic { life[me] == LIVE && want > g -> goto again }
     :: atomic { life[me] == DEAD -> goto out }
     fi
  od;
out: skip
}

proctype trouble() {
  byte w;
  do
  :: atomic { deaths < K -> if :: w = 0 :: w = 1 :: w = 2 fi;
       if :: life[w] == LIVE && known[w] && !finished[w] -> deaths++; if :: life[w] = DEAD :: life[w] = STOPPED fi :: else fi }
  :: atomic { life[w] == STOPPED -> life[w] = LIVE }   /* it goes on */
  :: break
  od
}

proctype supervisor() {
  byte w; byte best; bool some; bool all;
  do
  :: d_step { !known[2] && !complete && want < G - 1 -> known[2] = true; want++ }
  :: d_step { known[0] && life[0] != LIVE && !lost[0] && !finished[0] -> lost[0] = true; if :: !complete -> want++ :: else fi }
  :: d_step { known[1] && life[1] != LIVE && !lost[1] && !finished[1] -> lost[1] = true; if :: !complete -> want++ :: else fi }
  :: d_step { known[2] && life[2] != LIVE && !lost[2] && !finished[2] -> lost[2] = true; if :: !complete -> want++ :: else fi }
  :: d_step { lost[0] && life[0] != DEAD -> life[0] = DEAD }     /* the fence */
  :: d_step { lost[1] && life[1] != DEAD -> life[1] = DEAD }
  :: d_step { lost[2] && life[2] != DEAD -> life[2] = DEAD }
  :: d_step { assigned < want && !complete && !stateless &&
#ifndef MUT_FENCE
       (!lost[0] || life[0] == DEAD) && (!lost[1] || life[1] == DEAD) && (!lost[2] || life[2] == DEAD) &&
#endif
       (!known[0] || lost[0] || finished[0] || ready[0] == want) && (!known[1] || lost[1] || finished[1] || ready[1] == want) &&
       (!known[2] || lost[2] || finished[2] || ready[2] == want) ->
       some = false; best = 0; w = 0; members = 0;
       do
       :: w < N ->
          if
          :: known[w] && !lost[w] && !finished[w] ->
             members = members | BIT(w);
             if
#ifdef MUT_ROOT
             :: says_valid[w] && (!some || says_c[w] < says_c[best]) -> best = w; some = true
#else
             :: says_valid[w] && (!some || says_c[w] > says_c[best] || (says_c[w] == says_c[best] && says_t[best] && !says_t[w])) ->
                best = w; some = true
#endif
             :: else
             fi
          :: else
          fi; w++
       :: else -> break
       od;
       if
       :: some -> root = best; assigned = want; given = 0; ended = 0; started = false; start_c = 0; start_o = 0;
#ifndef MUT_NOGEN
          w = 0; do :: w < STEPS -> contributed[w] = 0; w++ :: else -> break od;
#endif
          best = 0
       :: else -> members = 0; stateless = true
       fi; w = 0; some = false; all = false }
  :: atomic { stateless || ((finished[0] || life[0] == DEAD) && (finished[1] || life[1] == DEAD) && (finished[2] || life[2] == DEAD || !known[2])) -> if :: !complete -> stateless = true :: else fi; break }
  od;
  skip
}
init {
  byte w = 0;
  atomic {
    want = 1;
    do :: w < N -> if :: w < N - 1 -> known[w] = true; valid[w] = true :: else fi; run worker(w); w++ :: else -> break od;
    w = 0; run supervisor(); run trouble()
  }
}
