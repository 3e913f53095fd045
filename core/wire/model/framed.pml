/* The framed phase: a path whose control words die with it (a queue pair). Lift of both directions, failure
 * of the path at any step, what each end does with the kernel's streams afterwards; crash of Q (-DCRASH).
 *
 * Before a lift both kernel streams are raw. The overlay (`ov`) is reliable and ordered until it fails; then
 * everything in flight is lost, both ends notice at some later time, on their own. The only thing left is TCP, and the
 * receiver of a direction must know whether the next byte on it is raw or a record. Rules under test, per
 * direction S to R:
 *   1. READY from R; S stops writing TCP, fixes N: START(N); R answers SEEN.
 *   2. S publishes only after SEEN of its own direction and after the peer's BOTH ("I got SEEN for mine").
 *   3. On failure S goes framed if it got SEEN, else it stays raw. Its first record begins with the
 *      channel's nonce (here: the message NONCE).
 *   4. On failure R without START reads raw. R with START but without an overlay byte reads the nonce or
 *      raw bytes, whichever comes at N. R with an overlay byte knows: records.
 *   5. A receiver on a framed direction first sends RETURN(X) as a record on its own sending direction; the
 *      sender replays from X. A sender that published nothing needs no RETURN (X = 0).
 *   6. RETURN may follow the FIN record; the kernel's shutdown(SHUT_WR) waits until the other direction is
 *      through with the channel.
 * Bounds: K bytes each way, some of them raw before the lift; one channel. Kernel buffers hold all (flow
 * control is direction.pml's). Mutants: M_*.
 */
#ifndef K
#define K 2
#endif
mtype = { READY, START, SEEN, BOTH, DATA, RAWBYTE, NONCE, RETURN, FIN };

typedef End {
  chan tcp = [8] of { mtype, byte };   /* what this end sends */
  chan ov = [6] of { mtype, byte };    /* what this end sends; lost on failure */
  byte taken;      /* bytes whose send() returned */
  byte given;      /* bytes this end gave to its program, from the other */
  byte n;          /* N of what this end sends */
  bool over;       /* receiving side has met the end of the stream */
  bool clean
};
End e[2];
bool failed;                           /* the path is down */
bool noticed[2];
bool kill_q, dead[2];

inline give(byte_) { d_step { assert(byte_ == e[me].given); e[me].given++ } }

