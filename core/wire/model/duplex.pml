/* Both directions of one channel between P and Q: set_down by either side at any time, or by both at once,
 * half-close, close with unread bytes (reset).
 *
 * direction.pml has the depth; this one has the couplings: one set_down moves both directions (END of mine,
 * FREEZE of the other's, not atomic together), the peer's keeper answers on the other direction, each
 * program may refuse to read until it has sent everything (the pattern that deadlocks if a mover waits for
 * the peer's program), and close decides between FIN and RST by what is unread on the *other* direction.
 * Keepers are processes of their own: they share the direction's lock with the program's thread.
 *
 * Bounds: K bytes each way, ring 1, kernel buffer 1, one channel. Direction d: 0 = P sends, 1 = Q sends.
 */
#ifndef K
#define K 2
#endif
#define OPEN 0
#define ENDED 1
#define FROZEN 2

typedef Dir {
  chan tcp = [1] of { byte };
  bool tcp_fin;
  byte tail; byte head;          /* ring of one byte: full when tail != head */
  byte kind; byte at;
  bool replayed;
  byte cell;
  byte taken; byte given;
  bool tx_raw;                   /* sender's side: on TCP again */
  bool tx_shut;                  /* the program has said: no more */
  bool fin_done;                 /* FIN is out */
  bool rx_over; bool rx_clean;   /* receiver's verdict */
  bool tx_lock; bool rx_lock
};
Dir d[2];
bool reset;                      /* RST on the connection: both directions are over */
bool closed[2];                  /* by end: 0 = P, 1 = Q */

inline lock(s) { atomic { !d[s].tx_lock -> d[s].tx_lock = true } }
inline unlock(s) { d[s].tx_lock = false }
#ifdef M_FREEZE_WITHOUT_LOCK
inline lock_rx(r) { skip }
inline unlock_rx(r) { skip }
#else
inline lock_rx(r) { atomic { !d[r].rx_lock -> d[r].rx_lock = true } }
inline unlock_rx(r) { d[r].rx_lock = false }
#endif

/* FIN goes out when nothing is owed in front of it. Under the tx lock. */
inline settle(s) {
  if
  :: d[s].kind == FROZEN && !d[s].tx_raw ->
     if
     :: d[s].at < d[s].tail ->
        /* Non-blocking replay: a full kernel buffer is left to the next round (EPOLLOUT). */
        atomic {
          if
          :: reset -> d[s].tx_raw = true
          :: !reset && nfull(d[s].tcp) -> d[s].tcp!d[s].cell; d[s].replayed = true; d[s].tx_raw = true
          :: else
          fi
        }
     :: else -> d[s].replayed = true; d[s].tx_raw = true
     fi
  :: else
  fi;
  if
  :: d[s].tx_shut && !d[s].tx_raw && d[s].kind == OPEN ->
     atomic { if :: d[s].kind == OPEN -> d[s].kind = ENDED; d[s].at = d[s].tail; d[s].tx_raw = true :: else fi }
  :: else
  fi;
#ifdef M_FIN_BEFORE_REPLAY
  if :: d[s].tx_shut -> d[s].tcp_fin = true; d[s].fin_done = true :: else fi
#else
  if :: d[s].tx_shut && d[s].tx_raw -> d[s].tcp_fin = true; d[s].fin_done = true :: else fi
#endif
}

/* P's or Q's set_down: end what I send, freeze what I receive; two separate exchanges. */
inline set_down(me, s, r) {
  lock(s);
  atomic { if :: d[s].kind == OPEN -> d[s].kind = ENDED; d[s].at = d[s].tail; d[s].tx_raw = true :: else fi };
  unlock(s);
#ifdef M_WAIT_FOR_DRAIN
  (reset || d[s].head == d[s].tail);   /* waits for the peer's program: the deadlock that TCP would not have */
#endif
  lock_rx(r);
  atomic { if :: d[r].kind == OPEN -> d[r].kind = FROZEN; d[r].at = d[r].head :: else fi };
  unlock_rx(r)
}

inline give(r, value) { d_step { assert(value == d[r].given); d[r].given++ } }

