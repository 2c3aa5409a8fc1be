/* Schedule replay of the ranks of one host, as control/schedule_replay.h, control/coordinator.h and control/negotiator.h have it:
 * docs/models.md.
 *
 * Each rank has a flag in shared memory, the position at which it has arrived and whether it leaves there. Positions go on through all
 * replays. No rank starts the batches of a position before all have arrived there. If one arrives leaving, all leave at that position
 * and go back to the negotiated path: reports to a coordinator, plans from it. A plan that completes a step may begin the replay.
 * Collectives run on, side by side with the engine, and end in their order.
 *
 * GROUP=0: items 0 and 1 share a batch. GROUP=1: they are a group of two sorts, in two batches, which are one bundle. Item 2 is a batch
 * of its own. EXTRA and SHUTDOWN are in no schedule.
 *
 * Options: N ranks (2 or 3), K steps, MAXE how many replays begin, PROGRAM what the applications do, GROUP, EXTRAS, ASKS a rank that waits
 * may ask the others to leave at any moment, TIMER a rank may leave for no reason at any moment.
 * Mutants, each of which must fail:
 *   MUT_TOUCH    a rank starts a position as soon as it has itself arrived
 *   MUT_STAY     a rank that has arrived ready does not heed another that leaves
 *   MUT_NOBLOCK  a thread that waits is no reason to leave
 *   MUT_RESTART  positions begin anew with each replay
 *   MUT_SOON     a replay may begin without a step of all ranks before it
 *   MUT_BUNDLE   a position is a batch, also of a group of several (with GROUP=1)
 *   MUT_OLD      the coordinator counts reports that were sent before the sender applied the plan with the replay
 *   MUT_FORGET   the coordinator does not forget what is pending when a replay begins
 *   MUT_KEEP     a rank does not take back what it has reported
 */
#ifndef N
#define N 2
#endif
#ifndef K
#define K 1
#endif
#ifndef MAXE
#define MAXE 1
#endif
#ifndef TIMER
#define TIMER 0
#endif
#ifndef ASKS
#define ASKS 0
#endif
#ifndef GROUP
#define GROUP 0
#endif
/* 0: any order; 1: waits for item 0 before it submits 1 (not with GROUP); 2: waits for item 2 before 0 and 1; 3: one rank lacks item 2 in
 * step 0 (needs K >= 2); 4: each item or group begins again as soon as it has ended */
#ifndef PROGRAM
#define PROGRAM 0
#endif
#ifndef EXTRAS
#define EXTRAS 0                /* 1: another thread of each rank submits an operation outside the schedule, at any moment */
#endif

#define ITEMS 5
#define EXTRA 3
#define SHUTDOWN 4
#define REPLAY 32               /* in a plan, beside the items: a replay begins after it */
#define BIT(x) (1 << (x))
#define STEP_ITEMS 7
#define STRANGERS (BIT(EXTRA) | BIT(SHUTDOWN))

/* Of each operation: 0 not submitted, 1 submitted (or offered to the replay), 2 reported to the coordinator, 3 runs. */
byte item[N * ITEMS];
#define S(i, b) item[(i) * ITEMS + (b)]
byte count[N * 4];              /* how many uses of an item have ended, as the rank sees it */
#define COUNT(i, b) count[(i) * 4 + (b)]
bool blocked[N];                /* the application waits for something */
bool done[N];                   /* its engine has ended */

/* The flags in shared memory: where a rank has arrived, whether it leaves there, and where it asks others to leave. */
byte arrived[N], asked[N];
bool leaves[N];

/* Collectives as they run, matched by their number. */
#define LOG 8
int kind[LOG];
byte started[N], ended[N];

chan report[N] = [5] of { byte, byte };   /* last_applied, of which only the number of replays matters, and items */
chan plan[N] = [6] of { byte };

