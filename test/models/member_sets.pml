/* Process sets that their members make alone, as core/negotiation does it: docs/models.md.
 *
 * Three ranks make sets under one name. A list of ranks is a mask. Each rank makes calls one after the other; a call submits a list and waits
 * for its plan. The coordinator counts the ranks that have submitted each list, plans a complete one, and ends the lists of a cycle of waits
 * with an error. Reports and plans travel in order, and are under way for any time.
 *
 * Checked: a plan fits the rank that applies it, and gives it at most one error; an error ends only lists whose ranks wait for each other; at
 * the end of all activity no lists wait for each other, and in PROGRAM 0 no rank waits for a use that has failed.
 *
 * PROGRAM: 0 each rank makes one call, of any list; 1 two calls, of any lists; 2 all ranks make the lists of 0 and 1, of 1 and 2, and of all,
 *          in this order: no error, and all end; 3 one call of any list, and after an error calls of the list of all
 *
 * Mutants, each of which must fail:
 *   MUT_CYCLE     the coordinator does not look for cycles
 *   MUT_TWO       a rank makes two sets of the name at the same time
 *   MUT_CROSS     a request that crosses the error of its list counts for the next use
 *   MUT_TOMBSTONE a rank that had not submitted a failed list waits for it afterwards
 *   MUT_SPLIT     the lists of a cycle fail in several plans
 *   MUT_INFORMED  ranks that get the error by another list get it again at their next call
 */
#ifndef PROGRAM
#define PROGRAM 0
#endif
#define N 3
#define ALL 7
#define BIT(r) (1 << (r))
#define OTHERS(r) (ALL & ~BIT(r))

chan reports = [8] of { byte, byte, byte };  /* rank, list, the last plan that it had applied */
chan plans[N] = [8] of { byte, byte, byte, byte, byte, byte, byte };  /* a list that is made; lists that failed, each with the ranks in missing */

byte reported[8];  /* by list: the ranks that have submitted it */
byte planned;      /* number of plans */
byte failed_by[N * 8];  /* by rank and list: the last plan with a failure that the rank's earlier requests belong to */
byte waits[N];     /* by rank: the list of its call, 0: none */
byte second[N];    /* MUT_TWO: the list of another call */
byte tombstones[N * 8];
byte applied[N];
bool failed[8];    /* by list: ever */

#define LACKS(a) ((a) & ~reported[a])
#define AFTER(a, b) (reported[a] != 0 && reported[b] != 0 && (LACKS(a) & reported[b]) != 0)

inline plan(x, x1, y1, x2, y2, x3, y3) {
  planned++;
  plans[0]!x, x1, y1, x2, y2, x3, y3; plans[1]!x, x1, y1, x2, y2, x3, y3; plans[2]!x, x1, y1, x2, y2, x3, y3
}

/* Forgets a list of the cycle. `informed` get the error by some list of it. */
inline fail(x, y, informed) {
  y = LACKS(x);
#ifndef MUT_INFORMED
  y = y & ~informed;
#endif
  if :: y & 1 -> failed_by[x] = planned + 1 :: else fi;
  if :: y & 2 -> failed_by[8 + x] = planned + 1 :: else fi;
  if :: y & 4 -> failed_by[16 + x] = planned + 1 :: else fi;
  reported[x] = 0;
  failed[x] = true
}

/* Those who have submitted a list of the cycle wait for it and nothing else. */
inline check_stuck(x) {
  assert(PROGRAM != 2);
  assert(!(reported[x] & 1) || waits[0] == x);
  assert(!(reported[x] & 2) || waits[1] == x);
  assert(!(reported[x] & 4) || waits[2] == x)
}

proctype Coordinator() {
  byte rank, list, as_of, a, b, m1, m2, m3, informed;
end:
  do
  :: atomic { reports?rank, list, as_of ->
#ifndef MUT_CROSS
      if
      :: as_of < failed_by[rank * 8 + list] -> goto end
      :: else
      fi;
#endif
      assert(!(reported[list] & BIT(rank)));
      reported[list] = reported[list] | BIT(rank);
      if
      :: reported[list] == list -> reported[list] = 0; plan(list, 0, 0, 0, 0, 0, 0)
      :: else ->
#ifndef MUT_CYCLE
        /* A cycle has at most three lists, as each has another rank. */
        a = 1;
        do
        :: a == 8 -> break
        :: else ->
          if
          :: AFTER(list, a) && AFTER(a, list) ->
            check_stuck(list); check_stuck(a);
            informed = reported[list] | reported[a];
            fail(list, m1, informed); fail(a, m2, informed);
#ifdef MUT_SPLIT
            plan(0, list, m1, 0, 0, 0, 0); plan(0, a, m2, 0, 0, 0, 0);
#else
            plan(0, list, m1, a, m2, 0, 0);
#endif
            break
          :: else
          fi;
          a++
        od;
        a = 1;
        do
        :: a == 8 || reported[list] == 0 -> break
        :: else ->
          b = 1;
          do
          :: b == 8 || reported[list] == 0 -> break
          :: else ->
            if
            :: AFTER(list, a) && AFTER(a, b) && AFTER(b, list) ->
              check_stuck(list); check_stuck(a); check_stuck(b);
              informed = reported[list] | reported[a] | reported[b];
              fail(list, m1, informed); fail(a, m2, informed); fail(b, m3, informed);
              plan(0, list, m1, a, m2, b, m3)
            :: else
            fi;
            b++
          od;
          a++
        od
#else
        skip
#endif
      fi;
      a = 0; b = 0; m1 = 0; m2 = 0; m3 = 0; informed = 0; rank = 0; list = 0; as_of = 0
    }
  od
}

