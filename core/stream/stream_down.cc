// Setting down: from the ring back to TCP at an exact byte. PROTOCOL.md, "Moving a direction".

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <utility>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/keeper.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {
namespace {

/// A lost kick costs at most about so long: the keeper's timer, and who waits, come by here.
constexpr uint64_t kKickAgainNs = 5'000'000;

std::atomic<uint64_t> g_replayed{0};

}  // namespace

void finish_tx_locked(Stream& s) noexcept {
  s.tx.state = TxState::kKernel;
  s.tx.ring_done = true;
  s.tx.full_at = 0;
  s.tx.gate.give_back();
}

void finish_rx_locked(Stream& s) noexcept {
  s.rx.state = RxState::kKernel;
  s.rx.ring_done = true;
  s.rx.gate.give_back();
}

void leave_ring_locked(Stream& s, TurnKind turn) noexcept {
  // Frozen: the sender owes us on TCP what we have not read. Ended: FIN follows.
  // Open, of a peer that left without a word about its end: what came may not be all. Where the
  // words were in memory that we still have, it is.
  const bool unknown = turn == TurnKind::kOpen && !s.channel->decides_alone();
  if (turn == TurnKind::kFrozen || unknown)
    s.rx.await_replay.store(true, std::memory_order_release);
  if (turn == TurnKind::kEnded) s.rx.fin_seen.store(true, std::memory_order_relaxed);
  s.rx.end_due = turn == TurnKind::kOpen && s.rx.state == RxState::kRing;
  finish_rx_locked(s);
}

std::shared_ptr<Channel> take_channel_locked(Stream& s) noexcept {
  Keeper::unwatch_locked(s);
  // Explicitly, not by dropping the last reference: a call that siglongjmp left keeps one for ever,
  // a forked child keeps copies, and the peer's sender would wait for a reader that is not there.
  if (s.channel) s.channel->let_go();
  s.has_channel.store(false, std::memory_order_release);
  s.doorbell_fd.store(-1, std::memory_order_release);
  s.tx_wanted.store(false, std::memory_order_relaxed);
  s.rx.want_ready.store(false, std::memory_order_relaxed);
  s.rx.await_replay.store(false, std::memory_order_relaxed);  // who looks for it asks the channel
  return std::exchange(s.channel, nullptr);
}

void begin_replay_locked(Stream& s, uint64_t x) noexcept {
  const uint64_t tail = s.channel->tx_tail();
  if (x > tail ||
      tail - x > s.channel->capacity()) {  // a lie: there is nothing true to continue from
    s.tx.lied = true;
    s.tx.replay_next = tail;
  } else {
    s.tx.replay_next = x;
  }
  s.tx.state = TxState::kReplay;
}

bool flush_replay_locked(Stream& s) noexcept {
  const int fd = s.fd.load(std::memory_order_relaxed);
  const uint64_t tail = s.channel->tx_tail();
  while (s.tx.replay_next < tail) {
    // Straight from the ring: a buffer here would be on the program's stack, which may be small.
    iovec spans[2];
    msghdr msg{};
    msg.msg_iov = spans;
    msg.msg_iovlen = s.channel->tx_unread_spans(s.tx.replay_next, tail - s.tx.replay_next, spans);
    if (msg.msg_iovlen == 0) {  // a file that was passed by reference has lost the bytes
      s.tx.lied = true;
      s.error.store(ECONNRESET, std::memory_order_release);
      abort_connection(fd);  // never a clean end
      break;
    }
    const auto sent = os::sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (!sent) {
      if (sent.error() == EAGAIN || sent.error() == EINTR || sent.error() == ENOBUFS) {
        Keeper::watch_for_room(s);
        return false;
      }
      // The connection is gone and the bytes with it, as they would be from a kernel buffer. The
      // program hears of it once, as it would have.
      if (!(sent.error() == EPIPE)) s.error.store(value(sent.error()), std::memory_order_release);
      break;
    }
    s.tx.replay_next += *sent;
    s.tx.off_tcp -= *sent;
    s.sent[0].fetch_add(*sent, std::memory_order_relaxed);
    s.sent[static_cast<int>(s.channel->kind())].fetch_sub(*sent, std::memory_order_relaxed);
    g_replayed.fetch_add(*sent, std::memory_order_relaxed);
  }
  s.channel->tx_set_replayed();
  s.channel->wake_peer();
  if (s.tx.fin_owed) {
    s.tx.fin_owed = false;
    (void)os::shutdown(fd, SHUT_WR);
  }
  finish_tx_locked(s);
  Keeper::kick_peer_locked(s);
  return true;
}

uint64_t replayed_bytes() noexcept { return g_replayed.load(std::memory_order_relaxed); }

/// The answer to an end that was asked for: every byte is in the peer's memory, FIN may follow.
static void finish_end_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  s.channel->tx_set_replayed();
  if (s.tx.fin_owed) {
    s.tx.fin_owed = false;
    (void)os::shutdown(s.fd.load(std::memory_order_relaxed), SHUT_WR);
  }
  finish_tx_locked(s);
}

