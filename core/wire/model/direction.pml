/* One direction of a stream on memory channels: start, seal by either side, replay, a second generation,
 * half-close, and (-DCRASH) the death of either process at any step; (-DUNSEEN) R leaves without a word.
 *
 * A byte is a number. `taken` counts the bytes for which S's send() has returned, `given` those that R's
 * recv() has returned; every byte that R gives must be number `given`, so loss, duplication and reordering
 * are one assertion. S is the sender and its keeper (they share the tx lock), R the receiver and its keeper.
 * Steps that the C++ performs as one atomic operation or one system call are `atomic` here, nothing else.
 *
 * Checked: order; a clean EOF only after every byte; a reset only when S was killed and bytes are missing; S
 * and R always end (invalid end states otherwise; -DLIVE: as LTL, no livelock either). Bounds: K bytes, ring CAP, kernel buffer TCPCAP, GENS
 * channels one after the other. Each M_* switch breaks one rule and must be caught (scripts/check_model).
 */
#ifndef K
#define K 3
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

chan tcp = [TCPCAP] of { byte };  /* the kernel's stream; FIN is the flag behind its last byte */
bool tcp_fin;

typedef Words {
  byte tail;
  byte head; bool sealed; bool ended;  /* one word in C++: always touched together */
  byte start;                          /* N + 1 */
  bool ready; bool replayed;
  byte ring[CAP]
};
Words w[GENS];
bool s_done[GENS];      /* keepers tell at the next rendezvous: HELLO is refused (not now) until then */
bool r_dead;            /* the kernel closed everything of it: RST, doorbell HUP */
bool kill_s, kill_r;
bool let_go[GENS];      /* R is done with the channel in an orderly way: its doorbell has hung up too */
bool left;              /* UNSEEN: R dropped the channel, goes on with the kernel's stream */
byte taken, given;

/* --- the sender ------------------------------------------------------------------------------------ */
inline kernel_send(value) {
  if
  :: atomic { nfull(tcp) && !r_dead -> tcp!value }
  :: r_dead -> skip                     /* EPIPE, ECONNRESET */
  fi
}

/* head does not move any more: sealed, or its owner is gone. */
inline replay() {
#ifndef M_NO_REPLAY
  x = w[g].head;
  replay_from_x()
#else
  w[g].replayed = true;
  leave_tx()
#endif
}

inline replay_from_x() {
  do
  :: x < w[g].tail -> kernel_send(w[g].ring[x % CAP]); x++
  :: else -> break
  od;
  w[g].replayed = true;
  leave_tx()
}

inline leave_tx() { atomic { x = 0; on = false; s_done[g] = true; g++ } }

inline recall() {
#ifdef M_RECALL_LATE_SEAL
  x = w[g].head;                        /* taken before the seal: the count is a guess */
  w[g].sealed = true;
  do
  :: x < w[g].tail -> kernel_send(w[g].ring[x % CAP]); x++
  :: else -> break
  od;
  w[g].replayed = true;
  leave_tx()
#else
  w[g].sealed = true;                   /* compare-exchange; S has not ended, so it succeeds */
  replay()
#endif
}

/* Shutdown and close: the tail becomes final, unless something sealed the word before. */
inline end_tx() {
#ifdef M_END_OVER_SEAL
  atomic { ended = true; w[g].ended = true };
#else
  atomic { ended = !w[g].sealed; w[g].ended = ended };
#endif
  if
  /* R left before it could see the end: what it has not read is ours to replay. An R that drained the ring hangs
   * up too, so the count is loaded after the hang-up is seen; then it is final. */
#ifdef M_COUNT_BEFORE_HUP
  :: ended -> x = w[g].head;
     if
     :: left || r_dead || let_go[g] -> replay_from_x()
     :: !left && !r_dead && !let_go[g] -> leave_tx()
     fi
#elif !defined(M_END_IGNORES_HUP)
  :: ended && (left || r_dead || let_go[g]) -> replay()
  :: ended && !left && !r_dead && !let_go[g] -> leave_tx()
#else
  :: ended -> leave_tx()
#endif
  :: !ended -> replay()
  fi
}

proctype S(byte goal) {
  byte g, x;
  bool on, ended;
  {
    do
    /* The program sends, kernel path. */
#ifdef M_TCP_AFTER_START
    :: atomic { taken < goal && nfull(tcp) -> tcp!taken; taken++ }
#else
    :: atomic { !on && taken < goal && nfull(tcp) -> tcp!taken; taken++ }
#endif
    /* The switch: the word is looked at, then start is stored; R may seal between. */
    :: !on && g < GENS && w[g].ready && !w[g].sealed -> w[g].start = taken + 1; on = true
    /* The program sends, ring path. A seal that comes after the look is harmless: replay takes the tail. */
    :: on && taken < goal && w[g].tail - w[g].head < CAP && !w[g].sealed ->
       w[g].ring[w[g].tail % CAP] = taken;
       atomic { w[g].tail++; taken++ }
    /* R froze our direction; before the start there is nothing to replay. */
#ifndef M_DEAF_KEEPER
    :: g < GENS && w[g].sealed -> replay()
#endif
    /* Set down, for reasons of our own, or because the doorbell hung up. */
    :: g < GENS && w[g].ready && !w[g].sealed -> recall()
    /* Half-close or close: the channel ends first, FIN is the last thing on the kernel's stream. */
    :: taken == goal || r_dead ->
       if
       :: on ->
#ifdef M_FIN_WITHOUT_END
          skip
#else
          end_tx()
#endif
       :: !on && g < GENS -> atomic { w[g].ended = !w[g].sealed; w[g].replayed = true }  /* never will start */
       :: !on && g == GENS -> skip
       fi;
       tcp_fin = true;
       break
    od
  } unless { kill_s -> skip };
  tcp_fin = true
}

