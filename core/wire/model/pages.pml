/* The page lane of one direction: spans beside the tail, slots used again, peeks; seal, and replay from the files.
 *
 * The direction begins in the ring (N = 0), so byte number x is byte x of the channel. As in direction.pml `taken`
 * counts the bytes for which S's send() has returned, `given` those that R's recv() has returned; every byte given must
 * be number `given`. A place of the ring holds OLD until something is put there. A file has its bytes until it is
 * `cut`, all files at once. What is queued in the lane outlives that, and S's end of the lane, as in a Unix socket.
 * Spin's memory is sequentially consistent: release and acquire are the order of steps here, and mutants swap them.
 *
 * Checked: order, from ring, lane and TCP; what a peek shows; no slot is written while R may read it; an S that follows
 * the rules is never taken for a liar; no more than the window is left unread; a clean EOF only after every byte; a
 * reset only if S was killed and bytes were sealed off, or a file was cut and its bytes were S's to replay; S and R
 * always end. -DCUT: files are cut at any step. -DCRASH: either process is killed at any step. -DUNSEEN: R becomes
 * another program at any step. Each M_* switch breaks one rule and must be caught (scripts/check_model).
 * Bounds: K bytes, ring CAP, SPANS slots (16 in C++), spans of one byte or two, LANE bytes in the lane.
 * Not modelled: how the lane is connected; sleeping for room (sleep.pml); N (direction.pml); -DCRASH and -DUNSEEN
 * together (a program that reads without us takes any FIN for clean).
 */
#ifndef K
#define K 4
#endif
#ifndef CAP
#define CAP 3
#endif
#ifndef SPANS
#define SPANS 2
#endif
#ifndef WINDOW
#define WINDOW CAP
#endif
#ifndef LANE
#define LANE 2
#endif
#ifndef TCPCAP
#define TCPCAP 1
#endif
#define OLD 255

chan tcp = [TCPCAP] of { byte };
bool fin, rst;
chan lane = [LANE] of { byte };
bool joined;                            /* the word `lane` */
byte tail, spans;
byte head; bool sealed, ended;          /* one word in C++: always touched together */
bool replayed;
byte ring[CAP];
/* Slots. What S notes of a passed piece for itself says the same; its mapping is there while span_end is above the
 * head. */
byte span_begin[SPANS], span_end[SPANS];

bool cut;
bool left, r_dead;                      /* R's doorbell hangs up */
bool kill_s, kill_r;
bool lost;                              /* S owes bytes that no file has any more */
bool restless_s, restless_r;            /* may set down, for reasons of its own; else hangs would not show */
byte taken, given;
byte in_slot = SPANS;                   /* between R's two loads of a slot: which */
bool windowed;                          /* S has passed something, and told its window */
#ifdef M_LET_GO_EARLY
bool let_go[SPANS];
#define UNMAPPED(slot) (cut || let_go[slot])
#else
#define UNMAPPED(slot) cut
#endif

/* --- the sender and its keeper ----------------------------------------------------------------------- */
#define UNREAD (tail - head)
/* The head only grows: what was room when it was loaded stays so. The ring is the bound of the first pass. */
#define IN_RING(count) (UNREAD + count <= CAP)
#define IN_WINDOW(count) (UNREAD + count <= (windowed -> WINDOW : CAP))
#ifdef M_WINDOW_UNHEEDED
#define ROOM(count) IN_RING(count)
#else
#define ROOM(count) (IN_RING(count) && IN_WINDOW(count))
#endif
#if defined(M_SLOT_REUSED_UNREAD)
#define SLOT_FREE true
#elif defined(M_SLOT_REUSED_BEGUN)
#define SLOT_FREE (span_end[spans % SPANS] == 0 || span_begin[spans % SPANS] < head)
#else
#define SLOT_FREE (span_end[spans % SPANS] <= head)
#endif
#ifdef M_PASS_UNJOINED
#define LANE_ROOM (len(lane) < LANE)
#else
#define LANE_ROOM (joined && len(lane) < LANE)
#endif

/* A seal that came meanwhile is harmless: the replay takes its own tail. */
inline publish(count) { atomic { tail = tail + count; taken = taken + count; assert(IN_WINDOW(0)) } }

inline put_in_lane() { atomic { lane!x; if :: n == 2 -> lane!(x + 1) :: else fi } }
inline write_slot() {
  atomic { assert(in_slot != slot); span_begin[slot] = x };
  span_end[slot] = x + n
#ifdef M_LET_GO_EARLY
  ; let_go[slot] = false
#endif
}

