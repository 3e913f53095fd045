/* Sleeping and waking on one direction: publish against arm, release against arm, shared doorbell, death.
 *
 * One thread sleeps on the futex (blocking recv), two on the doorbell (poll, epoll), all in one process; S
 * sleeps for room on the futex. The keeper of R turns the death of S into a wake-up of futex sleepers.
 * A futex is the kernel's: wait compares and sleeps in one step, wake releases whoever sleeps then.
 * Spin's memory is sequentially consistent; a store that is still in the store buffer while the next load
 * runs is the same as the two swapped, and that is what the M_*_NO_FENCE mutants do.
 *
 * Checked: nobody sleeps while there is something for him (invalid end state), all bytes in order. Bounds:
 * K bytes, ring CAP, S sleeps when less than DEMAND is free, R wakes it when THIRD is free.
 */
#ifndef K
#define K 5
#endif
#ifndef CAP
#define CAP 3
#endif
#ifndef THIRD
#define THIRD 1
#endif
#ifndef DEMAND
#define DEMAND 1
#endif
#define FUTEX 1
#define DOORBELL 2

byte tail, head;
byte rx_sleep, rx_bell, tx_bell; bool tx_sleep;
bool doorbell;                      /* unread bytes in the socket, yes or no */
bool rx_waiting, tx_waiting;        /* asleep in futex(2) */
bool rx_lock;
bool fin, hup;                      /* hup: the sticky flag in R's stream */
bool kill_s, s_dead;
byte watching;                      /* DISARM: who is linked to the stream, asleep on its doorbell or about to be */

/* 32 bits in C++: a wrap between a load and the wait behind it needs 2^32 wakes; not modelled. */
inline bump(bell) { bell++ }
inline futex_wait(bell, waiting) {
  atomic { if :: bell == seen -> waiting = true :: else fi };
  !waiting
}

/* --- sender ----------------------------------------------------------------------------------------- */
inline wake_rx(bits) {
  if
  :: bits & FUTEX -> bump(rx_bell); rx_waiting = false
  :: else
  fi;
  if
  :: bits & DOORBELL -> doorbell = true
  :: else
  fi
}

inline publish() {
#ifdef M_PUBLISH_NO_FENCE
  b = rx_sleep; tail++; rx_sleep = 0;
#else
  tail++;                               /* then the fence, then: */
  atomic { b = rx_sleep; rx_sleep = 0 };
#endif
  wake_rx(b); b = 0
}

proctype S() {
  byte seen, b, h;
  {
    do
    :: tail == K -> break
    :: tail < K ->
       h = head;
       if
       :: CAP - (tail - h) >= DEMAND -> publish()
       :: else ->
          seen = tx_bell;
          tx_sleep = true;
#ifndef M_TX_CACHED_HEAD
          h = head;
#endif
          if
          :: CAP - (tail - h) >= DEMAND
          :: else -> futex_wait(tx_bell, tx_waiting)
          fi
       fi;
       seen = 0; h = 0
    od;
    /* No FIN while bytes are unread: it wakes everybody and would hide a lost wake-up. */
    (head == K);
    fin = true;
    b = FUTEX | DOORBELL; wake_rx(b)
  } unless { kill_s -> skip };
  tx_waiting = false; s_dead = true     /* the doorbell hangs up */
}

proctype Keeper() {
  s_dead;
#ifdef M_KEEPER_SILENT
  hup = true
#else
#ifdef M_FLAG_AFTER_BELL
  bump(rx_bell); rx_waiting = false; hup = true
#else
  hup = true; bump(rx_bell); rx_waiting = false
#endif
#endif
}

/* --- receivers -------------------------------------------------------------------------------------- */
#define READABLE (head < tail || fin || hup)

