/* Schedule replay of the ranks of one host: docs/models.md.
 *
 * Each rank has an arrival flag in shared memory, {epoch, n, exit}, written once per position n of the schedule. Nobody touches the
 * data of n before all have arrived at n. If one arrived with `exit`, all leave at exactly n, with their data as it was, and go back
 * to the negotiated path: reports to a coordinator, plans from it. The coordinator may begin the replay at any moment.
 *
 * Items 0 and 1 share bucket 0, item 2 is bucket 1. EXTRA and SHUTDOWN are in no schedule. Bucket 0 is reduced by every rank for
 * itself, bucket 1 by slices in place, with done words.
 *
 * Options: N ranks (2 or 3), K steps, MAXE how often the schedule is locked, PROGRAM what the applications do, EXTRAS, TIMER a rank
 * may leave for no reason at any moment.
 * Mutants, each of which must fail:
 *   MUT_EARLY    who exits leaves without waiting for the others' arrival
 *   MUT_TOUCH    a rank touches the data as soon as it has itself arrived
 *   MUT_STAY     a rank that arrived ready does not heed an exit that it sees afterwards
 *   MUT_EPOCH    the word of a rank that is in a later epoch already is taken for "ready"
 *   MUT_NOBLOCK  a thread that waits is no reason to leave
 *   MUT_SINGLE   slots are not double-buffered
 *   MUT_AHEAD    what a rank has for n + 1 is written as soon as it has itself arrived at n
 *   MUT_DONE     a rank does not wait for the done words
 *   MUT_OLD      the coordinator counts reports that were sent before the sender applied the locking plan
 *   MUT_FORGET   the coordinator does not forget at the locking plan what is pending
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
/* 0: any order; 1: waits for item 0 before it submits 1; 2: waits for item 2 before 0 and 1; 3: one rank lacks item 2 in step 0
 * (needs K >= 2) */
#ifndef PROGRAM
#define PROGRAM 0
#endif

#ifndef EXTRAS
#define EXTRAS 0                /* 1: another thread of each rank submits an operation outside the schedule, at any moment */
#endif

#define BUCKETS 2
#define ITEMS 5
#define EXTRA 3
#define SHUTDOWN 4
#define LOCK 32                 /* as a plan; the others are masks of items */
#define BIT(x) (1 << (x))
#define ALL (BIT(N) - 1)

/* Of each operation: 0 not submitted, 1 submitted, 2 reported to the coordinator. */
byte item[N * ITEMS];
#define S(i, b) item[(i) * ITEMS + (b)]
byte count[N * 4];              /* how often an item was reduced, as the rank sees it */
#define COUNT(i, b) count[(i) * 4 + (b)]
bool blocked[N];                /* the application waits for something that is pending */
bool done[N];                   /* its engine has ended */

/* The words in shared memory. Positions are stored plus one: 0 is "nowhere yet". */
byte arrived_epoch[N], arrived[N], reduced_epoch[N], reduced[N];
bool exits[N];
/* The slots, double-buffered: whose contribution lies there, and the slices that hold the result. */
byte slot[N * 2], result[N * 2];

/* Collectives as they run, matched by order. */
int kind[2];
byte launched[2], finished[2];

chan report[N] = [5] of { byte, byte };   /* last_applied, of which only the number of locking plans matters, and items */
chan plan[N] = [6] of { byte };

/* All ranks run the same collectives, in the same order, with the same contribution of each: what was reduced before is equal. */
#define KIND(what) ((what) + 64 * (COUNT(i, 0) + 4 * COUNT(i, 1) + 16 * COUNT(i, 2) + 64 * COUNT(i, 3)))
inline launch(what) {
  if
  :: launched[l] == 0 -> kind[l] = KIND(what)
  :: else -> assert(kind[l] == KIND(what))
  fi;
  launched[l]++;
  assert(launched[l] <= N)
}
inline finish() {
  finished[l]++;
  if
  :: finished[l] == N -> launched[l] = 0; finished[l] = 0; kind[l] = 0
  :: else
  fi;
  l = 1 - l
}
inline deliver(b) {
  assert(S(i, b) != 0);
  S(i, b) = 0;
  if
  :: b < SHUTDOWN -> COUNT(i, b) = COUNT(i, b) + 1
  :: else
  fi
}

