/* The pipeline over the memory that the ranks of a host share: core/backend/segment/pipeline.h.
 *
 * Each member takes ROUNDS rounds through its phases, as the rules of a backend say; a slot holds the number of the round that
 * was put there last. A member that can do nothing sleeps until it is rung. It does not look at everything at once: telling the
 * others, looking who has got how far, and ringing are steps of their own.
 *
 * Options: N members (2 or 3), ROUNDS, RULES: 0 every member reduces all for itself (shm), 1 each reduces a slice for all (shm),
 * 2 with settle and release (hierarchical). docs/models.md lists the mutants, MUT_...
 */
#ifndef N
#define N 2
#endif
#ifndef ROUNDS
#define ROUNDS 4
#endif
#ifndef RULES
#define RULES 1
#endif

#define INPUTS 2
#if RULES == 2
#define RESULTS 3               /* 4 in the code: any number above INPUTS shows the same */
#else
#define RESULTS 2
#endif

/* Rounds that have got through a phase, as the others see them. */
byte told[4 * N];
#define filled 0
#define reduced 1
#define settled 2
#define released 3
#define COUNTER(c, q) told[(c) * N + (q)]
/* What the slots hold: the number of a round, plus one; of results, each member's slice. */
byte input[INPUTS * N], result[RESULTS * N];
#define INPUT(r, q) input[((r) % INPUTS) * N + (q)]
#define RESULT(r, q) result[((r) % RESULTS) * N + (q)]

/* A doorbell: rung since the owner last looked, or not. */
bool rung[N];
bool ended[N];

inline ring() {
  d_step {
    for (q : 0 .. N - 1) {
      if
      :: q != i -> rung[q] = true
      :: else
      fi
    }
    q = 0
  }
}

/* What is told is seen at once (sequentially consistent), or only once this member has looked around: it lies in the store
 * buffer of its core. */
#ifdef MUT_RELAXED
#define TELL(c, n) late_value = n; late = true
#define TOLD(c) d_step { if :: late -> COUNTER(c, i) = late_value; late = false; late_value = 0 :: else fi }
#else
#define TELL(c, n) COUNTER(c, i) = n
#define TOLD(c) skip
#endif

/* Whether all have got as far, this member included. The code looks at one after the other; as nobody ever goes back, that is the
 * same as looking at all at one moment in between. */
#ifdef MUT_RELAXED
#define AT(c, x) (x == i && late -> late_value : COUNTER(c, x))
#else
#define AT(c, x) COUNTER(c, x)
#endif
inline look(c, n) {
  d_step {
    everybody = true;
    do
    :: q < N && everybody -> everybody = (AT(c, q) >= (n)); q++
    :: else -> break
    od;
    q = 0
  }
}
/* Whether another one is so many rounds ahead. */
inline look_for_another(c, n) {
  d_step {
    somebody = false;
    do
    :: q < N && !somebody -> somebody = (q != i && COUNTER(c, q) >= (n)); q++
    :: else -> break
    od;
    q = 0
  }
}

/* Tells that a phase is through, and finds out whether somebody may wait for that. */
inline complete(c, n) {
#ifdef MUT_RING_FIRST
  look(c, n);                                           /* before the others can see it */
  everybody = true;
  ring();
  TELL(c, n)
#else
  TELL(c, n);
#ifdef MUT_SILENT
  everybody = false;
#else
  look(c, n);
#endif
  TOLD(c);
  if
  :: everybody -> awaited = true
  :: else
  fi;
  everybody = false
#endif
}
/* The same for what frees a slot: only a member that is as many rounds ahead waits for it. */
inline complete_and_free(c, n, ahead) {
  TELL(c, n);
  look(c, n);
  if
  :: everybody ->
#ifdef MUT_AHEAD
       look_for_another(filled, n + ahead);
#else
       look_for_another(filled, n + ahead - 1);
#endif
       awaited = awaited || somebody
  :: else
  fi;
  TOLD(c);
  everybody = false; somebody = false
}

inline fill() {
#ifdef MUT_PUBLISH_EARLY
  complete(filled, f + 1);
  INPUT(f, i) = f + 1;
#else
  INPUT(f, i) = f + 1;
  complete(filled, f + 1);
#endif
  f++
}