/* sendfile(2) puts n bytes there, perhaps fewer than asked for; nobody looks for them before a span says so. */
inline pass() {
#if defined(M_TAIL_BEFORE_SPANS)
  put_in_lane(); write_slot(); publish(n); spans++;
#elif defined(M_SPANS_BEFORE_SLOT)
  put_in_lane(); spans++; write_slot(); publish(n);
#elif defined(M_SPAN_BEFORE_BYTES)
  write_slot(); spans++; publish(n); put_in_lane();
#else
  put_in_lane(); write_slot(); spans++; publish(n);
#endif
  atomic { windowed = true; x = 0; n = 0; slot = 0 }
}

inline kernel_send(value) {
  if
  :: atomic { nfull(tcp) && !r_dead -> tcp!value }
  :: r_dead                             /* EPIPE, ECONNRESET */
  fi
}

/* What the head left of each piece comes from its file to its places. */
inline restore() {
  do
  :: slot < SPANS && !lost ->
     if
     :: span_end[slot] > head && UNMAPPED(slot) ->
#if defined(M_CUT_INVENTS)
        slot++
#elif defined(M_CUT_IS_THE_END)
        x = tail; slot = SPANS
#else
        lost = true
#endif
     :: span_end[slot] > head && !UNMAPPED(slot) ->
#ifdef M_RESTORE_WHOLE_SPAN
        n = span_begin[slot];
#else
        n = (span_begin[slot] > head -> span_begin[slot] : head);
#endif
        do
        :: n < span_end[slot] -> ring[n % CAP] = n; n++
        :: else -> break
        od;
        slot++
     :: else -> slot++
     fi
  :: else -> break
  od
}

/* The head does not move any more: sealed, or its owner is gone. */
inline replay() {
  x = head;
#ifndef M_REPLAY_WITHOUT_FILES
  restore();
#endif
  do
  :: !lost && x < tail -> kernel_send(ring[x % CAP]); x++
  :: else -> break
  od;
  if
  :: lost -> rst = true
  :: else
  fi;
  atomic { replayed = true; raw = true; x = 0; n = 0; slot = 0 }
}

proctype S(byte goal) {
  byte x, n, slot;
  bool raw;
  {
    do
    :: lost -> break
    /* The program sends: a copy in the ring, pages in the lane, or through the kernel after the return. */
    :: !raw && taken < goal && ROOM(1) -> ring[tail % CAP] = taken; publish(1)
    :: atomic {
         !raw && taken < goal && LANE_ROOM && SLOT_FREE && ROOM(1) && !left && !r_dead ->
         x = taken; slot = spans % SPANS;
         if
         :: n = 1
         :: taken + 2 <= goal && len(lane) + 2 <= LANE && ROOM(2) -> n = 2
         fi
       };
       pass()
    :: atomic { raw && !lost && taken < goal && nfull(tcp) && !r_dead -> tcp!taken; taken++ }
#ifdef M_LET_GO_EARLY
    /* R has taken from the lane what lay there. */
    :: atomic { !raw && empty(lane) && spans > 0 && !let_go[(spans - 1) % SPANS] -> let_go[(spans - 1) % SPANS] = true }
#endif
    /* Frozen by R, or recalled: for reasons of our own, or because the doorbell hung up. */
    :: atomic { !raw && (sealed || restless_s || left || r_dead) -> sealed = true }; replay()
    /* Close. After an end S looks at the doorbell once more, and then at the head, which nobody moves then. */
    :: raw && !lost && (taken == goal || r_dead) -> break
    :: atomic { !raw && !sealed && (taken == goal || r_dead) -> ended = true };
       if
       :: left || r_dead
       :: !left && !r_dead -> break
       fi
    od
  } unless { kill_s -> skip };
  if :: rst :: else -> fin = true fi    /* of a process that was killed the kernel's */
}

/* --- the receiver and its keeper --------------------------------------------------------------------- */
inline give(value) { d_step { assert(value == given); given++ } }
inline take_tcp() { tcp?m; give(m); m = 0 }

/* Into pb and pe: the span that is next, if there is one and none is begun. What is asserted is what C++ checks: S has
 * lied otherwise. `at` is where R has come to. */
inline load_span() {
  if
  :: pb >= pe && c != done ->
     atomic { assert(joined && c - done <= SPANS); in_slot = done % SPANS; m = span_begin[in_slot] };
     atomic { n = span_end[in_slot]; in_slot = SPANS };
     atomic {
       assert(m >= pe && m >= at && n > m && n - m <= CAP);
       pb = m; pe = n; m = 0; n = 0
     }
  :: else
  fi;
  assert(pb >= pe || at <= pb)
}

inline moved(count) { pb = pb + count; if :: pb == pe -> done++ :: else fi }

/* Copied, or read from the lane, then released by compare-exchange of the word. A release that meets the seal does not
 * count: the bytes come again by TCP. R looks at the ring no more: what it took from the lane never came there. */