bool obey_tx_turn_locked(Stream& s) noexcept {
  if (s.tx.state != TxState::kRing) return false;
  Turn turn = s.channel->tx_turn();
  if (turn.kind == TurnKind::kOpen && s.peer_gone.load(std::memory_order_acquire)) {
    turn = s.channel->tx_recall();  // nobody reads the ring any more
    if (s.channel->tx_failed()) {   // and nobody knows what was read
      s.tx.lied = true;
      return true;
    }
  }
  if (turn.kind == TurnKind::kOpen) return false;
  if (turn.kind == TurnKind::kEnded) {
    finish_end_locked(s);
    return true;
  }
  begin_replay_locked(s, turn.at);
  (void)flush_replay_locked(s);
  return true;
}

/// Receiver: what the words say for good is done: the kernel goes on where nothing more will come
/// out of the ring. A peer that died without an end is the readers' to find, as it is judged by
/// what it left unread; with `also_died` it makes no difference any more.
static void obey_rx_words_locked(Stream& s, bool also_died) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  if (s.rx.ring_done) return;
  Channel& ch = *s.channel;
  // Before the words: what a peer that let go has sealed and published is seen.
  const bool gone = s.peer_gone.load(std::memory_order_acquire);
  const Turn turn = ch.rx_turn();
  if (turn.kind == TurnKind::kOpen && !gone) return;
  if (s.rx.state == RxState::kKernel) {  // before the switch: now it never comes
    s.rx.want_ready.store(false, std::memory_order_relaxed);
    s.rx.ring_done = true;
  } else if (turn.kind == TurnKind::kFrozen) {
    leave_ring_locked(s, TurnKind::kFrozen);
  } else if (!ch.rx_start() || (s.rx.state == RxState::kTcp && ch.rx_published() == 0)) {
    leave_ring_locked(s, TurnKind::kOpen);
  } else if ((turn.kind == TurnKind::kEnded || also_died) && s.rx.state == RxState::kRing &&
             ch.rx_available() == 0 && !ch.rx_failed()) {
    // Drained, though the program has not come for the end: a pool of stale connections is like
    // this, and whoever forks would wait for each of them.
    leave_ring_locked(s, turn.kind);
  }
}

/// Receiver: the peer shall put on TCP what we have not read. Not if there is nobody who could:
/// then our readers drain the ring first, as after an end.
static void freeze_rx_locked(Stream& s) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  if (!s.rx.ring_done && s.channel->peer_let_go()) {
    s.peer_gone.store(true, std::memory_order_release);
  }
  obey_rx_words_locked(s, true);
  if (s.rx.ring_done || s.peer_gone.load(std::memory_order_acquire)) return;
  if (s.channel->rx_freeze().kind == TurnKind::kFrozen) {
    s.rx.await_replay.store(true, std::memory_order_release);
    if (s.rx.state == RxState::kKernel) {
      s.rx.ring_done = true;
    } else {
      finish_rx_locked(s);
    }
  } else {
    obey_rx_words_locked(s, true);  // the peer's end was first
  }
}

