/* The token, the doorbell and who sleeps, as core/engine/runtime.cpp does it: docs/models.md.
 *
 * One rank: its engine thread, WAITERS threads that submit an operation each and wait for it, and a thread that submits one and then only
 * computes. An operation is submitted, then sent by whoever has the token, then answered by another rank, and done when whoever has the token
 * has seen the answer. A step of the engine first sends and then receives, and other threads run in between. No sleep here ever ends by
 * itself, so what is lost is a deadlock.
 *
 * Checked: every operation gets done, though the threads that drove leave when their own is.
 *
 * POLL: answers ring no doorbell (other hosts); a thread that sleeps after a step of its own then looks again by and by
 * INLINE: the thread that only computes drives after its submission
 * COMPUTES: whether there is that thread
 * AFTER: the second waiter submits when the first sleeps, and the other rank answers the first after the second only
 *
 * Mutants, each of which must fail:
 *   MUT_COUNT   a waiter that drove counts itself out after it has rung
 *   MUT_SILENT  a waiter that did not drive leaves without ringing
 *   MUT_UNHEARD a thread that is to wait does not ring for the one that drives
 *   MUT_YIELD   the engine thread notes that it has yielded only after it has looked at who has the token
 *   MUT_INLINE  a thread that drove after its submission does not ring for an engine thread that has yielded
 */
#ifndef WAITERS
#define WAITERS 2
#endif
#ifndef POLL
#define POLL 0
#endif
#ifndef INLINE
#define INLINE 0
#endif
#ifndef AFTER
#define AFTER 0
#endif

#ifndef COMPUTES
#define COMPUTES 1
#endif

#define OPERATIONS (WAITERS + COMPUTES)  /* the last is waited for by nobody */
#define IDLE 0
#define SUBMITTED 1
#define SENT 2
#define ANSWERED 3
#define DONE 4
byte op[3];

byte rings, drivers, waiters;
bool taken, stood_back, standby_asleep, driver_asleep;

#define UNSEEN(i) (op[i] == SUBMITTED || op[i] == ANSWERED)
#if WAITERS == 2
#define ANY_UNSEEN (UNSEEN(0) || UNSEEN(1) || UNSEEN(2))
#define UNDER_WAY(i) (op[i] != IDLE && op[i] != DONE)
#define BUSY (UNDER_WAY(0) || UNDER_WAY(1) || UNDER_WAY(2))
#else
#define ANY_UNSEEN (UNSEEN(0) || UNSEEN(1))
#define UNDER_WAY(i) (op[i] != IDLE && op[i] != DONE)
#define BUSY (UNDER_WAY(0) || UNDER_WAY(1))
#endif
#define WORK_LEFT (BUSY || POLL)

inline ring() {
  rings++;
  d_step {
    if
    :: standby_asleep && drivers == 0 -> standby_asleep = false
    :: else
    fi;
    driver_asleep = false
  }
}

inline send_all() {
  d_step {
    k = 0;
    do
    :: k < OPERATIONS ->
       if
       :: op[k] == SUBMITTED -> op[k] = SENT; moved = true
       :: else
       fi;
       k++
    :: else -> break
    od;
    k = 0
  }
}

inline receive_all() {
  d_step {
    k = 0;
    do
    :: k < OPERATIONS ->
       if
       :: op[k] == ANSWERED -> op[k] = DONE; moved = true
       :: else
       fi;
       k++
    :: else -> break
    od;
    k = 0
  }
}

inline step() {
  moved = false;
  send_all();
  receive_all()
}

/* The engine thread takes the token unless another thread has it or waits: leave. */
inline take() {
#ifndef MUT_YIELD
  stood_back = true;
#endif
  d_step {
    leave = taken || waiters > 0;
    if
    :: leave
    :: else -> taken = true
    fi
  }
#ifndef MUT_YIELD
  if
  :: leave
  :: else -> stood_back = false
  fi
#else
  stood_back = leave
#endif
}

