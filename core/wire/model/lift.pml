/* The lift of one direction while threads are inside kernel calls: the two gates, ready, start.
 *
 * Several threads send and several receive. A raw call is three steps, as in the C++: enter the gate, the
 * kernel call (it may block for ever), then count the bytes and leave the gate. The gate word is a number
 * of callers inside, or MANAGED; it becomes MANAGED only by compare-exchange from 0. After that a thread
 * works under the direction's lock by the dual rule.
 *
 * Checked: bytes are given in the order in which they were taken, all of them; no thread hangs. Bounds: K
 * bytes, two threads on each side, ring CAP, kernel buffer TCPCAP; S may END at any time and go on raw.
 */
#ifndef K
#define K 4
#endif
#define CAP 2
#define TCPCAP 2
#define MANAGED 9

chan tcp = [TCPCAP] of { byte };
byte ring[CAP];
byte tail, head, start;      /* start = N + 1 */
bool ready, ended; byte ended_at;
byte tx_gate, rx_gate;
bool tx_lock, rx_lock;
byte counted_tx, counted_rx; /* what the library has counted: it lags behind the kernel */
byte taken, given;           /* the truth */

inline lock(l) { atomic { !l -> l = true } }
inline unlock(l) { l = false }
inline give(value) { d_step { assert(value == given); given++ } }

/* Any thread may do it, at its next call; only one wins the exchange. */
inline try_start() {
  if
  :: ready ->
     lock(tx_lock);
     if
#ifdef M_START_WITH_SENDERS
     :: tx_gate != MANAGED -> tx_gate = MANAGED; start = counted_tx + 1
#else
     :: atomic { tx_gate == 0 -> tx_gate = MANAGED }; start = counted_tx + 1
#endif
     :: else
     fi;
     unlock(tx_lock)
  :: else
  fi
}

proctype Sender() {
  bool raw;
  do
  :: taken == K -> break
  :: taken < K ->
     try_start();
     atomic {
       if
       :: tx_gate != MANAGED -> tx_gate++; raw = true
       :: else -> raw = false
       fi
     };
     if
     :: raw ->
        if
        :: atomic { taken < K && nfull(tcp) -> tcp!taken; taken++ };
#ifdef M_COUNT_AFTER_GATE
           atomic { if :: tx_gate != MANAGED -> tx_gate-- :: else fi }; counted_tx++
#else
           counted_tx++; atomic { if :: tx_gate != MANAGED -> tx_gate-- :: else fi }
#endif
        :: taken == K -> atomic { if :: tx_gate != MANAGED -> tx_gate-- :: else fi }
        fi
     :: else ->
        lock(tx_lock);
        if
        :: taken == K
        :: taken < K && start && !ended && tail - head < CAP ->
           ring[tail % CAP] = taken; atomic { tail++; taken++ }
        :: atomic { taken < K && start && ended && nfull(tcp) -> tcp!taken; taken++ }; counted_tx++
        :: taken < K && start && !ended -> ended_at = tail; ended = true
        /* Full: the lock is given up and the thread sleeps. */
        :: taken < K && start && ((!ended && tail - head == CAP) || (ended && full(tcp)))
        fi;
        unlock(tx_lock);
        (taken == K || (ended && nfull(tcp)) || (!ended && tail - head < CAP))
     fi
  od
}

inline try_ready() {
  if
#ifdef M_READY_WITH_READERS
  :: !ready && rx_gate != MANAGED -> rx_gate = MANAGED; ready = true
#else
  :: atomic { rx_gate == 0 -> rx_gate = MANAGED }; ready = true
#endif
  :: true               /* the rendezvous is not there yet, or readers are inside */
  fi
}

proctype Receiver() {
  byte m, k, st; bool raw, en;
  do
  :: given == K -> break
  :: given < K ->
     try_ready();
     atomic {
       if
       :: rx_gate != MANAGED -> rx_gate++; raw = true
       :: else -> raw = false
       fi
     };
     if
     :: raw ->
        if
        :: atomic { tcp?m; give(m); m = 0 };
#ifdef M_COUNT_RX_AFTER_GATE
           atomic { if :: rx_gate != MANAGED -> rx_gate-- :: else fi }; counted_rx++
#else
           counted_rx++; atomic { if :: rx_gate != MANAGED -> rx_gate-- :: else fi }
#endif
        :: given == K -> atomic { if :: rx_gate != MANAGED -> rx_gate-- :: else fi }
        fi
     :: else ->
        /* poll: sleeps on the kernel's stream and on the channel at once. */
        (given == K || nempty(tcp) || head < tail || ended);
        lock(rx_lock);
        k = len(tcp);
        en = ended;
        st = start;
        if
        :: st == 0 && k > 0 -> atomic { tcp?m; give(m); m = 0 }; counted_rx++
        :: st > 0 && counted_rx < st - 1 && k > 0 ->
           atomic { tcp?m; give(m); m = 0 }; counted_rx++
        :: st > 0 && counted_rx >= st - 1 && !en && head < tail ->
           atomic { give(ring[head % CAP]) }; head++
        :: st > 0 && counted_rx >= st - 1 && en && head < ended_at ->
           atomic { give(ring[head % CAP]) }; head++
        :: st > 0 && counted_rx >= st - 1 && en && head == ended_at && k > 0 ->
           atomic { tcp?m; give(m); m = 0 }
        :: else
        fi;
        d_step { k = 0; st = 0; en = false };
        unlock(rx_lock)
     fi
  od
}

init { atomic { run Sender(); run Sender(); run Receiver(); run Receiver() } }