/* --- the receiver ---------------------------------------------------------------------------------- */
inline give(value) { d_step { assert(value == given); given++ } }
inline take_tcp() { atomic { tcp?m; give(m); m = 0 } }

/* Copies first, then releases by compare-exchange; a release that meets the seal does not count, and the
 * copied byte is not given: it comes again on the kernel's stream. */
inline take_ring() {
  m = w[g].ring[w[g].head % CAP];
  atomic {
    if
#ifdef M_RELEASE_BY_STORE
    :: true -> give(m); w[g].head++
#else
    :: !w[g].sealed -> give(m); w[g].head++
    :: w[g].sealed
#endif
    fi;
    m = 0
  }
}

inline leave_rx() { atomic { managed = false; looked = false; let_go[g] = true; g++ } }

/* EOF of the kernel's stream was seen; start and tail are loaded after it. Raw bytes after a replay count
 * too, hence >=. */
inline finish() {
#ifdef M_EOF_UNCHECKED
  clean = true;
#else
  clean = (w[g].start == 0 || given >= w[g].start - 1 + w[g].tail);
#endif
  over = true
}

/* One read under the rx lock. FIONREAD, then the head word, then start, then the tail: the order matters. */
inline managed_read() {
#ifdef M_START_FIRST
  st = w[g].start;
#endif
#ifdef M_STALE_TAIL
  t = w[g].tail;
#endif
  atomic { k = len(tcp); eof = (k == 0 && tcp_fin) };
  atomic { sealed = w[g].sealed; ended = w[g].ended };
#ifndef M_START_FIRST
  st = w[g].start;
#endif
#ifndef M_STALE_TAIL
  t = w[g].tail;
#endif
  if
  :: sealed ->
     if
     :: k > 0 -> take_tcp()
     :: k == 0 && eof -> finish()
     :: k == 0 && !eof && w[g].replayed -> leave_rx()
     :: else
     fi
  :: !sealed && st == 0 && ended -> leave_rx()
  :: !sealed && st == 0 && !ended ->
     if
#ifdef V_UNBOUNDED_READ
     :: len(tcp) > 0 -> take_tcp()
#else
     :: k > 0 -> take_tcp()
#endif
     :: k == 0 && eof -> finish()
     :: else
     fi
#ifdef V_OVERREAD
  :: !sealed && st > 0 && k > 0 -> take_tcp()
  :: !sealed && st > 0 && k == 0 && given < st - 1 ->
#else
  :: !sealed && st > 0 && given < st - 1 ->
#endif
     if
     :: k > 0 -> take_tcp()
     :: k == 0 && eof -> finish()
     :: else
     fi
  :: !sealed && st > 0 && given >= st - 1 ->
     if
     :: w[g].head < t -> take_ring()
     :: w[g].head == t && ended -> leave_rx()
     :: w[g].head == t && !ended && eof ->
#ifdef M_STALE_TAIL
        clean = true; over = true
#else
        finish()
#endif
     :: else
     fi
  fi;
  d_step { k = 0; eof = 0; sealed = 0; ended = 0; st = 0; t = 0 }
}

proctype R() {
  byte g, k, st, t, m;
  bool managed, eof, clean, over, looked, sealed, ended;
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
    :: !over && !managed && g < GENS && !left && !w[g].ended && (g == 0 || s_done[g - 1]) ->
       w[g].ready = true; managed = true
#endif
    /* Enabled only when a sleeper would be woken: a lost byte shows as a deadlock. */
    :: !over && managed && (nempty(tcp) || tcp_fin || w[g].head < w[g].tail || w[g].ended ||
                            (w[g].sealed && w[g].replayed)) -> managed_read()
    /* A spurious look (poll woke for another reason, the keeper's timer); one, so that hangs still show. */
    :: !over && managed && !looked -> looked = true; managed_read()
    /* Freeze, for reasons of our own; if the end came first we drain. */
    :: atomic { !over && managed && !w[g].sealed && !w[g].ended -> w[g].sealed = true }
#ifdef UNSEEN
    /* exec that no hook saw: the doorbell hangs up, the kernel's stream is read on, raw. */
    :: atomic { managed && !w[g].ended && !left -> left = true; managed = false }
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
  fi
#endif
}

#ifdef LIVE
/* Under a fair scheduler both ends come to an end, whatever is moved. R may look as often as it likes. */
ltl ends { <> (tcp_fin && r_dead) }
#endif
