/* A stream between hosts: bytes over a queue pair, control words over the keepers' line, the rest over TCP.
 *
 * TCP carries raw user bytes, in order, then FIN. The queue pair carries bytes of the ring and credits until it fails;
 * then what is in flight is lost, and an end notices later; one of the two may never. The line carries words in order.
 * It may go down (-DLINE: by itself); then each end reads some prefix of the words, then EOF.
 * -DCRASH kills either process at any step: its TCP ends with FIN or RST, the queue pair fails, the line goes down.
 * -DLEAVE: R leaves for the kernel's stream, after FROZEN and BYE or (exec that no hook saw) without a word.
 *
 * As in direction.pml: `taken` counts the bytes for which send() has returned, `given` those that recv() has returned;
 * every byte given must be number `given`. Bytes of the channel are n + 0, n + 1, ...: what the queue pair and the
 * rings hold are counters. Data and credits "arrive" in one step; later is the same as S or R not having looked yet.
 * Checked: order; a clean EOF only after every byte; a reset only if a process was killed or the line was lost, never
 * for a failed queue pair; S and R always end. Every step goes forward, so what never blocks is never a livelock.
 * Bounds: K bytes, ring CAP. The other direction shares queue pair and line, which here fail at any time, and RST,
 * which ends everything.
 * V_START_SEEN: S publishes only when R has said that it knows START; then R without START needs no word at FIN.
 * V_LOST_LINE_IS_RESET: R trusts no byte behind N on TCP when the line is gone without a last word.
 * Not modelled: -DCRASH and -DLEAVE together (a program that reads without us takes any FIN for clean), an S
 * that becomes another program without a word (its ring is gone, its TCP connection goes on: nobody can tell).
 */
#ifndef K
#define K 3
#endif
#ifndef CAP
#define CAP 2
#endif
mtype = { READY, START, SEEN, FROZEN, RECALL, END, END_OK, REPLAYED, BYE };

chan tcp = [K] of { byte };
bool fin;
chan to_r = [5] of { mtype, byte };   /* words of S */
chan to_s = [5] of { mtype, byte };   /* words of R */
byte n;                               /* S's N; R may use what START said */
byte tail, arrived, head, credit;     /* published, in R's memory, consumed, what S knows to be consumed */
byte taken, given;
bool failed;                          /* the queue pair */
bool line_down;
bool rst;                             /* the TCP connection is reset */
bool kill_s, kill_r;
bool lost;                            /* what excuses a reset: somebody was killed, the line went down */
bool deaf_s, deaf_r;                  /* never notices that the queue pair failed */
bool restless_s, restless_r;          /* may set down, or leave, for reasons of its own; else hangs would not show */

inline tell_r(what, value) { if :: !line_down -> to_r!what(value) :: line_down fi }
inline tell_s(what, value) { if :: !line_down -> to_s!what(value) :: line_down fi }

/* --- the sender and its keeper ----------------------------------------------------------------------- */
inline kernel_send(value) {
  if
  :: atomic { nfull(tcp) && !rst -> tcp!value }
  :: rst
  fi
}

/* FROZEN(x): [x, tail) into TCP. Without a start there is nothing, but R still waits for the word. */
inline replay() {
  do
  :: on && x < tail -> assert(x >= credit); kernel_send(n + x); x++
  :: else -> break
  od;
  atomic { tell_r(REPLAYED, 0); raw = true; x = 0 }
}