#define COMPLETE ((n % BUCKETS == 0 && S(i, 0) == 1 && S(i, 1) == 1) || (n % BUCKETS == 1 && S(i, 2) == 1))
#define THERE(q) (arrived_epoch[q] > epoch || (arrived_epoch[q] == epoch && arrived[q] > n))
#define EXITS_HERE(q) (arrived_epoch[q] == epoch && arrived[q] == n + 1 && exits[q])
#ifdef MUT_EPOCH
#define EXITED(q) EXITS_HERE(q)
#else
/* Who is in a later epoch has left this one, and can have left it only here. */
#define EXITED(q) (arrived_epoch[q] > epoch || EXITS_HERE(q))
#endif
#if N == 2
#define EVERY(p) (p(0) && p(1))
#define SOME(p) (p(0) || p(1))
#else
#define EVERY(p) (p(0) && p(1) && p(2))
#define SOME(p) (p(0) || p(1) || p(2))
#endif
#define REDUCED(q) (reduced_epoch[q] == epoch && reduced[q] > n)
#ifdef MUT_NOBLOCK
#define STUCK false
#else
#define STUCK (blocked[i] && !COMPLETE)
#endif
/* The reasons to leave. Who has one and a complete bucket may as well go on: both are explored. */
#define REASON (S(i, EXTRA) != 0 || S(i, SHUTDOWN) != 0 || STUCK || SOME(EXITED) || TIMER)
/* Another order than the schedule's is a reason too, or is not; it must not matter. */
#define OTHER_ORDER (!COMPLETE && ((n % BUCKETS == 0 && S(i, 2) == 1) || (n % BUCKETS == 1 && (S(i, 0) == 1 || S(i, 1) == 1))))
#ifdef MUT_SINGLE
#define AT(q) ((q) * 2)
#else
#define AT(q) ((q) * 2 + n % 2)
#endif
#define AT_NEXT(q) ((q) * 2 + (n + 1) % 2)
#define TAG (epoch * 16 + n + 1)

#ifdef MUT_STAY
#define LEAVES (EVERY(THERE) && exits[i])
#define RUNS (EVERY(THERE) && !exits[i])
#else
#define LEAVES (EVERY(THERE) && SOME(EXITED))
#ifdef MUT_TOUCH
#define RUNS (!SOME(EXITED))
#else
#define RUNS (EVERY(THERE) && !SOME(EXITED))
#endif
#endif

inline arrive(leaves) {
  arrived_epoch[i] = epoch;
  arrived[i] = n + 1;
  exits[i] = leaves
}

