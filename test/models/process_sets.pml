/* The schedule lock with process sets: docs/models.md.
 *
 * The sets are A = {0, 1} and B = {1, 2}; W is all ranks. Each rank has one stream on which a collective runs until it is complete.
 * Each runs its part of one total order A < B < W in every step. What a rank learns in A or B, that somebody wants to leave, it
 * passes on in W, which closes the step; only W's verdict ends the lock.
 *
 * Mutants, each of which must fail:
 *   MUT_ORDER  rank 1 runs B after W, rank 2 before it
 *   MUT_EARLY  a rank leaves as soon as it sees the wish in A or B
 */
#define STEPS 2

byte in_a[3], in_b[3], in_w[3];           /* launched, by step */
bool leave_a[3], leave_b[3], leave_w[3];  /* somebody wants to leave */
byte left_at[3];
byte negotiating;

/* Once per step and collective, perhaps. */
inline perhaps_wish() {
  if
  :: wish = false
  :: step < STEPS -> wish = true
  fi
}

#define RUN(in, leave, members) \
  atomic { in[step] = in[step] + 1; assert(in[step] <= members); leave[step] = leave[step] || wish; wish = false }; \
  atomic { in[step] == members -> seen = seen || leave[step] }

proctype rank(byte i) {
  byte step = 0;
  bool seen = false, wish = false;

  do
  :: seen = false;
     if
     :: i != 2 -> perhaps_wish(); RUN(in_a, leave_a, 2)
     :: else
     fi;
#ifdef MUT_EARLY
     if
     :: seen -> goto left
     :: else
     fi;
#endif
     if
#ifdef MUT_ORDER
     :: i == 1 -> skip
     :: i == 2 -> perhaps_wish(); RUN(in_b, leave_b, 2)
#else
     :: i != 0 -> perhaps_wish(); RUN(in_b, leave_b, 2)
#endif
     :: else
     fi;
#ifdef MUT_EARLY
     if
     :: seen -> goto left
     :: else
     fi;
#endif
     if
     :: step == STEPS -> wish = true                    /* the end of the run */
     :: else -> perhaps_wish()
     fi;
     wish = wish || seen;
     atomic { in_w[step] = in_w[step] + 1; leave_w[step] = leave_w[step] || wish; wish = false };
     in_w[step] == 3;
#ifdef MUT_ORDER
     if
     :: i == 1 -> perhaps_wish(); RUN(in_b, leave_b, 2)
     :: else
     fi;
#endif
     if
     :: leave_w[step] -> break
     :: else -> step++
     fi
  od;
left:
  left_at[i] = step;
  negotiating++;
  negotiating == 3;                                     /* negotiation needs everybody */
  assert(left_at[0] == left_at[1] && left_at[1] == left_at[2])
}

init {
  atomic { run rank(0); run rank(1); run rank(2) }
}