#if N == 2
#define EVERY(p) (p(0) && p(1))
#define SOME(p) (p(0) || p(1))
#else
#define EVERY(p) (p(0) && p(1) && p(2))
#define SOME(p) (p(0) || p(1) || p(2))
#endif

/* All ranks run the same collectives, in the same order, and each with the same use of its items. */
#define USE(b, shift) (((what) >> (b)) & 1 -> COUNT(i, b) << (shift) : 0)
inline start(what, from) {
  v = (what) + USE(0, 5) + USE(1, 7) + USE(2, 9) + USE(3, 11);
  if
  :: kind[started[i] % LOG] == 0 -> kind[started[i] % LOG] = v
  :: else -> assert(kind[started[i] % LOG] == v)
  fi;
  v = 0;
  for (b : 0 .. ITEMS - 1) {
    if
    :: (what) & BIT(b) -> assert(S(i, b) == from); S(i, b) = 3
    :: else
    fi
  }
  b = 0;
  started[i]++;
  assert(started[i] - ended[i] <= LOG)
}
#define STARTED(q) (started[q] > ended[i])
#define ENDED(q) (ended[q] > last)

#if GROUP
#ifdef MUT_BUNDLE
#define BUNDLES 3
#define COMPLETE ((head == 0 && S(i, 0) == 1) || (head == 1 && S(i, 1) == 1) || (head == 2 && S(i, 2) == 1))
#else
#define BUNDLES 2
#define COMPLETE ((head == 0 && S(i, 0) == 1 && S(i, 1) == 1) || (head == 1 && S(i, 2) == 1))
#endif
#else
#define BUNDLES 2
#define COMPLETE ((head == 0 && S(i, 0) == 1 && S(i, 1) == 1) || (head == 1 && S(i, 2) == 1))
#endif
inline start_bundle() {
#if GROUP
#ifdef MUT_BUNDLE
  start(BIT(head), 1)
#else
  if
  :: head == 0 -> start(1, 1); start(2, 1)
  :: else -> start(4, 1)
  fi
#endif
#else
  if
  :: head == 0 -> start(3, 1)
  :: else -> start(4, 1)
  fi
#endif
}

#define THERE(q) (arrived[q] >= position)
#define LEAVES(q) (arrived[q] == position && leaves[q])
#define ASKED(q) (asked[q] == position)
#define SUBMITTED (S(i, 0) == 1 || S(i, 1) == 1 || S(i, 2) == 1 || S(i, EXTRA) == 1 || S(i, SHUTDOWN) == 1)
#define IDLE (started[i] == ended[i])
#ifdef MUT_NOBLOCK
#define STUCK false
#else
#define STUCK (blocked[i] && IDLE && SUBMITTED && !COMPLETE)
#endif
/* A rank that has a reason and a complete bundle may as well go on: both are explored. */
#define REASON (S(i, EXTRA) == 1 || S(i, SHUTDOWN) == 1 || STUCK || SOME(ASKED) || TIMER)
#ifdef MUT_TOUCH
#define RUNS (here)
#else
#define RUNS (here && EVERY(THERE))
#endif
#ifdef MUT_STAY
#define LEFT (!here && SOME(LEAVES))
#define MAY_RUN RUNS
#else
#define LEFT SOME(LEAVES)
#define MAY_RUN (RUNS && !SOME(LEAVES))
#endif