proctype S(byte goal) {
  byte x; mtype t;
  bool ready, on, seen, recalled, ended, raw, seen_down, noticed;
  {
    do
    :: rst -> break
    /* The program sends. Raw before the start and after the return, through the ring between. */
    :: atomic { !rst && (!on || raw) && taken < goal && nfull(tcp) -> tcp!taken; taken++ }
    :: atomic {
         ready && !on && !raw && !noticed -> on = true; n = taken; tell_r(START, n)
       }
    :: atomic {
#if defined(V_START_SEEN) && !defined(M_PUBLISH_BEFORE_SEEN)
         seen &&
#endif
         on && !raw && !recalled && !ended && taken < goal && tail - credit < CAP ->
         tail++; taken++
       }
    /* Credits, whenever R sends them: a lower bound of what R consumed. */
    :: atomic { on && !failed && credit < head -> credit = head }
    /* Set down, for reasons of our own: not after an END. */
    :: atomic { restless_s && on && !raw && !recalled && !ended -> recalled = true; tell_r(RECALL, 0) }
    :: atomic { !on && !raw -> raw = true; tell_r(REPLAYED, 0) }   /* never will start */
    /* The queue pair failed: R may never notice. Also after an END: what it has not got it must seal off. */
    :: atomic {
         failed && !noticed && !deaf_s -> noticed = true;
         if
#ifdef M_END_THEN_NO_RECALL
         :: on && !raw && !recalled && !ended -> recalled = true; tell_r(RECALL, 0)
#else
         :: on && !raw && !recalled -> recalled = true; tell_r(RECALL, 0)
#endif
         :: else
         fi
       }
    :: atomic { taken == goal && on && !raw && !recalled && !ended -> ended = true; tell_r(END, tail) }
    /* Words. Once raw we owe nothing: a late READY has its REPLAYED in front of it. */
    :: atomic { !seen_down && nempty(to_s) -> to_s?t(x) };
       if
       :: t == READY -> ready = true
       :: t == SEEN -> seen = true
       :: t == FROZEN && !raw -> replay()
       :: t == FROZEN && raw -> assert(!on)             /* it crossed "never will start"; never after END_OK */
       :: t == END_OK -> assert(ended && !raw); raw = true
       :: t == BYE -> assert(raw)                        /* its FROZEN or END_OK came before */
       fi;
       atomic { x = 0; t = 0 }
    /* The line is gone, and what R said last may be too. What R has consumed we know only if it is everything. */
    :: line_down && !seen_down -> seen_down = true;
       if
#ifdef M_REPLAY_FROM_CREDITS
       :: on && !raw -> x = credit; replay()
#else
       :: atomic { on && !raw && credit == tail -> raw = true }
       :: atomic { on && !raw && credit < tail -> rst = true }
#endif
       :: !on || raw -> raw = true
       fi
    /* FIN, behind everything. */
#ifdef M_FIN_BEFORE_END_OK
    :: taken == goal && (raw || ended) -> fin = true; break
#elif defined(M_FIN_WITHOUT_WORD)
    :: taken == goal && (raw || !on) -> fin = true; break
#else
    :: taken == goal && raw -> fin = true; break
#endif
    od
  } unless { kill_s -> skip };
  /* The kernel closes for us: FIN, or RST when we had unread bytes. */
  if
  :: fin || rst
  :: else -> if :: fin = true :: rst = true fi
  fi
}

/* --- the receiver and its keeper --------------------------------------------------------------------- */
inline give(value) { d_step { assert(value == given); given++ } }
inline take_tcp() { tcp?x; give(x); x = 0 }
inline seal() { sealed = true; tell_s(FROZEN, head) }

#define DRAINED (sealed || !start || (given >= start - 1 && head == arrived))
#define AT_FIN (empty(tcp) && fin && !rst)
/* All bytes are here by count: START, END and what we gave. */
#define ALL (end && given == start - 1 + end - 1)
#ifdef V_START_SEEN
#define KNOWN (replayed || ALL || proof || !start)   /* no START, so no SEEN, so nothing was published */
#else
#define KNOWN (replayed || ALL || proof)
#endif