void set_down(Stream& s, Reason reason) noexcept {
  {
    MutexLock lock(s.tx.mutex);
    if (!s.channel) return;
    s.tx_wanted.store(false, std::memory_order_relaxed);
    if (!s.tx.ring_done) {
      const Turn turn = s.channel->tx_recall();
      if (s.tx.state == TxState::kRing && turn.kind == TurnKind::kFrozen) {
        begin_replay_locked(s, turn.at);
        (void)flush_replay_locked(s);
      } else if (s.tx.state == TxState::kKernel) {
        s.tx.ring_done = true;  // never switched, and now never will
        s.channel->tx_set_replayed();
      }
    }
  }
  {
    MutexLock lock(s.rx.mutex);
    if (!s.channel) return;
    ++s.set_downs;
    s.rx.want_ready.store(false, std::memory_order_relaxed);
    freeze_rx_locked(s);
    s.rx.end_due = false;  // somebody needs the kernel's stream now
    s.channel->wake_peer();
    Keeper::kick_peer_locked(s);
    s.rx.kicked_ns = monotonic_ns();
  }
  s.not_lifted.store(reason, std::memory_order_relaxed);
  count_set_down(reason);
  RSOCK_LOG(kInfo, "fd %d: set down to TCP: %s", s.fd.load(std::memory_order_relaxed), reason);
  maybe_detach(s);
  wake_waiters(s);
}

/// The peer let go of the channel without saying `replayed`, but there was nothing to replay, or it
/// is here.
static bool nothing_owed_locked(Stream& s) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  return s.peer_gone.load(std::memory_order_acquire) && all_received_locked(s);
}

bool all_received_locked(Stream& s) noexcept {
  if (s.channel->rx_replayed()) return true;
  const auto start = s.channel->rx_start();
  // Where the words are in memory the peer can't have switched without our seeing it. A line loses
  // the last ones.
  if (!start) return s.channel->decides_alone();
  return s.rx.offset.load(std::memory_order_relaxed) >= *start + s.channel->rx_published();
}

bool end_known_locked(Stream& s) noexcept {
  return s.channel->decides_alone() || s.channel->rx_replayed() ||
         s.peer_gone.load(std::memory_order_acquire);
}

void maybe_detach(Stream& s) noexcept {
  if (!s.has_channel.load(std::memory_order_acquire)) return;
  if (!in_own_process()) {  // what this process closed would stay open in ours
    s.detach_due.store(true, std::memory_order_release);
    Keeper::leave_to_keeper();
    return;
  }
  std::shared_ptr<Channel> channel;
  bool closed = false;
  {
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    if (!s.channel || !s.tx.ring_done || !s.rx.ring_done) return;
    // poll has to say POLLERR until the program has heard of it, and the kernel, which we took it
    // from, does not any more. Such a connection is over; the channel goes with its close.
    // The same for completions of MSG_ZEROCOPY, which are ours alone to tell.
    if ((s.error.load(std::memory_order_acquire) != 0 || s.zero_copies.pending()) &&
        !s.closed.load(std::memory_order_relaxed)) {
      return;
    }
    if (s.rx.await_replay.load(std::memory_order_relaxed)) {
      if (!s.channel->rx_replayed() && !nothing_owed_locked(s)) return;
      s.rx.await_replay.store(false, std::memory_order_relaxed);
    }
    // A process that dies lets go of the channel a moment before its kernel sends FIN. To give the
    // kernel its registrations back in between makes it report, edge-triggered, a stream that is
    // writable and nothing else. The keeper comes again with the first sign on TCP.
    if (s.rx.end_due && !s.closed.load(std::memory_order_relaxed) &&
        os::poll_now(s.fd.load(std::memory_order_relaxed), POLLIN | POLLRDHUP) == 0) {
      return;
    }
    channel = take_channel_locked(s);
    closed = s.closed.load(std::memory_order_relaxed);
  }
  path_changed(s);
  channel->wake_local();
  if (!closed) Keeper::detached(s);
}