proctype engine(byte i) {
  byte epoch = 0, position = 0, head = 0, b = 0, p = 0, last = 0;
  int v = 0;
  bool replaying = false, here = false;         /* has arrived at the position */

  do
  :: atomic { !replaying && SUBMITTED && nfull(report[i]) ->
       for (b : 0 .. ITEMS - 1) {
         if
         :: S(i, b) == 1 -> S(i, b) = 2; p = p | BIT(b)
         :: else
         fi
       }
       report[i]!epoch, p;
       b = 0; p = 0
     }
  :: atomic { plan[i]?p ->
       assert(!replaying);                      /* every plan needs a report of each rank */
       if
       :: GROUP && (p & 3) -> assert((p & 3) == 3); start(1, 2); start(2, 2)
       :: !GROUP && (p & 3) -> start(p & 3, 2)
       :: else
       fi;
       if
       :: p & (4 | STRANGERS) -> start(p & (4 | STRANGERS), 2)
       :: else
       fi;
       if
       :: p & REPLAY ->
#ifndef MUT_KEEP
            for (b : 0 .. ITEMS - 1) {
              if
              :: S(i, b) == 2 -> S(i, b) = 1
              :: else
              fi
            }
            b = 0;
#endif
            epoch++; head = 0; replaying = true;
#ifdef MUT_RESTART
            position = 1
#else
            position++
#endif
       :: else
       fi;
       p = 0
     }
  :: atomic { replaying && !here && REASON -> arrived[i] = position; leaves[i] = true; replaying = false }
  :: atomic { replaying && !here && COMPLETE -> arrived[i] = position; leaves[i] = false; here = true }
  :: atomic { replaying && LEFT -> here = false; replaying = false }
  :: atomic { replaying && MAY_RUN ->
       here = false;
       start_bundle();
       head = (head + 1) % BUNDLES;
       position++
     }
  :: atomic { ASKS && replaying && here && !EVERY(THERE) && asked[i] != position -> asked[i] = position }
  :: atomic { !IDLE && EVERY(STARTED) ->
       last = ended[i];
       p = kind[last % LOG] & 31;
       for (b : 0 .. ITEMS - 1) {
         if
         :: (p & BIT(b)) && b < SHUTDOWN -> assert(S(i, b) == 3); S(i, b) = 0; COUNT(i, b) = COUNT(i, b) + 1
         :: (p & BIT(b)) && b == SHUTDOWN -> S(i, b) = 0
         :: else
         fi
       }
       b = 0;
       ended[i]++;
       if
       :: EVERY(ENDED) -> kind[last % LOG] = 0
       :: else
       fi;
       last = 0;
       if
       :: p & BIT(SHUTDOWN) -> p = 0; break
       :: else -> p = 0
       fi
     }
  od;
  done[i] = true
}

/* On rank 0. It plans an operation when every rank has reported it, and a member of a group when all members are. */
proctype coordinator() {
  byte pending[N], ready = 0, e = 0, m = 0, epoch = 0, q = 0, step = 0;

  end: do
  :: atomic {
       if
       :: report[0]?e, m -> q = 0
       :: report[1]?e, m -> q = 1
#if N > 2
       :: report[2]?e, m -> q = 2
#endif
       fi;
#ifndef MUT_OLD
       if
       :: e < epoch -> m = 0                    /* the sender has taken it back since */
       :: else
       fi;
#endif
       pending[q] = pending[q] | m;
       ready = pending[0] & pending[1];
       m = pending[0] | pending[1];
#if N > 2
       ready = ready & pending[2];
       m = m | pending[2];
#endif
       if
       :: GROUP && (ready & 3) != 3 -> ready = ready & (255 - 3)
       :: else
       fi;
       /* A replay begins with a plan that completes a step. Something else that is pending would end it at once. */
       step = (step & ready -> ready : step | ready);
       m = (m & (255 - ready)) & STRANGERS;
       if
       :: ready && step == STEP_ITEMS && m == 0 && epoch < MAXE -> epoch++; step = 0; e = REPLAY
       :: e = 0
       fi;
       for (q : 0 .. N - 1) {
         pending[q] = pending[q] & (255 - ready);
#ifndef MUT_FORGET
         if
         :: e -> pending[q] = 0
         :: else
         fi;
#endif
         if
         :: ready -> assert(nfull(plan[q])); plan[q]!(ready | e)
         :: else
         fi
       }
       q = 0; ready = 0; e = 0; m = 0
     }
#ifdef MUT_SOON
  :: atomic { epoch < MAXE ->
       epoch++; step = 0;
       for (q : 0 .. N - 1) {
         pending[q] = 0;
         assert(nfull(plan[q])); plan[q]!REPLAY
       }
       q = 0
     }
#endif
  od
}