/* Reading takes time: what is read must be there when it begins, and still when it ends. */
inline check_inputs(r) {
  d_step {
    do
    :: q < N -> assert(INPUT(r, q) == r + 1); q++
    :: else -> break
    od;
    q = 0
  }
}
inline reduce() {
  check_inputs(d);
#if RULES == 1
  RESULT(d, i) = d + 1;
#endif
  check_inputs(d)
}
inline check_result(r) {
  d_step {
    do
    :: q < N -> assert(RESULT(r, q) == r + 1); q++
    :: else -> break
    od;
    q = 0
  }
}

/* The waits of the rules: when a round may go through a phase. */
#ifdef MUT_FILL
#define LAG (INPUTS + 1)        /* one round too early */
#else
#define LAG INPUTS
#endif
#if RULES == 2
#define FREES reduced
#else
#define FREES released
#endif
/* Whether all are through with what the slot of a round held before. */
inline look_at_last_use(c, r, slots) {
  if
  :: r + 1 > slots -> look(c, r + 1 - slots)
  :: else -> everybody = true
  fi
}

proctype member(byte i) {
  byte f = 0, d = 0, s = 0, t = 0, e = 0;               /* rounds filled, reduced, settled, taken, released */
  byte q = 0;
  bool everybody = false, somebody = false, awaited = false, moved = false;
#ifdef MUT_RELAXED
  bool late = false;
  byte late_value = 0;
#endif

  do
  :: e < ROUNDS ->
       rung[i] = false;                                 /* its ticket; from here on a ring ends its sleep */
       do
       :: true ->
            moved = false;
            /* The last phase first. */
#if RULES == 2
            if
            :: e < t ->                                 /* messages leave the result's slot, sooner or later */
                 check_result(e);
                 complete(released, e + 1); e++; moved = true
            :: else
            fi;
            if
            :: !moved && t < s ->
#ifdef MUT_WRONG_PHASE
                 look(reduced, t + 1);
#else
                 look(settled, t + 1);
#endif
                 if
                 :: everybody -> everybody = false; check_result(t); check_result(t); t++; moved = true
                 :: else
                 fi
            :: else
            fi;
            if
            :: !moved && s < d ->                        /* the result comes by a message */
                 RESULT(s, i) = s + 1;
                 complete(settled, s + 1); s++; moved = true
            :: else
            fi;
#elif RULES == 1
            if
            :: t < d ->
#ifdef MUT_WRONG_PHASE
                 look(filled, t + 1);
#else
                 look(reduced, t + 1);
#endif
                 if
                 :: everybody -> everybody = false; check_result(t); check_result(t); t++; e = t;
                           complete_and_free(released, t, INPUTS); moved = true
                 :: else
                 fi
            :: else
            fi;
#endif
            if
            :: !moved && d < f ->
#ifdef MUT_UNFILLED
                 everybody = true;
#else
                 look(filled, d + 1);
#endif
#if RULES == 2 && !defined(MUT_RESULT)
                 if                                     /* who writes to a result's slot asks whether it is free */
                 :: everybody -> look_at_last_use(released, d, RESULTS)
                 :: else
                 fi;
#endif
                 if
                 :: everybody ->
                      everybody = false;
                      reduce();
                      d++; moved = true;
#if RULES == 0
                      t = d; e = d;
                      complete_and_free(released, d, INPUTS)
#elif RULES == 1
                      complete(reduced, d)
#else
                      complete_and_free(reduced, d, INPUTS)
#endif
                 :: else
                 fi
            :: else
            fi;
            if
            :: !moved && f < ROUNDS ->
                 look_at_last_use(FREES, f, LAG);
                 if
                 :: everybody -> everybody = false; fill(); moved = true
                 :: else
                 fi
            :: else
            fi;
            if
            :: moved
            :: else -> break
            fi
       od;
       if
       :: awaited -> awaited = false; ring()
       :: else
       fi;
       if
       :: e < ROUNDS -> rung[i]                         /* sleeps */
       :: else
       fi
  :: else -> break
  od;
  ended[i] = true
}

init {
  byte i;
  atomic {
    for (i : 0 .. N - 1) {
      run member(i)
    }
    i = 0
  }
}