/// A kick is a datagram to a queue of ten, and many streams are set down at once: until the peer
/// has done what we froze for, its keeper is told again.
static void kick_again_locked(Stream& s) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  if (!s.rx.await_replay.load(std::memory_order_relaxed) || s.channel->rx_replayed() ||
      s.peer_gone.load(std::memory_order_acquire)) {
    return;
  }
  // Not at every look: both ends may wait, and each kick makes the other one look.
  const uint64_t now = monotonic_ns();
  if (now - s.rx.kicked_ns < kKickAgainNs) return;
  s.rx.kicked_ns = now;
  Keeper::kick_peer_locked(s);
}

/// The path is of no use any more, and the directions were not called back for that yet.
static Reason take_path_failure(Stream& s) noexcept {
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  if (!s.channel || s.path_failed) return nullptr;
  const Reason reason = s.channel->path_failure();
  s.path_failed = reason != nullptr;
  if (s.path_failed) s.path_failed_ns = monotonic_ns();
  return reason;
}

Reason failure_of(Stream& s) noexcept {
  return s.peer_gone.load(std::memory_order_acquire) ? "the peer went with bytes of ours unread"
                                                     : "peer broke the protocol";
}

/// TCP_USER_TIMEOUT of the program's socket times what TCP has sent. What was on a lost queue pair
/// is waited for by us: the peer has been asked where it is, and does not say.
static bool user_timeout_passed_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  if (s.path_failed_ns == 0 || s.tx.state != TxState::kRing || s.channel->decides_alone())
    return false;
  const auto ms =
      os::getsockopt_int(s.fd.load(std::memory_order_relaxed), IPPROTO_TCP, TCP_USER_TIMEOUT);
  return ms && *ms > 0 &&
         monotonic_ns() - s.path_failed_ns > static_cast<uint64_t>(*ms) * 1'000'000;
}

void attend(Stream& s) noexcept {
  if (!s.has_channel.load(std::memory_order_acquire)) return;
  try_ready(s);
  bool lied = false;
  bool late = false;
  {
    MutexLock lock(s.tx.mutex);
    if (!s.channel) return;
    if (s.tx.state == TxState::kKernel && !s.tx.ring_done) {
      if (s.channel->tx_turn().kind != TurnKind::kOpen ||
          s.peer_gone.load(std::memory_order_acquire)) {
        s.tx.ring_done = true;
        s.channel->tx_set_replayed();
        s.tx_wanted.store(false, std::memory_order_relaxed);
        Keeper::kick_peer_locked(s);
      } else {
        notice_ready_locked(s);
      }
    }
    (void)obey_tx_turn_locked(s);
    if (s.tx.state == TxState::kReplay) (void)flush_replay_locked(s);
    lied = s.tx.lied || s.channel->tx_failed();
    late = user_timeout_passed_locked(s);
  }
  if (late) return fail_stream(s, "the peer does not answer (TCP_USER_TIMEOUT)", ETIMEDOUT);
  if (lied) return fail_stream(s, failure_of(s));
  if (s.tx_wanted.load(std::memory_order_acquire)) try_switch_tx(s);
  {
    MutexLock lock(s.rx.mutex);
    if (!s.channel) return;
    // The program may do nothing but send, and would not find it for long.
    lied = !s.rx.ring_done && s.channel->rx_failed();
    if (!lied && s.channel->rx_asked_back()) {
      freeze_rx_locked(s);
    } else if (!lied) {
      obey_rx_words_locked(s, false);
    }
    kick_again_locked(s);
  }
  if (lied) return fail_stream(s, failure_of(s));
  if (const Reason reason = take_path_failure(s); reason != nullptr) return set_down(s, reason);
  maybe_detach(s);
  wake_waiters(s);
}

}  // namespace rsock::stream
