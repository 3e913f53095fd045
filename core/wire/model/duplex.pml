/* Both directions of one channel between P and Q: set_down by either side at any time, or by both at once,
 * half-close, close with unread bytes (reset).
 *
 * direction.pml has the depth; this one has the couplings: one set_down moves both directions (recall of
 * mine, freeze of the other's, not atomic together), the peer's keeper answers on the other direction, each
 * program may refuse to read until it has sent everything (the pattern that deadlocks if a mover waits for
 * the peer's program), and close decides between FIN and RST by what is unread on the *other* direction.
 * Keepers are processes of their own. What a thread does under a direction's lock is one step here (the
 * races inside it are direction.pml's); the two exchanges of a set_down are two.
 *
 * Both directions begin lifted at N = 1, with byte 0 still in the kernel. Bounds: K bytes each way, ring 1, kernel buffer 1, one channel. Direction d: 0 = P sends, 1 = Q sends.
 */
#ifndef K
#define K 3
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
  bool rx_over; bool rx_clean    /* receiver's verdict */
};
Dir d[2];
bool reset;                      /* RST on the connection: both directions are over */
bool closed[2];                  /* by end: 0 = P, 1 = Q */

/* FIN goes out when nothing is owed in front of it. Under the tx lock. */
inline settle(s) {
  d_step {
    if
    :: d[s].kind == FROZEN && !d[s].tx_raw ->
       if
       /* Non-blocking replay: a full kernel buffer is left to the next round (EPOLLOUT). */
       :: d[s].at < d[s].tail && !reset && nfull(d[s].tcp) ->
          d[s].tcp!d[s].cell; d[s].replayed = true; d[s].tx_raw = true
       :: d[s].at < d[s].tail && !reset && full(d[s].tcp) -> skip
       :: d[s].at == d[s].tail || reset -> d[s].replayed = true; d[s].tx_raw = true
       fi
    :: d[s].kind == OPEN && d[s].tx_shut -> d[s].kind = ENDED; d[s].at = d[s].tail; d[s].tx_raw = true
    :: else
    fi;
    if
#ifdef M_FIN_BEFORE_REPLAY
    :: d[s].tx_shut -> d[s].tcp_fin = true; d[s].fin_done = true
#else
    :: d[s].tx_shut && d[s].tx_raw -> d[s].tcp_fin = true; d[s].fin_done = true
#endif
    :: else
    fi
  }
}

/* P's or Q's set_down: recall what I send, freeze what I receive; two separate exchanges. The replay that is
 * owed then is the keeper's if the kernel's buffer is full. */
inline set_down(me, s, r) {
  atomic { if :: d[s].kind == OPEN -> d[s].kind = FROZEN; d[s].at = d[s].head :: else fi };
  settle(s);
#ifdef M_WAIT_FOR_DRAIN
  (reset || d[s].tx_raw);   /* a replay that blocks for room waits for the peer's program */
#endif
  atomic { if :: d[r].kind == OPEN -> d[r].kind = FROZEN; d[r].at = d[r].head :: else fi }
}

/* One read of the program; the reading side is one thread here. */
inline read_one(r) {
  d_step {
    if
    :: d[r].kind != FROZEN && d[r].head < d[r].tail && d[r].given > 0 ->
       assert(d[r].cell == d[r].given); d[r].given++; d[r].head++
    :: d[r].kind == FROZEN || d[r].head == d[r].tail || d[r].given == 0 ->
       if
       :: nempty(d[r].tcp) -> d[r].tcp?m; assert(m == d[r].given); d[r].given++; m = 0
       :: empty(d[r].tcp) && reset -> d[r].rx_over = true
       :: empty(d[r].tcp) && !reset && d[r].tcp_fin ->
          d[r].rx_over = true;
          d[r].rx_clean = (d[r].kind != FROZEN || d[r].given >= d[r].tail)
       :: empty(d[r].tcp) && !reset && !d[r].tcp_fin -> skip
       fi
    fi
  }
}

#define RX_READY(r) (nempty(d[r].tcp) || d[r].tcp_fin || reset || (d[r].kind != FROZEN && d[r].head < d[r].tail))

/* The program: sends, reads, in any order, or first all of the one (`stubborn`), then closes. */
proctype Program(byte me; byte s; byte r; bool stubborn; bool early; bool moves) {
  byte m; bool moved;
  do
  :: d[s].taken < K && !reset && !d[s].tx_shut ->
     /* Blocking send: sleeps without the lock until there is room where the direction is now. */
     if
     :: (reset || (d[s].tx_raw && nfull(d[s].tcp)) || (!d[s].tx_raw && d[s].kind == OPEN && d[s].tail == d[s].head))
     :: !stubborn && !d[r].rx_over && RX_READY(r) -> read_one(r)
     :: !moved && moves -> moved = true; set_down(me, s, r)
     fi;
     d_step {
       if
       :: !reset && d[s].tx_raw && len(d[s].tcp) == 0 -> d[s].tcp!d[s].taken; d[s].taken++
       :: !reset && !d[s].tx_raw && d[s].kind == OPEN && d[s].tail == d[s].head ->
          d[s].cell = d[s].taken; d[s].tail++; d[s].taken++
       :: else
       fi
     }
  :: (d[s].taken == K || reset) && !d[s].tx_shut -> d[s].tx_shut = true; settle(s)
  :: d[s].tx_shut && !d[r].rx_over && RX_READY(r) -> read_one(r)
  :: d[s].tx_shut && early && !d[r].rx_over ->
     /* close() with the peer's bytes unread, in the ring or in the kernel: RST. */
     atomic { if :: d[r].head < d[r].tail || len(d[r].tcp) > 0 -> reset = true; d[r].rx_over = true :: else fi }
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
proctype KeeperOf(byte me; byte s; byte r; bool moves) {
  bool moved;
end:
  do
  :: d[s].kind == FROZEN && !d[s].tx_raw && (reset || d[s].at == d[s].tail || nfull(d[s].tcp)) ->
     settle(s)
  :: !moved && moves && !closed[me] -> moved = true; set_down(me, s, r)   /* idle, operator, a peer's wish */
  :: d[s].tx_shut && d[s].tx_raw && !d[s].fin_done -> settle(s)
  od
}

init {
  bool a, b, pm, qm, e;
  if :: a = true :: skip fi;
  if :: !a -> b = true :: skip fi;     /* two programs that both refuse to read deadlock on TCP as well */
  if :: pm = true :: qm = true :: pm = true; qm = true fi;
#ifdef EARLY
  e = true;
#endif
  atomic {
    d[0].tcp!0; d[1].tcp!0; d[0].taken = 1; d[1].taken = 1;
    run Program(0, 0, 1, a, e, pm); run Program(1, 1, 0, b, false, false);
    run KeeperOf(0, 0, 1, pm); run KeeperOf(1, 1, 0, qm)
  }
}