inline release() {
  atomic {
    if
#ifdef M_RELEASE_BY_STORE
    :: true ->
#elif defined(M_LANE_COUNTS_ANYWAY)
    :: !sealed || by_lane ->
#else
    :: !sealed ->
#endif
       give(m);
       if :: k == 2 -> give(n) :: else fi;
#ifdef M_LANE_COUNTS_ANYWAY
       if :: !sealed -> head = head + k :: else fi
#else
       head = head + k
#endif
    :: else ->
#ifndef M_PEEK_AFTER_SEAL
       back = true
#endif
    fi;
    m = 0; n = 0; k = 0; by_lane = false
  }
}

/* The end of TCP's stream, while the direction is not back in the kernel: was that all? */
inline finish() { clean = (replayed || given >= tail); over = true }

/* The tail, then the spans: the order of the loads is the rule. */
inline look() {
#ifdef M_SPANS_BEFORE_TAIL
  c = spans; t = tail
#else
  t = tail; c = spans
#endif
}

inline read() {
  atomic { eof = empty(tcp) && fin };
  atomic { z = sealed; en = ended };
  look();
  if
  :: z -> back = true
#ifdef M_DEATH_TAKES_THE_LANE
  :: !z && head < t && eof && c != done -> over = true
#endif
  :: !z && head < t ->
     at = head;
     load_span();
     if
     :: pb < pe && at == pb ->
        atomic {
          assert(nempty(lane));         /* or S has lied */
          lane?m; k = 1; by_lane = true;
          if
          :: pb + 2 <= pe && at + 2 <= t && nempty(lane) -> lane?n; k = 2
          :: true
          fi;
          moved(k)
        }
     :: else -> m = ring[at % CAP]; k = 1
     fi;
     release()
  :: !z && head == t && en -> raw = true
  :: !z && head == t && !en && eof -> finish()
  :: else
  fi;
  atomic { eof = 0; z = 0; en = 0; t = 0; c = 0; at = 0 }
}

/* MSG_PEEK looks at bytes in their places in the ring: those of the lane are brought there. They are released later. */
inline peek() {
  at = head;
  look();
#ifndef M_PEEK_WITHOUT_LANE
  do
  :: at < t && c != done ->
     load_span();
     if
     :: at < pb -> at = pb
     :: else -> atomic { assert(nempty(lane)); lane?m }; ring[at % CAP] = m; atomic {
          m = 0; at++;
#ifndef M_PEEK_NOT_COUNTED
          moved(1)
#endif
        }
     fi
  :: else -> break
  od;
#endif
  at = head;
  do
  :: at < t -> assert(ring[at % CAP] == at); at++
  :: else -> break
  od;
  atomic { t = 0; c = 0; at = 0 }
}

proctype R() {
  byte t, c, m, n, k, at, done, pb, pe;
  bool eof, z, en, by_lane;
  bool back, raw, clean, over;
  {
    do
    :: raw || over -> break
    :: !over && !joined -> joined = true
    /* Enabled only when a sleeper would be woken: a lost byte shows as a deadlock. */
    :: !raw && !over && !back && (head < tail || sealed || ended || fin) -> read()
    :: !raw && !over && !back && head < tail -> peek()
    :: atomic { restless_r && !raw && !over && !back && !sealed && !ended -> sealed = true }; back = true
    /* Sealed: TCP goes on. */
    :: atomic { back && nempty(tcp) -> take_tcp() }
    :: back && empty(tcp) && fin -> finish()
    :: back && rst -> over = true
    :: back && replayed -> raw = true
    od
  } unless { kill_r || left -> skip };
  {
    atomic { t = 0; c = 0; m = 0; n = 0; k = 0; at = 0; in_slot = SPANS; eof = 0; z = 0; en = 0; by_lane = false };
    do
    :: over -> break
    :: atomic { !over && nempty(tcp) -> take_tcp() }
    :: !over && empty(tcp) && fin -> clean = true; over = true
    :: !over && rst -> over = true
    od;
    if
    :: clean -> assert(given == taken)
    :: else -> assert(given < taken && ((cut && lost) || (kill_s && sealed)))
    fi
  } unless { kill_r -> skip };
  r_dead = true
}

init {
  byte goal;
  atomic {
    do :: goal < CAP -> ring[goal] = OLD; goal++ :: else -> break od;
    select(goal : 0 .. K);
    if :: restless_s = true :: skip fi;
    if :: restless_r = true :: skip fi;
    run S(goal); run R()
  };
#ifdef CUT
  cut = true;
#endif
#ifdef CRASH
  if
  :: kill_s = true
  :: kill_r = true
  fi
#endif
#ifdef UNSEEN
  /* Not after an end: what is in the ring then can be read only by R (PROTOCOL.md, "The end of a stream"). */
  if
  :: atomic { !ended -> left = true }
  :: ended
  fi
#endif
}