/* Takes at most one byte; `over` on the end of the stream. */
inline try_read() {
  atomic { !rx_lock -> rx_lock = true };
  e = (fin || hup);                     /* before the ring: EOF only after the last byte */
  if
  :: head < tail ->
     head++;
     /* Level, not edge: "a third is free now". */
#ifdef M_EDGE_WAKE
     if :: CAP - (tail - head) == THIRD ->
#else
     if :: CAP - (tail - head) >= THIRD ->
#endif
        atomic { d = tx_sleep; tx_sleep = false };
        if :: d -> bump(tx_bell); tx_waiting = false :: else fi
     :: else
     fi;
     d = false; got = true
  :: head == tail -> got = false; over = e
  fi;
  e = false;
  rx_lock = false
}

proctype OnFutex() {
  byte seen; bool got, over, d, e;
  do
  :: over -> break
  :: !over ->
     try_read();
     if
     :: got || over
     :: else ->
#if !defined(M_BELL_LATE) && !defined(M_BELL_AFTER_ARM)
        seen = rx_bell;
#endif
        atomic { rx_sleep = rx_sleep | FUTEX };
#ifdef M_BELL_AFTER_ARM
        seen = rx_bell;
#endif
        if
#ifndef M_RX_NO_RECHECK
        :: READABLE
#endif
        :: else ->
#ifdef M_BELL_LATE
           seen = rx_bell;
#endif
           futex_wait(rx_bell, rx_waiting)
        fi;
        seen = 0
     fi
  od
}

/* An epoll instance that is awake takes back what it armed to sleep: it looks by itself. The bit is one for all who
 * sleep on this doorbell, so not where others do; and one who came in between is told, as if his ring had been taken. */
inline rouse() {
  if
  :: watching == 1 ->
     atomic { rx_sleep = rx_sleep & ~DOORBELL };
#ifndef M_DISARM_BLIND
     if
     :: watching == 1
     :: else -> atomic { rx_sleep = rx_sleep | DOORBELL }; doorbell = true
     fi
#endif
  :: else
  fi
}

/* `fickle`: may stop reading after any byte, as a thread does that has other work. With DISARM it is an epoll
 * instance, linked for good; the other is a thread in poll, which links itself for each wait. */
proctype OnDoorbell(bool fickle) {
  bool got, over, d, e;
#ifdef DISARM
  if :: fickle -> watching++ :: else fi;
#endif
  do
  :: over -> break
  :: got && fickle -> break
  :: !over ->
     try_read();
     if
     :: got || over ->
#ifdef DISARM
        if :: fickle -> rouse() :: else fi
#else
        skip
#endif
     :: else ->
#if defined(DISARM) && !defined(M_LINK_LATE)
        if :: !fickle -> watching++ :: else fi;
#endif
#ifndef M_DRAIN_ON_WAKE
        /* Empty: only now are old rings worthless. An earlier ring may also have taken the arm bit of a
         * brother who is not in poll yet: drain, arm, look again, and ring for all if there is something. */
        doorbell = false;
#endif
#ifndef M_DRAIN_NO_ARM
        atomic { rx_sleep = rx_sleep | DOORBELL };
#endif
#ifdef M_LINK_LATE
        if :: !fickle -> watching++ :: else fi;
#endif
        if
        :: READABLE ->
#if !defined(M_DRAIN_NO_RING) && !defined(M_DRAIN_ON_WAKE)
           doorbell = true
#else
           skip
#endif
        :: else ->
#ifdef M_DRAIN_NO_ARM
           atomic { rx_sleep = rx_sleep | DOORBELL };
           if :: READABLE -> skip :: else -> (doorbell || s_dead) fi
#else
           (doorbell || s_dead);
#ifdef M_DRAIN_ON_WAKE
           doorbell = false
#endif
#endif
        fi
#ifdef DISARM
        ; if :: !fickle -> watching-- :: else fi
#endif
     fi
  od
}

init {
  atomic { run S(); run Keeper();
#ifndef NO_FUTEX
           run OnFutex();
#endif
#ifndef ONE_BELL
           run OnDoorbell(true);
#endif
#ifdef FICKLE
           run OnDoorbell(true) };
#else
           run OnDoorbell(false) };
#endif
#ifdef CRASH
  kill_s = true
#endif
}