inline apply_error(x, y) {
  if
  :: x != 0 && waits[me] == x -> waits[me] = 0; got++; erred = true
  :: x != 0 && waits[me] != x && (y & BIT(me)) ->
#ifndef MUT_TOMBSTONE
    tombstones[me * 8 + x]++; got++
#else
    skip
#endif
  :: else
  fi
}

/* Applies the next plan. */
inline apply() {
  plans[me]?made, f1, m1, f2, m2, f3, m3 ->
  applied[me]++;
  if
  :: made & BIT(me) ->
    assert(waits[me] == made || second[me] == made);
    if
    :: waits[me] == made -> waits[me] = 0
    :: else -> second[me] = 0
    fi
  :: else
  fi;
  apply_error(f1, m1); apply_error(f2, m2); apply_error(f3, m3);
  assert(got <= 1);
  made = 0; f1 = 0; m1 = 0; f2 = 0; m2 = 0; f3 = 0; m3 = 0; got = 0
}

inline submit(what) {
  erred = false;
  if
  :: tombstones[me * 8 + what] > 0 -> tombstones[me * 8 + what]--; erred = true
  :: else -> waits[me] = what; reports!me, what, applied[me]
  fi
}

inline choose() {
  if
  :: list = BIT(me) | (OTHERS(me) & 1) | (OTHERS(me) & 2)
  :: list = BIT(me) | (OTHERS(me) & 2) | (OTHERS(me) & 4)
  :: list = BIT(me) | (OTHERS(me) & 1) | (OTHERS(me) & 4)
  :: list = ALL
  fi
}

proctype Rank(byte me) {
  byte list, calls, made, f1, m1, f2, m2, f3, m3, got;
  bool erred;
#if PROGRAM == 2
  do
  :: calls == 3 -> break
  :: atomic { apply() }
  :: calls < 3 ->
    atomic {
#ifdef MUT_TWO
      list = (calls == 0 -> (me == 0 -> ALL : 3) : (calls == 1 -> 6 : (me == 0 -> 3 : ALL)));
#else
      list = (calls == 0 -> 3 : (calls == 1 -> 6 : ALL));
#endif
      if
      :: (list & BIT(me)) ->
#ifdef MUT_TWO
        if
        :: waits[me] == 0 -> submit(list)
        :: waits[me] != 0 && second[me] == 0 -> second[me] = list; reports!me, list, applied[me]
        fi
#else
        submit(list)
#endif
      :: else
      fi;
      calls++
    }
#ifdef MUT_TWO
    do
    :: waits[me] == 0 || second[me] == 0 -> break
    :: atomic { apply() }
    od
#else
    do
    :: waits[me] == 0 -> break
    :: atomic { apply() }
    od
#endif
  od;
#else
  do
  :: calls == (PROGRAM == 1 -> 2 : 1) -> break
  :: atomic { apply() }
  :: atomic { calls < (PROGRAM == 1 -> 2 : 1) -> choose(); submit(list); calls++ };
wait:
end_wait:
    do
    :: atomic { waits[me] == 0 -> break }
    :: atomic { apply() }
    od;
#if PROGRAM == 3
    if
    :: atomic { erred -> submit(ALL); goto wait }
    :: else
    fi
#endif
  od;
#endif
end:
  do
  :: atomic { apply() }
  od
}

/* Looks at the state in which no message is under way and no rank can act. */
proctype Judge() {
  byte a, b, c;
end:
  timeout ->
  atomic {
    a = 1;
    do
    :: a == 8 -> break
    :: else ->
      b = 1;
      do
      :: b == 8 -> break
      :: else ->
        assert(a == b || !(AFTER(a, b) && AFTER(b, a)));
        c = 1;
        do
        :: c == 8 -> break
        :: else -> assert(a == b || b == c || a == c || !(AFTER(a, b) && AFTER(b, c) && AFTER(c, a))); c++
        od;
        b++
      od;
      a++
    od;
    assert(PROGRAM != 2 || (waits[0] == 0 && waits[1] == 0 && waits[2] == 0));
    assert(PROGRAM != 0 || ((waits[0] == 0 || !failed[waits[0]]) && (waits[1] == 0 || !failed[waits[1]]) && (waits[2] == 0 || !failed[waits[2]])))
  }
}

init {
  atomic { run Coordinator(); run Rank(0); run Rank(1); run Rank(2); run Judge() }
}
