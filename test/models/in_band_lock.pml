/* The schedule lock of ranks that see each other only through their collectives: docs/models.md.
 *
 * A rank launches the buckets of the agreed schedule without asking anybody. Each bucket's tail carries, reduced like the data, who
 * had nothing to contribute (absent) and whether somebody wants to leave (exit). What the reduced tail says is the verdict, the same
 * on every rank. A rank launches position n only when the verdicts up to n - D are known; after the first flagged verdict f all
 * launch up to f + D - 1, with proxies (the identity) for what is missing, and then go back to the negotiated path. What has been
 * contributed to a bucket that was not complete is carried: there it counts as reported and contributes nothing a second time.
 *
 * The negotiated path is one blocking round after another in which the ranks agree on what all have submitted. Any round may lock
 * the schedule, unless something is carried.
 *
 * One tensor to a bucket; item 2 is an operation outside the schedule.
 *
 * Options: N ranks, D look-ahead, K steps, MAXE how often the schedule is locked, TIMER a rank may launch a proxy at any moment;
 * what the applications do: EXTRAS the operation outside the schedule, JOINS a rank may stop early, WAITS one tensor before the
 * other is submitted, OUTSIDE one rank waits for another by means that the runtime does not see.
 * Mutants, each of which must fail:
 *   MUT_NOPROXY  nobody launches for what is missing
 *   MUT_NOLAG    a rank leaves as soon as it has read a flagged verdict
 *   MUT_DELIVER  partial sums are delivered
 *   MUT_NOCARRY  what went into a partial sum is contributed again
 * and OUTSIDE=1 without TIMER=1, which shows that a rank may not wait without limit.
 */
#ifndef N
#define N 2
#endif
#ifndef D
#define D 1
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
#ifndef EXTRAS
#define EXTRAS 1
#endif
#ifndef JOINS
#define JOINS 1
#endif
#ifndef WAITS
#define WAITS 1
#endif
#ifndef OUTSIDE
#define OUTSIDE 0
#endif

#define BUCKETS 2
#define ITEMS 3
#define EXTRA 2
#define WINDOW (2 * D + 2)      /* collectives that can be under way */
#define NONE 255
#define BIT(x) (1 << (x))

/* Of each operation: 0 not submitted, 1 submitted, 2 carried, 3 launched. */
byte pending[N * ITEMS];
bool joined[N];
byte waits_for[N];              /* 0, or the item the application waits for, plus one; 3 is both tensors */
bool changed[N];                /* something to tell in the next round */
bool engine_done[N], extra_done[N];
byte reduced[N * BUCKETS];      /* how often a tensor was reduced, as the rank sees it */
byte contributed[BUCKETS * (K + 3)];   /* by whom, per reduction */
byte waits_first[K];            /* per step: the tensor that a rank may wait for before it submits the other; 2: OUTSIDE */
bool signalled[K];

/* The data collectives, matched by order. */
byte launched[WINDOW], finished[WINDOW], kind[WINDOW], absent[WINDOW], given[WINDOW];
bool flagged[WINDOW];

/* The negotiated rounds. */
byte round_in[2], round_ready[2], round_any[2], round_out[2];
bool round_all_joined[2], round_carried[2], round_locks[2];
byte locks;

#define P(i, b) pending[(i) * ITEMS + (b)]
#define REDUCED(i, b) reduced[(i) * BUCKETS + (b)]
#define CONTRIBUTED(b, k) contributed[(b) * (K + 3) + (k)]

/* Nothing is lost. */
inline check_all_contributed(b, k) {
  q = 0;
  do
  :: q < N -> assert((CONTRIBUTED(b, k) & BIT(q)) || joined[q]); q++
  :: else -> q = 0; break
  od
}
/* Nothing is contributed twice. */
inline contribute(b) {
  assert(!(CONTRIBUTED(b, REDUCED(i, b)) & BIT(i)));
  CONTRIBUTED(b, REDUCED(i, b)) = CONTRIBUTED(b, REDUCED(i, b)) | BIT(i)
}
inline launch(what, is_absent, gives, flags) {
  slot = next;
  if
  :: launched[slot] == 0 ->
       kind[slot] = what; absent[slot] = 0; given[slot] = 0; flagged[slot] = 0; finished[slot] = 0
  :: else -> assert(kind[slot] == what)                 /* collectives that do not match corrupt memory or hang */
  fi;
  launched[slot]++;
  assert(launched[slot] <= N);
  if
  :: is_absent -> absent[slot] = absent[slot] | BIT(i)
  :: else
  fi;
  if
  :: gives -> given[slot] = given[slot] | BIT(i)
  :: else
  fi;
  flagged[slot] = flagged[slot] || flags;
  next = (next + 1) % WINDOW
}
inline finish(s) {
  finished[s]++;
  if
  :: finished[s] == N ->
       launched[s] = 0; finished[s] = 0; kind[s] = 0; absent[s] = 0; given[s] = 0; flagged[s] = 0
  :: else
  fi
}