proctype R() {
  byte x; mtype t;
  byte start, end;       /* N + 1, T + 1 */
  bool managed, sealed, end_ok, replayed, seen_down, noticed, over, clean, proof, left;
  {
    do
    :: over -> break
    :: !over && rst -> over = true
    /* Not on a queue pair that has failed: who never notices it would start. */
#ifdef M_READY_AFTER_FAILURE
    :: atomic { !over && !managed && !left && !seen_down -> managed = true; tell_s(READY, 0) }
#else
    :: atomic { !over && !managed && !left && !seen_down && !noticed -> managed = true; tell_s(READY, 0) }
#endif
    /* Bytes land in our memory, whether or not the program looks. */
    :: atomic { !over && !failed && arrived < tail -> arrived++ }
    /* --- reading ------------------------------------------------------------------------------------- */
    :: atomic { !over && !managed && nempty(tcp) -> take_tcp() }
    :: atomic { !over && !managed && AT_FIN -> clean = true; over = true }
    /* Below N, without a START, or sealed: TCP only. Without START and seal nothing behind N can be on TCP. */
    :: atomic { !over && managed && (sealed || !start || given < start - 1) && nempty(tcp) -> take_tcp() }
    :: atomic {
#if defined(M_RELEASE_AFTER_FROZEN)
         !over && managed && start && given == start - 1 + head && head < arrived ->
#elif defined(M_RING_BEFORE_START)
         !over && managed && !sealed && (!start || given >= start - 1) && head < arrived ->
#else
         !over && managed && !sealed && start && given >= start - 1 && head < arrived ->
#endif
         give(n + head); head++
       }
    /* The line is gone, the ring is drained, and TCP brings a byte behind N: S knew that we have consumed everything,
     * or it would have reset. From here on the stream is as if it had never left the kernel. */
    :: atomic {
         !over && managed && !sealed && start && DRAINED && seen_down && nempty(tcp) ->
#ifdef V_LOST_LINE_IS_RESET
         over = true
#else
         take_tcp(); proof = true
#endif
       }
    /* FIN. The word that explains it may be behind it in time: no verdict before the word or the end of the line. */
    :: atomic { !over && managed && DRAINED && AT_FIN && KNOWN -> clean = true; over = true }
    :: atomic {
#ifdef M_FIN_OVERTAKES_WORDS
         !over && managed && DRAINED && AT_FIN && !KNOWN ->
#else
         !over && managed && DRAINED && AT_FIN && !KNOWN && seen_down ->
#endif
#ifdef M_CLEAN_AFTER_CRASH
         clean = true;
#endif
         over = true
       }
    /* --- turning ------------------------------------------------------------------------------------- */
    :: atomic {
#ifdef M_END_OK_EARLY
         !over && managed && !sealed && end && !end_ok ->
#else
         !over && managed && !sealed && end && !end_ok && arrived == end - 1 ->
#endif
         end_ok = true; tell_s(END_OK, end - 1)
       }
    /* Freeze, for reasons of our own (the stream is started or not). */
#ifdef M_SEAL_AFTER_END_OK
    :: atomic { restless_r && !over && managed && !sealed && !replayed -> seal() }
#else
    :: atomic { restless_r && !over && managed && !sealed && !replayed && !end_ok -> seal() }
#endif
    :: atomic {
         !over && failed && !noticed && !deaf_r -> noticed = true;
         if
         :: managed && !sealed && !replayed && !end_ok -> seal()
         :: else
         fi
       }
#ifdef LEAVE
    :: atomic {
         restless_r && !over && managed && !end_ok && !replayed ->
         left = true; managed = false;
         if
         :: true -> if :: !sealed -> seal() :: sealed fi; tell_s(BYE, 0)
         :: true -> failed = true; line_down = true; lost = true
         fi
       }
#endif
    /* --- words --------------------------------------------------------------------------------------- */
    :: atomic {
         !over && !seen_down && nempty(to_r) -> to_r?t(x);
         if
         :: t == START -> start = x + 1;
#ifdef V_START_SEEN
            if :: managed -> tell_s(SEEN, 0) :: else fi
#endif
         :: t == END -> end = x + 1
         :: t == REPLAYED -> replayed = true
#ifdef M_RECALL_IGNORED_AFTER_END
         :: t == RECALL -> if :: managed && !sealed && !end -> seal() :: else fi
#else
         :: t == RECALL -> if :: managed && !sealed && !end_ok -> seal() :: else fi
#endif
         fi;
         t = 0; x = 0
       }
    :: !over && line_down && !seen_down -> seen_down = true
    od;
    if
    :: clean -> assert(given == taken)
    :: else -> assert(lost)
    fi
  } unless { kill_r -> skip };
  if :: kill_r -> rst = true :: else fi
}

init {
  byte goal;
  atomic {
    select(goal : 0 .. K);
    if :: deaf_s = true :: deaf_r = true :: skip fi;
#if defined(LINE) || defined(CRASH)
    if :: restless_s = true; restless_r = true :: skip fi;
#else
    if :: restless_s = true :: skip fi;
    if :: restless_r = true :: skip fi;
#endif
    run S(goal); run R()
  };
  do
  :: atomic { !failed -> failed = true }
#ifdef LINE
  :: atomic { !line_down -> lost = true; line_down = true }
#endif
#ifdef CRASH
  :: atomic { !lost -> lost = true; failed = true; line_down = true; kill_s = true }
  :: atomic { !lost -> lost = true; failed = true; line_down = true; kill_r = true }
#endif
  :: break
  od
}
