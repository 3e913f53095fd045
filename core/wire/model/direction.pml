/* One direction of a stream on memory channels: start, END, FREEZE, replay, a second generation, half-close,
 * and (with -DCRASH) the death of either process at any step; (with -DUNSEEN) R leaves without a word.
 *
 * A byte is a number. `taken` counts the bytes for which S's send() has returned, `given` those that R's
 * recv() has returned; every byte that R gives must be number `given`, so loss, duplication and reordering
 * are one assertion. S is sender and its keeper (they share the tx lock), R receiver and its keeper.
 * Steps that the C++ performs as one atomic operation or one system call are `atomic` here, nothing else is.
 *
 * Checked: order; a clean EOF only after every byte; a reset only when bytes are missing; R always ends, S
 * always ends (invalid end states); nobody waits for ever. Bounds: K bytes, ring CAP, kernel buffer TCPCAP,
 * GENS channels one after the other. Each M_* switch breaks one rule and must be caught.
 */
#ifndef K
#define K 4
#endif
#ifndef CAP
#define CAP 2
#endif
#ifndef TCPCAP
#define TCPCAP 2
#endif
#ifndef GENS
#define GENS 2
#endif

#define OPEN 0
#define ENDED 1
#define FROZEN 2

chan tcp = [TCPCAP] of { byte };  /* the kernel's stream; FIN is the flag behind its last byte */
bool tcp_fin;

typedef Words {
  byte tail; byte head; byte start; /* N + 1 */
  byte kind; byte at;               /* one word in C++: always touched together */
  bool ready; bool fin; bool replayed;
  byte ring[CAP]
};
Words w[GENS];
bool s_done[GENS];      /* keepers tell at the next rendezvous: HELLO is refused as busy until then */
bool s_dead, r_dead;    /* the kernel closed everything of it: FIN or RST, doorbell HUP */
bool kill_s, kill_r;
bool left;              /* UNSEEN: R dropped the channel, goes on with the kernel's stream */
byte taken, given;
bool closing;           /* S wants no more: for assertions only */

/* --- the sender ------------------------------------------------------------------------------------ */
inline kernel_send(value) {
  if
  :: atomic { nfull(tcp) && !r_dead -> tcp!value }
  :: r_dead -> skip                     /* EPIPE, ECONNRESET */
  fi
}

inline replay(from) {
  x = from;
#ifndef M_NO_REPLAY
  do
  :: x < w[g].tail -> kernel_send(w[g].ring[x % CAP]); x++
  :: else -> break
  od;
#endif
  w[g].replayed = true;
  leave_tx()
}

inline leave_tx() { atomic { x = 0; on = false; s_done[g] = true; g++ } }

/* END, or what the freeze that came first asks for. */
inline set_down_tx() {
  if
#ifdef M_NO_CAS
  :: w[g].kind == OPEN -> atomic { w[g].kind = ENDED; w[g].at = w[g].tail }
#else
  :: atomic { w[g].kind == OPEN -> w[g].kind = ENDED; w[g].at = w[g].tail }
#endif
     if
     /* R left before it could see END: head is final, what it has not read is ours to replay. */
#ifndef M_END_IGNORES_HUP
     :: left || r_dead -> replay(w[g].head)
     :: !left && !r_dead ->
#else
     :: true ->
#endif
        if :: shut -> w[g].fin = true :: else fi;
        leave_tx()
     fi
  :: w[g].kind == FROZEN -> replay(w[g].at)
  fi
}

proctype S(byte goal) {
  byte g, x;
  bool on, shut;
  {
    do
    /* The program sends, kernel path. */
#ifdef M_TCP_AFTER_START
    :: atomic { taken < goal && nfull(tcp) -> tcp!taken; taken++ }
#else
    :: atomic { !on && taken < goal && nfull(tcp) -> tcp!taken; taken++ }
#endif
    /* The switch: turn is looked at, then start is stored; R may freeze between. */
    :: !on && g < GENS && w[g].ready && w[g].kind == OPEN ->
       w[g].start = taken + 1; on = true
    /* The program sends, ring path. */
    :: on && taken < goal && w[g].tail - w[g].head < CAP && w[g].kind == OPEN ->
       w[g].ring[w[g].tail % CAP] = taken;
       atomic { w[g].tail++; taken++ }
    /* Something froze our direction. Before the start there is nothing to replay. */
    :: g < GENS && w[g].kind == FROZEN -> replay(w[g].at)
    /* Set down for reasons of our own. */
    :: g < GENS && w[g].ready && (on || w[g].kind == OPEN) -> set_down_tx()
    /* Doorbell HUP while open: nobody reads the ring any more, head is final. */
    :: on && w[g].kind == OPEN && (r_dead || left) -> replay(w[g].head)
    /* Half-close or close: the channel ends first, FIN is the last thing on the kernel's stream. */
    :: taken == goal || r_dead ->
       shut = true; closing = true;
       if
#ifdef M_FIN_WITHOUT_END
       :: on -> w[g].fin = true
#else
       :: on -> set_down_tx()
#endif
       :: else
       fi;
       tcp_fin = true;
       break
    od
  } unless { kill_s -> skip };
  atomic { s_dead = kill_s; tcp_fin = true }
}