/* Why a rank launches for what it has not got: it has joined, all are leaving, the timer, or its application waits for a tensor that
 * stands behind this bucket. */
#define BEHIND(b) (P(i, b) == 1 && (n % BUCKETS) != (b))
#define EVIDENCE (joined[i] || limit != NONE || TIMER || \
                  (waits_for[i] == 3 && (P(i, 0) == 1 || P(i, 1) == 1)) || \
                  (waits_for[i] != 0 && waits_for[i] != 3 && BEHIND(waits_for[i] - 1)))
#define MAY_LAUNCH (n < limit && n - verdicts < D)

proctype engine(byte i) {
  byte next = 0, r = 0, q = 0, slot = 0, b = 0, it = 0, mine = 0, ready = 0, any = 0, n = 0, verdicts = 0, limit = NONE, base = 0, epoch = 0;
  bool locks_now = 0, all_joined = 0, carries = 0, gives = 0;

negotiated:
  do
  :: atomic {                                           /* enter a round, when there is news or somebody has */
       (changed[i] || (round_in[r] > 0 && round_in[r] < N)) ->
       changed[i] = 0;
       if
       :: round_in[r] == 0 ->
            round_ready[r] = 7; round_any[r] = 0; round_all_joined[r] = 1; round_carried[r] = 0; round_locks[r] = 0
       :: else
       fi;
       mine = 0; carries = 0; it = 0;
       do
       :: it < ITEMS ->
            if
            :: P(i, it) != 0 -> mine = mine | BIT(it)
            :: else
            fi;
            if
            :: P(i, it) == 2 -> carries = 1
            :: else
            fi;
            it++
       :: else -> it = 0; break
       od;
       round_any[r] = round_any[r] | mine;
       if
       :: joined[i] -> skip                             /* counts as ready for everything */
       :: else -> round_ready[r] = round_ready[r] & mine; round_all_joined[r] = 0
       fi;
       round_carried[r] = round_carried[r] || carries;
       round_in[r]++;
       if
       :: round_in[r] == N ->
            if
            :: round_locks[r] = 0
            :: (locks < MAXE && !round_carried[r] && !round_all_joined[r]) -> round_locks[r] = 1; locks++
            fi
       :: else
       fi
     };
     atomic {                                           /* and read what came out of it */
       round_in[r] == N ->
       ready = round_ready[r] & round_any[r]; any = round_any[r]; locks_now = round_locks[r]; all_joined = round_all_joined[r];
       carries = 0; mine = 0;
       round_out[r]++;
       if
       :: round_out[r] == N ->
            round_out[r] = 0; round_in[r] = 0; round_ready[r] = 0; round_any[r] = 0;
            round_all_joined[r] = 0; round_carried[r] = 0; round_locks[r] = 0
       :: else
       fi;
       r = 1 - r
     };
     it = 0;
     do
     :: it < ITEMS ->
          if
          :: (ready & BIT(it)) ->
               atomic {
                 gives = (P(i, it) == 1);               /* what is carried has been given */
                 if
                 :: it < BUCKETS && gives -> contribute(it)
                 :: else
                 fi;
                 launch(64 + it, 0, gives, 0);
                 slot = 0; gives = 0
               };
               atomic {
                 launched[(next + WINDOW - 1) % WINDOW] == N ->
                 slot = (next + WINDOW - 1) % WINDOW;
                 if
                 :: it < BUCKETS ->
                      check_all_contributed(it, REDUCED(i, it));
                      REDUCED(i, it) = REDUCED(i, it) + 1;
                      P(i, it) = 0
                 :: else -> P(i, EXTRA) = 0; extra_done[i] = 1
                 fi;
                 finish(slot);
                 slot = 0; gives = 0
               }
          :: else
          fi;
          it++
     :: else -> it = 0; break
     od;
     atomic {
       if
       :: all_joined && (any & BIT(EXTRA)) == (ready & BIT(EXTRA)) -> engine_done[i] = 1; goto ended
       :: else
       fi;
       if
       :: locks_now ->
            locks_now = 0; ready = 0; any = 0; all_joined = 0;
            epoch++; n = 0; verdicts = 0; limit = NONE; base = next;
            goto locked
       :: else -> ready = 0; any = 0; all_joined = 0
       fi
     }
  od;

locked:
  do
  :: atomic {                                           /* launch */
       MAY_LAUNCH && P(i, n % BUCKETS) == 1 ->
       b = n % BUCKETS;
       contribute(b);
       P(i, b) = 3;
       launch(1 + b + 4 * epoch, 0, 1, (P(i, EXTRA) != 0));
       n++;
       b = 0; slot = 0
     }
#ifndef MUT_NOPROXY
  :: atomic {                                           /* launch a proxy */
       MAY_LAUNCH && P(i, n % BUCKETS) != 1 && P(i, n % BUCKETS) != 3 && EVIDENCE ->
       b = n % BUCKETS;
       launch(1 + b + 4 * epoch, !joined[i], 0, 1);
       n++;
       b = 0; slot = 0
     }
#endif
  :: atomic {                                           /* read a verdict */
       verdicts < n && launched[(base + verdicts) % WINDOW] == N ->
       slot = (base + verdicts) % WINDOW;
       b = verdicts % BUCKETS;
       if
       :: given[slot] != 0 && absent[slot] == 0 ->
            check_all_contributed(b, REDUCED(i, b));
            REDUCED(i, b) = REDUCED(i, b) + 1;
            if
            :: P(i, b) == 3 -> P(i, b) = 0
            :: else
            fi
       :: given[slot] != 0 && absent[slot] != 0 ->
#ifdef MUT_DELIVER
            check_all_contributed(b, REDUCED(i, b));
            REDUCED(i, b) = REDUCED(i, b) + 1;
#endif
            if
#ifdef MUT_DELIVER
            :: P(i, b) == 3 -> P(i, b) = 0
#elif defined(MUT_NOCARRY)
            :: P(i, b) == 3 -> P(i, b) = 1
#else
            :: P(i, b) == 3 -> P(i, b) = 2
#endif
            :: else
            fi
       :: else                                          /* nobody gave anything: nothing has happened */
       fi;
       if
#ifdef MUT_NOLAG
       :: flagged[slot] && limit == NONE -> limit = n
#else
       :: flagged[slot] && limit == NONE -> limit = verdicts + D
#endif
       :: else
       fi;
       verdicts++;
       finish(slot);
       b = 0; slot = 0
     }
  :: atomic {
       limit != NONE && verdicts >= limit && verdicts == n ->
       changed[i] = 1; n = 0; verdicts = 0; limit = NONE; base = 0;
       goto negotiated
     }
  od;

ended: skip
}

