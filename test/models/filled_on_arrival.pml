/* Inputs that are in their buffers when a rank arrives: Note [Filled on arrival] in core/backend/segment/pipeline.h, docs/models.md.
 *
 * The members run COLLECTIVES one after the other, each of one or two rounds, and round r uses the buffers r % 2. A collective
 * runs as the pipeline has it, with counters of the rounds that are filled and released (segment_pipeline.pml), or, if it has
 * one round and the last one had too, its members fill their buffers, arrive, and read when all have arrived. A member may leave
 * instead of arriving; then all members run that collective by the counters.
 *
 * Options: N members, COLLECTIVES.
 * Mutants, each of which must fail:
 *   MUT_ROUNDS   fills ahead also after a collective of two rounds
 *   MUT_EARLY    fills ahead while the member still runs the collective before
 *   MUT_ARRIVE   arrives before it has filled
 *   MUT_RELEASE  takes the rounds of the last collective for released, too
 */
#ifndef N
#define N 2
#endif
#ifndef COLLECTIVES
#define COLLECTIVES 4
#endif

byte rounds[COLLECTIVES];       /* chosen by the program, alike on all members */
byte filled[N], released[N], arrived[N];
bool leaves[N];
byte buffer[2 * N];             /* the number of the round that is in it, plus one */
#define BUFFER(r, q) buffer[((r) % 2) * N + (q)]
byte ended;

#if N == 2
#define EVERY(p) (p(0) && p(1))
#define SOME(p) (p(0) || p(1))
#else
#define EVERY(p) (p(0) && p(1) && p(2))
#define SOME(p) (p(0) || p(1) || p(2))
#endif
#define THERE(q) (arrived[q] > c)
#define LEAVES(q) (arrived[q] == c + 1 && leaves[q])
#define FILLED(q) (filled[q] > d)
#define FREE(q) (released[q] + 1 >= f)

/* Reading takes time: what is read must be there when it begins, and still when it ends. */
inline read(r) {
  q = 0;
  do
  :: q < N -> assert(BUFFER(r, q) == r + 1); q++
  :: else -> break
  od;
  q = 0;
  do
  :: q < N -> assert(BUFFER(r, q) == r + 1); q++
  :: else -> break
  od;
  q = 0
}

#ifdef MUT_ROUNDS
#define AHEAD (c > 0 && rounds[c] == 1)
#else
#define AHEAD (c > 0 && rounds[c] == 1 && rounds[c - 1] == 1)
#endif

proctype member(byte i) {
  byte c = 0, first = 0, f = 0, d = 0, q = 0, known = 0;
  bool runs = false, early = false;

  do
  :: c < COLLECTIVES ->
       runs = true;
       if
       :: AHEAD ->
#ifdef MUT_ARRIVE
            arrived[i] = c + 1;
            BUFFER(first, i) = first + 1;
#else
            if
            :: !early -> BUFFER(first, i) = first + 1
            :: else -> early = false
            fi;
            if                                  /* arrives, ready or leaving */
            :: atomic { leaves[i] = true; arrived[i] = c + 1 }
            :: atomic { leaves[i] = false; arrived[i] = c + 1 }
            fi;
#endif
            if
            :: SOME(LEAVES)
            :: EVERY(THERE) && !SOME(LEAVES) ->
#ifdef MUT_EARLY
                 if
                 :: c + 1 < COLLECTIVES && rounds[c + 1] == 1 ->
                      BUFFER(first + 1, i) = first + 2; early = true;
                      if
                      :: c + 2 < COLLECTIVES && rounds[c + 2] == 1 -> BUFFER(first + 2, i) = first + 3
                      :: else
                      fi
                 :: else
                 fi;
#endif
                 read(first);
#ifdef MUT_RELEASE
                 known = first + 1;
#else
                 known = first;
#endif
                 first++;
                 released[i] = first;           /* told without a look at the others */
                 runs = false
            fi
       :: else
       fi;
       if
       :: runs ->
            f = first; d = first;
            do
            :: f < first + rounds[c] && (f + 1 <= 2 || f <= known + 1 || EVERY(FREE)) ->
                 BUFFER(f, i) = f + 1;
                 f++;
                 filled[i] = f
            :: d < f && EVERY(FILLED) ->
                 read(d);
                 d++;
                 released[i] = d
            :: d == first + rounds[c] -> break
            od;
            first = d
       :: else
       fi;
       c++
  :: else -> break
  od;
  ended++
}

init {
  byte i;
  for (i : 0 .. COLLECTIVES - 1) {
    if
    :: rounds[i] = 1
    :: rounds[i] = 2
    fi
  }
  atomic {
    for (i : 0 .. N - 1) {
      run member(i)
    }
    i = 0
  }
  ended == N
}