proctype Endpoint(byte me; byte you) {
  mtype t; byte v, pub, x, upto;
  bool got_ready, sent_start, got_seen, got_both, sent_both, sent_ready;  /* as sender */
  bool got_start, got_byte, framed_rx, rx_known;                           /* as receiver */
  bool framed_tx, nonce_sent, need_return, replayed, fin_sent, returned, ov_fin;
  byte k;
  {
  do
  /* --- before and during the lift ------------------------------------------------------------------ */
  :: !sent_start && !noticed[me] && e[me].taken < K ->
     atomic { e[me].tcp!RAWBYTE(e[me].taken); e[me].taken++ }
  :: !sent_ready && !noticed[me] ->
     atomic { sent_ready = true; if :: !failed -> e[me].ov!READY(0) :: else fi }
  :: got_ready && !sent_start && !noticed[me] ->
     atomic { sent_start = true; e[me].n = e[me].taken; if :: !failed -> e[me].ov!START(e[me].n) :: else fi }
  :: got_seen && !sent_both && !noticed[me] ->
     atomic { sent_both = true; if :: !failed -> e[me].ov!BOTH(0) :: else fi }
  /* Publish: our own copy stays until it is consumed, so a replay can begin anywhere. */
#ifdef M_PUBLISH_BEFORE_SEEN
  :: sent_start && !noticed[me] && e[me].taken < K ->
#else
#ifdef M_PUBLISH_BEFORE_BOTH
  :: sent_start && got_seen && !noticed[me] && e[me].taken < K ->
#else
  :: sent_start && got_seen && got_both && !noticed[me] && e[me].taken < K ->
#endif
#endif
     atomic { if :: !failed -> e[me].ov!DATA(e[me].taken) :: else fi; e[me].taken++; pub++ }
  /* Half-close: FIN over the overlay; the kernel's FIN must wait, a RETURN may have to follow on TCP. */
  :: got_seen && got_both && !noticed[me] && e[me].taken == K && !ov_fin ->
     atomic { ov_fin = true; if :: !failed -> e[me].ov!FIN(0) :: else fi }
  /* --- what comes over the overlay ------------------------------------------------------------------ */
  :: atomic {
       !noticed[me] && nempty(e[you].ov) && ((e[you].ov?[DATA(_)] || e[you].ov?[FIN(_)]) -> e[me].given >= upto : true) ->
       e[you].ov?t(v);
       if
       :: t == READY -> got_ready = true
       :: t == START -> got_start = true; upto = v; if :: !failed -> e[me].ov!SEEN(0) :: else fi
       :: t == SEEN -> got_seen = true
       :: t == BOTH -> got_both = true
       :: t == DATA -> got_byte = true; give(v)
       :: t == FIN -> got_byte = true; e[me].over = true; e[me].clean = true
       fi;
       t = 0; v = 0
     }
  /* --- the path fails ------------------------------------------------------------------------------- */
  :: failed && !noticed[me] ->
     atomic {
       noticed[me] = true;
       framed_tx = got_seen;
       framed_rx = got_byte;
       rx_known = got_byte || !got_start
     }
  :: noticed[me] && framed_tx && !nonce_sent ->
#ifdef M_NO_NONCE
     nonce_sent = true
#else
     atomic { e[me].tcp!NONCE(0); nonce_sent = true }
#endif
  /* RETURN: only we know what we got. X counts from N. Who published to us knew that we can send it. */
  :: noticed[me] && rx_known && framed_rx && !returned && framed_tx && nonce_sent ->
     atomic { e[me].tcp!RETURN(e[me].given - upto); returned = true }
  /* Replay: at once if nothing was published, else when the RETURN is here. */
  :: noticed[me] && !replayed && ((framed_tx && nonce_sent && (pub == 0 || need_return)) || !framed_tx) ->
     assert(framed_tx || pub == 0);
     atomic {
       k = e[me].n + x;
       if :: !sent_start || pub == 0 -> k = e[me].taken :: else fi;
       do
       :: k < e[me].taken -> if :: framed_tx -> e[me].tcp!DATA(k) :: else -> e[me].tcp!RAWBYTE(k) fi; k++
       :: else -> break
       od;
       replayed = true; k = 0
     }
  :: noticed[me] && replayed && e[me].taken < K ->
     atomic {
       if :: framed_tx -> e[me].tcp!DATA(e[me].taken) :: else -> e[me].tcp!RAWBYTE(e[me].taken) fi;
       e[me].taken++
     }
  /* --- what comes over TCP --------------------------------------------------------------------------- */
  /* Up to N at any time; behind N only once the path is known to be down. */
#ifdef M_NOTHING_AFTER_FIN
  :: !e[me].over && nempty(e[you].tcp) && (noticed[me] || !got_start || e[me].given < upto) ->
#else
  :: nempty(e[you].tcp) && (noticed[me] || !got_start || e[me].given < upto) ->
#endif
     atomic {
       e[you].tcp?t(v);
       if
       :: t == RAWBYTE ->
          /* Raw where records were expected: the ends disagree. */
          assert(!framed_rx);
          give(v);
          if
          :: noticed[me] && !rx_known && e[me].given > upto -> rx_known = true; framed_rx = false
          :: else
          fi
       :: t == NONCE ->
          /* A record where raw bytes were expected would be given to the program. */
          assert(got_start && e[me].given >= upto);
          framed_rx = true; rx_known = true
       :: t == RETURN -> assert(got_start); need_return = true; x = v
       :: t == DATA -> assert(framed_rx); give(v)
       :: t == FIN -> e[me].over = true; e[me].clean = true; rx_known = true   /* no nonce before it: raw */
       fi;
       t = 0; v = 0
     }
  :: !e[me].over && empty(e[you].tcp) && dead[you] ->
     atomic {
       e[me].over = true;
       /* EOF without FIN record: clean only where the direction is raw, or nothing can be missing. */
       e[me].clean = !got_start && !framed_rx
     }
  /* --- the end: FIN behind everything --------------------------------------------------------------- */
  :: e[me].taken == K && !fin_sent && noticed[me] && replayed ->
     atomic { e[me].tcp!FIN(0); fin_sent = true }
  :: fin_sent && e[me].over && rx_known && (!framed_rx || !framed_tx || returned) && empty(e[you].tcp) -> break
  :: dead[you] && e[me].over -> break
  od;
  if
  :: e[me].clean -> assert(e[me].given == e[you].taken)
  :: else -> assert(dead[you])
  fi
  } unless { me == 1 && kill_q -> skip };
  dead[me] = true
}

init {
  atomic { run Endpoint(0, 1); run Endpoint(1, 0) };
#ifdef CRASH
  if :: kill_q = true :: skip fi;
#endif
  atomic {
    failed = true;                     /* what is in flight is lost; each end has received some prefix */
    do
    :: nempty(e[0].ov) -> e[0].ov?_, _
    :: nempty(e[1].ov) -> e[1].ov?_, _
    :: empty(e[0].ov) && empty(e[1].ov) -> break
    od
  };
#ifdef CRASH
  kill_q = true
#endif
}