#define SUBMIT(b) atomic { P(i, b) == 0 -> P(i, b) = 1; changed[i] = 1 }
#define WAIT(b) \
  atomic { \
    if \
    :: P(i, b) != 0 -> waits_for[i] = b + 1; P(i, b) == 0; waits_for[i] = 0 \
    :: else \
    fi \
  }
#define WAIT_ALL atomic { waits_for[i] = 3; (P(i, 0) == 0 && P(i, 1) == 0); waits_for[i] = 0 }

proctype application(byte i) {
  byte k = 0;
  bool extra = 0;

  do
  :: k < K ->
     if
     :: (EXTRAS && !extra) -> atomic { P(i, EXTRA) = 1; changed[i] = 1; extra = 1 }
     :: skip
     fi;
     if
     :: skip
     :: JOINS -> break
     fi;
     if
     :: waits_first[k] != 2 -> SUBMIT(0); SUBMIT(1); WAIT_ALL
     :: (WAITS && waits_first[k] != 2) -> SUBMIT(1); SUBMIT(0); WAIT_ALL
     :: (WAITS && waits_first[k] == 0) -> SUBMIT(0); WAIT(0); SUBMIT(1); WAIT_ALL
     :: (WAITS && waits_first[k] == 1) -> SUBMIT(1); WAIT(1); SUBMIT(0); WAIT_ALL
     :: (OUTSIDE && i == 0 && waits_first[k] == 2) -> SUBMIT(0); SUBMIT(1); WAIT(1); signalled[k] = 1; WAIT_ALL
     :: (OUTSIDE && i != 0 && waits_first[k] == 2) -> SUBMIT(1); signalled[k]; SUBMIT(0); WAIT_ALL
     fi;
     k++
  :: else -> break
  od;
  atomic {
    k = 0;
    if
    :: (EXTRAS && !extra) -> P(i, EXTRA) = 1
    :: else
    fi;
    extra = 0; joined[i] = 1; changed[i] = 1
  };
  atomic { engine_done[i]; assert(extra_done[i] || !EXTRAS) }
}

init {
  byte j = 0;
  do
  :: j < K ->
     if
     :: waits_first[j] = 0
     :: WAITS -> waits_first[j] = 1
     :: OUTSIDE -> waits_first[j] = 2
     fi;
     j++
  :: else -> break
  od;
  atomic {
    j = 0;
    do
    :: j < N -> run engine(j); run application(j); j++
    :: else -> break
    od
  }
}
