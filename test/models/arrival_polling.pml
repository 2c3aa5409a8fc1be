/* Which ranks the last one to arrive at a position wakes: core/negotiation/schedule_replay.h, docs/models.md.
 *
 * Each rank has two words in shared memory: the last position at which it has arrived, and the position whose words it polls.
 * The last rank to arrive rings those that do not poll. A rank that polls stops before it sleeps, and looks once more. A rank
 * that is rung after it has taken its ticket does not sleep.
 *
 * Options: N ranks, K positions.
 * Mutants, each of which must fail:
 *   MUT_SLEEP    a rank that polls sleeps without having stopped
 *   MUT_LOOK     a rank that has stopped sleeps without another look
 */
#ifndef N
#define N 2
#endif
#ifndef K
#define K 3
#endif

byte arrived[N], polled[N];
bool rung[N];
byte ended;

/* The words may be read one by one: a rank that has arrived stays so. */
inline look() {
  all_here = true;
  for (q : 0 .. N - 1) {
    if
    :: arrived[q] < position -> all_here = false
    :: else
    fi
  }
  q = 0
}

#define AWAKE(q) (polled[q] >= position)
inline ring_others() {
  for (q : 0 .. N - 1) {
    if
    :: q != i && !AWAKE(q) -> rung[q] = true
    :: else
    fi
  }
  q = 0
}

proctype rank(byte i) {
  byte position = 1, q = 0;
  bool all_here = false, polls = false, ticket = false;

  do
  :: position <= K ->
       if
       :: polls = true
       :: polls = false
       fi;
       polled[i] = (polls -> position : 0);
       arrived[i] = position;
       look();
       if
       :: all_here -> ring_others()
       :: else
       fi;
       do
       :: all_here -> break
       :: else ->
            if
            :: rung[i] = false; look()          /* takes a ticket, and looks */
            :: polls ->                         /* to sleep: stops first */
#ifndef MUT_SLEEP
                 polled[i] = 0;
#endif
                 polls = false;
#ifdef MUT_LOOK
                 rung[i]
#else
                 rung[i] = false; look()
#endif
            :: !polls -> rung[i] = false; look();
                 if
                 :: all_here
                 :: else -> rung[i]             /* sleeps */
                 fi
            fi
       od;
       all_here = false;
       position++
  :: else -> break
  od;
  ended++
}

init {
  byte i;
  atomic {
    for (i : 0 .. N - 1) {
      run rank(i)
    }
    i = 0
  }
  ended == N
}