/* --- the receiver ---------------------------------------------------------------------------------- */
inline give(value) { d_step { assert(value == given); given++ } }
inline take_tcp() { atomic { tcp?m; give(m); m = 0 } }
inline take_ring() { atomic { give(w[g].ring[w[g].head % CAP]) }; w[g].head++ }

inline leave_rx() { atomic { managed = false; g++ } }

/* EOF of the kernel's stream was seen; the words are loaded after it. */
inline finish() {
#ifdef M_EOF_UNCHECKED
  clean = true;
#else
  clean = (w[g].start == 0 || given >= w[g].start - 1 + w[g].tail);
#endif
  over = true
}

/* One read under the rx lock. FIONREAD first, then turn, then start, then the ring (the order matters). */
inline managed_read() {
#ifdef M_START_FIRST
  st = w[g].start;
#endif
#ifdef M_STALE_TAIL
  t = w[g].tail;
#endif
  atomic { k = len(tcp); eof = (k == 0 && tcp_fin) };
  atomic { kind = w[g].kind; at = w[g].at };
#ifndef M_START_FIRST
  st = w[g].start;
#endif
#ifndef M_STALE_TAIL
  t = w[g].tail;
#endif
  if
  :: kind == FROZEN ->
     if
     :: k > 0 -> take_tcp()
     :: k == 0 && eof -> finish()
     :: k == 0 && !eof && w[g].replayed -> leave_rx()
     :: else
     fi
  :: kind != FROZEN && st == 0 ->
     if
     :: kind == ENDED -> leave_rx()
#ifdef M_UNBOUNDED_READ
     :: kind == OPEN && nempty(tcp) -> take_tcp()
#else
     :: kind == OPEN && k > 0 -> take_tcp()
#endif
     :: kind == OPEN && k == 0 && eof -> finish()
     :: else
     fi
#ifdef M_OVERREAD
  :: kind != FROZEN && st > 0 && k > 0 -> take_tcp()
  :: kind != FROZEN && st > 0 && k == 0 && given < st - 1 ->
#else
  :: kind != FROZEN && st > 0 && given < st - 1 ->
#endif
     if
     :: k > 0 -> take_tcp()
     :: k == 0 && eof -> finish()
     :: else
     fi
  :: kind == OPEN && st > 0 && given >= st - 1 ->
     if
     :: w[g].head < t -> take_ring()
     :: w[g].head == t && eof ->
#ifdef M_STALE_TAIL
        clean = true; over = true
#else
        finish()
#endif
     :: else
     fi
  :: kind == ENDED && st > 0 && given >= st - 1 ->
     if
     :: w[g].head < at -> take_ring()
     :: w[g].head == at && w[g].fin -> clean = true; over = true
     :: else -> leave_rx()
     fi
  fi;
  d_step { k = 0; eof = 0; kind = 0; at = 0; st = 0; t = 0 }
}

proctype R() {
  byte g, k, kind, at, st, t, m;
  bool managed, eof, clean, over, looked;
  {
    do
    :: over -> break
    /* The kernel's stream as the program reads it before the lift and after the return. */
    :: atomic { !over && !managed && nempty(tcp) -> take_tcp() }
    :: !over && !managed && empty(tcp) && tcp_fin -> clean = true; over = true
    /* No reader is in the kernel (lift.pml): the dual rule holds from here on. */
#ifdef M_GEN_EARLY
    :: !over && g < GENS && (!managed || g + 1 < GENS) ->
       if :: managed -> g++ :: else fi;
       w[g].ready = true; managed = true
#else
    :: !over && !managed && g < GENS && !left && (g == 0 || s_done[g - 1]) ->
       w[g].ready = true; managed = true
#endif
    /* Enabled only when a sleeper would be woken: a lost byte shows as a deadlock. */
    :: !over && managed && (nempty(tcp) || tcp_fin || w[g].head < w[g].tail || w[g].kind == ENDED ||
                   (w[g].kind == FROZEN && w[g].replayed)) -> managed_read()
    /* A spurious look (poll woke for another reason, the keeper's timer); one, so that hangs still show. */
    :: !over && managed && !looked -> looked = true; managed_read()
    /* Freeze, for reasons of our own; if END came first we drain. */
    :: !over && managed && w[g].kind == OPEN ->
       if
#ifdef M_NO_CAS
       :: true -> atomic { w[g].kind = FROZEN; w[g].at = w[g].head }
#else
       :: atomic { w[g].kind == OPEN -> w[g].kind = FROZEN; w[g].at = w[g].head }
       :: w[g].kind == ENDED -> skip
#endif
       fi
#ifdef UNSEEN
    /* exec that no hook saw: the doorbell hangs up, the kernel's stream is read on, raw. */
    :: atomic { managed && w[g].kind == OPEN && !left -> left = true; managed = false }
#endif
    od;
    if
    :: clean -> assert(given == taken)
    :: else -> assert(kill_s && given < taken)
    fi
  } unless { kill_r -> skip };
  r_dead = true
}

init {
  byte goal;
  select(goal : 0 .. K);
  atomic { run S(goal); run R() };
#ifdef CRASH
  if
  :: kill_s = true
  :: kill_r = true
  :: kill_s = true; kill_r = true
  :: skip
  fi
#endif
}