#define NONE(b) (S(i, b) == 0)
#define STEP (NONE(0) && NONE(1) && NONE(2))
#define SUBMIT(b) atomic { assert(NONE(b)); S(i, b) = 1 }
#define WAIT(what) blocked[i] = !(what); (what) -> blocked[i] = false

/* One atomic step is what the engine need not see the middle of. */
proctype application(byte i; bool lacks) {
  byte k = 0;
#if PROGRAM == 4
  byte used[3];

  blocked[i] = true;                            /* some thread waits whenever something is in flight */
  do
#if GROUP
  :: atomic { NONE(0) && NONE(1) && used[0] < K -> SUBMIT(0); SUBMIT(1); used[0]++ }
#else
  :: atomic { NONE(0) && used[0] < K -> SUBMIT(0); used[0]++ }
  :: atomic { NONE(1) && used[1] < K -> SUBMIT(1); used[1]++ }
#endif
  :: atomic { NONE(2) && used[2] < K -> SUBMIT(2); used[2]++ }
  :: atomic { STEP && used[0] == K && (GROUP || used[1] == K) && used[2] == K -> k = K - 1; goto next }
  od;
#endif

again:
  atomic {
    if
#if PROGRAM == 0
    :: SUBMIT(0)
    :: SUBMIT(2); goto second_first
#elif PROGRAM == 1
    :: SUBMIT(0); WAIT(NONE(0))
    :: SUBMIT(2); goto second_first
#elif PROGRAM == 2
    :: SUBMIT(0)
    :: SUBMIT(2); WAIT(NONE(2)); goto second_first
#else
    :: !lacks && k == 0 -> SUBMIT(0); SUBMIT(1); SUBMIT(2); WAIT(NONE(0) && NONE(1)); goto next
    :: !lacks && k == 1 -> SUBMIT(0); SUBMIT(1); WAIT(STEP); goto next
    :: lacks && k == 0 -> SUBMIT(0); SUBMIT(1); WAIT(NONE(0) && NONE(1)); goto next
    :: lacks && k == 1 -> SUBMIT(0); SUBMIT(1); WAIT(NONE(0) && NONE(1)); SUBMIT(2); WAIT(STEP); goto next
    :: lacks && k == 1 -> SUBMIT(2); goto second_first
    :: k > 1 -> SUBMIT(0)
#endif
    fi;
#if GROUP
    SUBMIT(1)                                   /* its members are submitted in one call */
#endif
  }
#if GROUP
  atomic { SUBMIT(2); WAIT(STEP); goto next }
#else
  atomic { SUBMIT(1); SUBMIT(2); WAIT(STEP); goto next }
#endif
second_first:
  atomic { SUBMIT(0); SUBMIT(1); WAIT(STEP) }
next:
  atomic {
    k++;
    if
    :: k < K -> goto again
    :: else
    fi;
    WAIT(COUNT(i, EXTRA) == EXTRAS);
    SUBMIT(SHUTDOWN);
    WAIT(NONE(SHUTDOWN));
    done[i];
    assert(STEP && COUNT(i, EXTRA) == EXTRAS && COUNT(i, 0) == K && COUNT(i, 1) == K);
    assert(COUNT(i, 2) == (PROGRAM == 3 -> K - 1 : K))
  }
}

proctype other_thread(byte i) {
  SUBMIT(EXTRA)
}

init {
  byte i, who = 0;
  if
  :: skip
  :: PROGRAM == 3 -> who = N - 1                /* rank 0, where the coordinator is, or another */
  fi;
  atomic {
    run coordinator();
    for (i : 0 .. N - 1) {
      run engine(i);
      run application(i, i == who);
      if
      :: EXTRAS -> run other_thread(i)
      :: else
      fi
    }
    i = 0
  }
}