/* One read of the program; the reading side is one thread here. */
inline read_one(r) {
  lock_rx(r);
  atomic { eof = (empty(d[r].tcp) && d[r].tcp_fin) };
  kind = d[r].kind;
  if
  :: kind != FROZEN && d[r].head < d[r].tail -> atomic { give(r, d[r].cell); d[r].head++ }
  :: else ->
     if
     :: atomic { kind != OPEN && nempty(d[r].tcp) -> d[r].tcp?m; give(r, m); m = 0 }
     :: atomic { eof && !reset -> d[r].rx_over = true;
          d[r].rx_clean = (kind != FROZEN || d[r].given >= d[r].tail) }
     :: atomic { reset && empty(d[r].tcp) -> d[r].rx_over = true }
     :: else
     fi
  fi;
  d_step { kind = 0; eof = false };
  unlock_rx(r)
}

#define RX_READY(r) (nempty(d[r].tcp) || d[r].tcp_fin || reset || (d[r].kind != FROZEN && d[r].head < d[r].tail))

/* The program: sends, reads, in any order, or first all of the one (`stubborn`), then closes. */
proctype Program(byte me; byte s; byte r; bool stubborn; bool early) {
  byte m, kind; bool eof, moved;
  do
  :: d[s].taken < K && !reset && !d[s].tx_shut ->
     /* Blocking send: sleeps without the lock until there is room where the direction is now. */
     if
     :: (reset || (d[s].tx_raw && nfull(d[s].tcp)) || (!d[s].tx_raw && d[s].kind == OPEN && d[s].tail == d[s].head))
     :: !stubborn && !d[r].rx_over && RX_READY(r) -> read_one(r)
     :: !moved -> moved = true; set_down(me, s, r)
     fi;
     lock(s);
     if
     :: reset
     :: !reset && d[s].tx_raw ->
        atomic { if :: nfull(d[s].tcp) -> d[s].tcp!d[s].taken; d[s].taken++ :: else fi }
     :: !reset && !d[s].tx_raw && d[s].kind == OPEN && d[s].tail == d[s].head ->
        d[s].cell = d[s].taken; atomic { d[s].tail++; d[s].taken++ }
     :: else
     fi;
     unlock(s)
  :: (d[s].taken == K || reset) && !d[s].tx_shut -> lock(s); d[s].tx_shut = true; settle(s); unlock(s)
  :: d[s].tx_shut && !d[r].rx_over && RX_READY(r) -> read_one(r)
  :: d[s].tx_shut && early && !d[r].rx_over ->
     /* close() with the peer's bytes unread, in the ring or in the kernel: RST. */
     atomic { if :: d[r].head < d[r].tail || nempty(d[r].tcp) -> reset = true; d[r].rx_over = true :: else fi }
     if :: d[r].rx_over -> break :: else -> (RX_READY(r)) fi
  :: d[s].tx_shut && d[r].rx_over -> break
  od;
  closed[me] = true;
  if
  :: d[r].rx_clean -> assert(d[r].given == K || reset)
  :: else -> assert(reset)
  fi
}

/* Never waits for a program, only for the kernel's buffer, and then without a lock. */
proctype KeeperOf(byte me; byte s; byte r) {
  bool moved;
end:
  do
  :: d[s].kind == FROZEN && !d[s].tx_raw && (reset || d[s].at == d[s].tail || nfull(d[s].tcp)) ->
     lock(s); settle(s); unlock(s)
  :: !moved && !closed[me] -> moved = true; set_down(me, s, r)   /* idle, operator, a peer's wish */
  :: d[s].tx_shut && d[s].tx_raw && !d[s].fin_done -> lock(s); settle(s); unlock(s)
  od
}

init {
  bool a, b, e;
  if :: a = true :: skip fi;
  if :: !a -> b = true :: skip fi;     /* two programs that both refuse to read deadlock on TCP as well */
#ifdef EARLY
  e = true;
#endif
  atomic {
    run Program(0, 0, 1, a, e); run Program(1, 1, 0, b, false);
    run KeeperOf(0, 0, 1); run KeeperOf(1, 1, 0)
  }
}
