/* Sleeping for completions of one device: the direct sleeper, sleepers on bells, the keeper.
 *
 * Two threads receive, each on a stream of its own; the device completes K arrivals for each, in any
 * order. Whoever goes to sleep arms the queue and polls once more; the first waits in its own epoll
 * instance, the other on its bell (core/transport/verbs/direct_wait.h). A third thread strikes the
 * bell of stream 0 now and then, as the keeper's line does, without a completion.
 * Kernel: an event wakes the direct instance if somebody waits in it at that moment, else the keeper
 * (EPOLLEXCLUSIVE); a thread that was woken so finds the event when it collects. A futex compares and
 * sleeps in one step. Spin's memory is sequentially consistent; the code is seq_cst where two words
 * are crossed. V_LEAVES_ITS_PLACE: a direct sleeper that left by siglongjmp; the keeper serves.
 *
 * Checked: nobody sleeps while bytes of his have completed (invalid end state). Bounds: K arrivals a
 * stream, STRIKES.
 */
#ifndef K
#define K 1
#endif
#ifndef STRIKES
#define STRIKES 1
#endif
#define NOBODY 2
#define SERVING 3

byte cq[2];                 /* completed, not polled */
byte came[2];               /* polled: the stream's tail */
bool hw_armed; byte events; /* the device's: notify once; unread events of the channel */
bool armed;                 /* Device::armed_ */
bool queue_lock;
bool sleep_word[2]; byte bell[2];
byte sleeping;              /* Device::sleeping_ */
bool on_futex[2];           /* asleep in futex(2) */
byte on_bells;
byte direct = NOBODY;
bool in_epoll, woken;       /* the direct sleeper waits in the kernel; the event woke it */
bool kick;
bool keeper_woken;

inline notify() {
  atomic {
    events++;
    if
    :: in_epoll -> in_epoll = false; woken = true
    :: else -> keeper_woken = true
    fi
  }
}

proctype Hardware() {
  byte left[2];
  left[0] = K; left[1] = K;
  do
  :: left[0] > 0 -> atomic { left[0]--; cq[0]++; if :: hw_armed -> hw_armed = false; notify() :: else fi }
  :: left[1] > 0 -> atomic { left[1]--; cq[1]++; if :: hw_armed -> hw_armed = false; notify() :: else fi }
  :: left[0] == 0 && left[1] == 0 -> break
  od
}

inline strike(s) {
  bell[s]++;
#ifdef M_NO_KICK
  skip;
#else
  if
  :: direct == s -> atomic { kick = true; if :: in_epoll -> in_epoll = false :: else fi }
  :: else
  fi;
#endif
  if
  :: on_bells > 0 -> on_futex[s] = false
  :: else
  fi
}

inline deliver(s) {
  if
  :: cq[s] > 0 ->
     atomic { came[s] = came[s] + cq[s]; cq[s] = 0 };
     if
     :: sleep_word[s] -> sleep_word[s] = false; sleeping--; strike(s)
     :: else
     fi
  :: else
  fi
}

inline poll() {
  atomic { !queue_lock -> queue_lock = true };
  deliver(0); deliver(1);
  queue_lock = false
}

inline arm() {
  if
  :: !armed -> armed = true; hw_armed = true
  :: else
  fi
}

/* Device::on_event() and serve_event(). */
inline serve() {
  atomic { !queue_lock -> queue_lock = true };
  if
  :: events > 0 -> events--; armed = false
  :: else
  fi;
  queue_lock = false;
  poll();
#ifndef M_NO_REARM
  if
  :: sleeping > 0 -> arm()
  :: else
  fi;
#endif
#ifndef M_NO_POLL_AFTER_ARM
  poll()
#else
  skip
#endif
}

proctype Keeper() {
end:
  do
  :: atomic { keeper_woken -> keeper_woken = false };
     serve()
  od
}

proctype Striker() {
  byte n;
  do
  :: n < STRIKES -> n++; strike(0)
  :: n == STRIKES -> break
  od
}

inline sleep_directly() {
  do
  :: true ->
#ifndef M_BELL_UNCHECKED
     if :: bell[me] != seen -> break :: else fi;
#endif
     /* epoll_wait: what is ready is collected; else it waits, and no step lies between. */
     atomic {
       if
       :: kick || events > 0 -> skip
       :: else -> in_epoll = true
       fi
     };
     !in_epoll;
     if
     :: kick -> kick = false
     :: else
     fi;
     if
     :: woken || events > 0 ->
        woken = false;
        direct = SERVING;
        serve();
        direct = me
     :: else
     fi;
#ifdef M_BELL_UNCHECKED
     if :: bell[me] != seen -> break :: else fi;
#endif
  od;
#ifdef V_LEAVES_ITS_PLACE
  skip
#else
  direct = NOBODY
#endif
}

proctype Receiver(byte me) {
  byte taken, seen; bool got_place;
  do
  :: taken == K -> break
  :: taken < K ->
     if
     :: taken < came[me] -> taken++
     :: else ->
        seen = bell[me];
#ifdef M_COUNT_SLEEPING_LATE
        arm();
#endif
        atomic { if :: sleep_word[me] -> skip :: else -> sleep_word[me] = true; sleeping++ fi };
#ifndef M_COUNT_SLEEPING_LATE
        arm();
#endif
#ifndef M_NO_RECHECK
        poll();
#endif
        if
        :: taken < came[me] -> skip
        :: else ->
           atomic {
             if
             :: direct == NOBODY -> direct = me; got_place = true
             :: else -> got_place = false
             fi
           };
           if
           :: got_place -> sleep_directly()
           :: else ->
#ifndef M_COUNT_LATE
              on_bells++;
#endif
              atomic { if :: bell[me] == seen -> on_futex[me] = true :: else fi };
#ifdef M_COUNT_LATE
              on_bells++;
#endif
              !on_futex[me];
              on_bells--
           fi
        fi
     fi
  od
}

init {
  atomic { run Hardware(); run Keeper(); run Striker(); run Receiver(0); run Receiver(1) }
}