proctype standby() {
  byte ticket, k;
  bool moved, leave;

look:
  ticket = rings;
  take();
  if
  :: leave ->
     d_step {
       if
       :: rings == ticket -> standby_asleep = true
       :: else
       fi
     }
end_stood_back:
     !standby_asleep;
     goto look
  :: else
  fi;
drive:
  ticket = rings;
  step();
  leave = waiters > 0;
  if
  :: moved && !leave -> goto drive
  :: else
  fi;
  taken = false;
  if
  :: leave -> goto look
  :: else
  fi;
#if POLL
end_polls:
  ANY_UNSEEN || rings != ticket;
#else
  d_step {
    if
    :: rings == ticket -> standby_asleep = true
    :: else
    fi
  }
end_sleeps:
  !standby_asleep;
#endif
  take();
  if
  :: leave -> goto look
  :: else -> goto drive
  fi
}

proctype waiter(byte i) {
  byte ticket, k;
  bool moved, must_ring, work_left;

#if AFTER
  if
  :: i == 1 -> driver_asleep
  :: else
  fi;
#endif
  op[i] = SUBMITTED;
  if
  :: op[i] == DONE -> goto left
  :: else
  fi;
  d_step { waiters++; must_ring = taken };
#ifndef MUT_UNHEARD
  if
  :: must_ring -> ring()
  :: else
  fi;
#endif
  d_step {
    op[i] == DONE || !taken ->
    if
    :: op[i] == DONE -> waiters--; must_ring = (waiters == 0)
    :: else -> taken = true
    fi
  }
  if
  :: op[i] == DONE ->
#ifndef MUT_SILENT
     if
     :: must_ring -> ring()
     :: else
     fi;
#endif
     goto left
  :: else
  fi;

  drivers++;
  do
  :: op[i] == DONE -> break
  :: else ->
     ticket = rings;
     step();
     if
     :: moved || op[i] == DONE
     :: else ->
#if POLL
        ANY_UNSEEN || rings != ticket
#else
        d_step {
          if
          :: rings == ticket -> driver_asleep = true
          :: else
          fi
        }
        !driver_asleep
#endif
     fi
  od;
  if
  :: rings != ticket -> ticket = rings; step()
  :: else
  fi;
  work_left = WORK_LEFT;
  d_step {
    taken = false;
#ifndef MUT_COUNT
    waiters--
#endif
  }
  drivers--;
  if
  :: rings != ticket -> ring()
  :: else
  fi;
  if
  :: work_left -> ring()
  :: else
  fi;
#ifdef MUT_COUNT
  waiters--;
#endif
left:
  skip
}

proctype computes() {
  byte ticket, k;
  bool moved, drives, must_ring;

  op[WAITERS] = SUBMITTED;
#if INLINE
  d_step {
    drives = !taken;
    taken = true
  }
  if
  :: drives ->
     drivers++;
     moved = true;
     do
     :: moved -> ticket = rings; step()
     :: else -> break
     od;
     must_ring = WORK_LEFT;
     taken = false;
     drivers--;
     if
     :: rings != ticket -> ring()
     :: else
     fi;
#ifndef MUT_INLINE
     if
     :: must_ring && stood_back -> ring()
     :: else
     fi
#endif
  :: else -> ring()
  fi;
#else
  ring();
#endif
  op[WAITERS] == DONE /* it asks, and calls nothing */
}

proctype other_rank(byte i) {
#if AFTER
  if
  :: i == 0 -> op[1] == DONE
  :: else
  fi;
#endif
  d_step { op[i] == SENT -> op[i] = ANSWERED }
#if !POLL
  ring()
#endif
}

init {
  byte k = 0;
  atomic {
    run standby();
#if COMPUTES
    run computes();
#endif
    do
    :: k < WAITERS -> run waiter(k); k++
    :: else -> break
    od;
    k = 0;
    do
    :: k < OPERATIONS -> run other_rank(k); k++
    :: else -> break
    od
  }
}
