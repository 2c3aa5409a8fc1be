/* A change in order of an elastic job (core/member): at which commit do all ranks stop?
 * Each rank has a program (steps: an operation of all ranks, then a commit: Member::begin_commit()) and a carrier of
 * messages, which runs beside it. The coordinator is in hvdrun.
 *   Prepare -> every rank answers Begun with the commits that its program has begun, n; later commits wait
 *   Target = max(n) + 1 -> every program stops at exactly that commit
 * Operations may complete at different times on different ranks. With ASYNC a program has one more in flight across its
 * commit.
 * Mutants: MUT_MAX the target is max(n); MUT_NOBLOCK commits do not wait; MUT_FIRST a program stops at its first commit
 * after Prepare. */
#ifndef N
#define N 2
#endif
#ifndef STEPS
#define STEPS 4
#endif
byte begun[N];              /* commits begun by the program */
byte submitted[N];          /* operations submitted: one per step */
bool frozen[N];             /* its carrier has answered */
byte answered[N];
byte target[N];             /* 0: not known here */
byte stopped_at[N];
bool noticed[N];
chan to_carrier[N] = [2] of { byte, byte };   /* 1 prepare, 2 target t */
chan to_coord = [N] of { byte };
bool over[N];

inline all_submitted(s, r) { /* the operation of step s completes here when all ranks have submitted it */
  (submitted[0] >= s && submitted[1] >= s
#if N > 2
   && submitted[2] >= s
#endif
  )
}
proctype program(byte me) {
  byte s = 1;
  do
  :: s <= STEPS ->
     if :: submitted[me] < s -> submitted[me] = s :: else fi;
     all_submitted(s, me);
#ifdef ASYNC
     if :: s < STEPS -> submitted[me] = s + 1 :: true fi;  /* an operation of the next step is under way across the commit */
#endif
#ifdef MUT_FIRST
     begun[me] = s;
     if :: noticed[me] -> stopped_at[me] = s; break :: !noticed[me] fi;
#else
     atomic { begun[me] = s; }
 #ifndef MUT_NOBLOCK
     /* begun is written before frozen is read, as the carrier writes frozen before it reads begun: one of them sees the other */
     if
     :: frozen[me] && answered[me] < s -> (target[me] != 0)
     :: else
     fi;
 #endif
     if :: target[me] != 0 && target[me] == s -> stopped_at[me] = s; break
        :: target[me] != 0 && target[me] < s -> assert(false)   /* has passed the point */
        :: else fi;
#endif
     s++
  :: else -> break
  od;
  over[me] = true
}
proctype carrier(byte me) {
  byte k, t;
  do
  :: to_carrier[me] ? k, t ->
     if
     :: k == 1 -> noticed[me] = true; atomic { frozen[me] = true; answered[me] = begun[me]; } to_coord ! answered[me]
     :: k == 2 -> target[me] = t; break
     fi
  od
}
proctype coordinator() {
  byte i = 0, n, m = 0;
  do :: i < N -> to_carrier[i] ! 1, 0; i++ :: else -> break od;
  i = 0;
  do :: i < N -> to_coord ? n; if :: n > m -> m = n :: else fi; i++ :: else -> break od;
#ifdef MUT_MAX
  if :: m == 0 -> m = 1 :: else fi;
#else
  m = m + 1;
#endif
  i = 0;
  do :: i < N -> to_carrier[i] ! 2, m; i++ :: else -> break od
}
init {
  byte i = 0;
  atomic { do :: i < N -> run program(i); run carrier(i); i++ :: else -> break od; run coordinator() }
  i = 0;
  do :: i < N -> over[i]; i++ :: else -> break od;
  /* all stopped at one commit, or the program ended first on all */
  assert(stopped_at[0] == stopped_at[1]);
#if N > 2
  assert(stopped_at[0] == stopped_at[2]);
#endif
}