proctype engine(byte i) {
  byte epoch = 0, n = 0, b = 0, p = 0, q = 0, l = 0;
  bool here = false;            /* has arrived at n */

negotiated:
  do
  :: atomic {
       (S(i, 0) == 1 || S(i, 1) == 1 || S(i, 2) == 1 || S(i, EXTRA) == 1 || S(i, SHUTDOWN) == 1) && nfull(report[i]) ->
       p = 0;
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
       if
       :: p == LOCK ->
            p = 0;
#ifndef MUT_KEEP
            for (b : 0 .. ITEMS - 1) {
              if
              :: S(i, b) == 2 -> S(i, b) = 1
              :: else
              fi
            }
            b = 0;
#endif
            epoch++;
            goto locked
       :: else
       fi
     };
     atomic {                                           /* a plan is one collective */
       for (b : 0 .. ITEMS - 1) {
         assert(!(p & BIT(b)) || S(i, b) == 2)          /* nothing runs that was not submitted here, or runs twice */
       }
       b = 0;
       launch(p)
     }
     atomic { launched[l] == N ->
       finish();
       for (b : 0 .. ITEMS - 1) {
         if
         :: p & BIT(b) -> deliver(b)
         :: else
         fi
       }
       b = 0;
       if
       :: p & BIT(SHUTDOWN) -> p = 0; goto ended
       :: else -> p = 0
       fi
     }
  od;

locked:
  do
  :: atomic { !here && (REASON || OTHER_ORDER) ->
       arrive(true);
#ifdef MUT_EARLY
       n = 0; goto negotiated
#else
       here = true
#endif
     }
  :: atomic { !here && COMPLETE ->
       slot[AT(i)] = TAG; result[AT(i)] = 0;
#ifdef MUT_AHEAD
       slot[AT_NEXT(i)] = 0;
#endif
       arrive(false);
       here = true
     }
  :: atomic { here && LEAVES -> here = false; n = 0; goto negotiated }
  :: atomic { here && RUNS ->
       here = false;
       slot[AT_NEXT(i)] = 0;                            /* from now on the application may write what it has for n + 1 */
       if
       :: n % BUCKETS == 0 -> launch(32)                /* every rank adds up all slots for itself ... */
       :: else ->                                       /* its slice, from all slots and into all */
            launch(33);
            for (q : 0 .. N - 1) {
              assert(slot[AT(q)] == TAG);
              result[AT(q)] = result[AT(q)] | BIT(i)
            }
            q = 0;
            reduced_epoch[i] = epoch; reduced[i] = n + 1
       fi
     };
     atomic {
#ifdef MUT_DONE
       true ->
#else
       n % BUCKETS == 0 || EVERY(REDUCED) ->
#endif
       if
       :: n % BUCKETS == 0 ->                           /* ... and has not read them all before now */
            for (q : 0 .. N - 1) {
              assert(slot[AT(q)] == TAG)
            }
            q = 0;
            deliver(0); deliver(1)
       :: else ->
            assert(slot[AT(i)] == TAG && result[AT(i)] == ALL);
            deliver(2)
       fi;
       finish();
       n++
     }
  od;

ended:
  done[i] = true
}

/* On rank 0. It plans an operation when every rank has reported it. */
proctype coordinator() {
  byte pending[N], ready = 0, e = 0, m = 0, epoch = 0, q = 0;
  bool in_lock = false;

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
       :: e < epoch -> m = 0                            /* the sender has taken it back since */
       :: else
       fi;
#endif
       if
       :: m -> in_lock = false; pending[q] = pending[q] | m
       :: else
       fi;
       ready = pending[0] & pending[1];
#if N > 2
       ready = ready & pending[2];
#endif
       e = 0; m = 0;
       for (q : 0 .. N - 1) {
         pending[q] = pending[q] & (255 - ready);
         if
         :: ready -> assert(nfull(plan[q])); plan[q]!ready
         :: else
         fi
       }
       q = 0; ready = 0
     }
  :: atomic { !in_lock && epoch < MAXE ->
       epoch++; in_lock = true;
       for (q : 0 .. N - 1) {
#ifndef MUT_FORGET
         pending[q] = 0;
#endif
         assert(nfull(plan[q])); plan[q]!LOCK
       }
       q = 0
     }
  od
}

#define NONE(b) (S(i, b) == 0)
#define STEP (NONE(0) && NONE(1) && NONE(2))
#define SUBMIT(b) atomic { assert(NONE(b)); S(i, b) = 1 }
#define WAIT(what) blocked[i] = !(what); (what) -> blocked[i] = false

/* One atomic step is what the engine need not see the middle of. */
proctype application(byte i; bool lacks) {
  byte k = 0;

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
    fi
  }
  atomic { SUBMIT(1); SUBMIT(2); WAIT(STEP); goto next }
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
  :: PROGRAM == 3 -> who = N - 1                        /* rank 0, where the coordinator is, or another */
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
