// One attempt to receive on a managed direction: TCP up to N, then the ring. What decides the order
// of the bytes is here; waiting and the kernel's half are in stream_recv.cc.

#include <sys/ioctl.h>

#include <algorithm>

#include "core/base/fence.h"
#include "core/os/os.h"
#include "core/stream/iov.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

/// Between the steps: the state changed, take the step that fits it now.
constexpr long kLookAgain = kRetryInKernel + 1;

/// TCP is at its end or failed, or has bytes it should not have. Called with an empty ring.
long probe_tcp_locked(Stream& s, int fd) noexcept {
  char byte;
  // Cleared before the look, or what happens in between is never looked at. seq_cst: not behind it.
  s.tcp_event.store(false, std::memory_order_seq_cst);
  const auto seen = os::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (!seen && seen.error() == EAGAIN) return -EAGAIN;
  s.tcp_event.store(true, std::memory_order_release);  // the next look has to find it too
  if (!seen) return -value(seen.error());
  return *seen == 0 ? 0 : 1;
}

/// The kernel says an error once, and the program has bytes to read before it: kept for later.
void keep_error(Stream& s, long probed) noexcept {
  if (probed < 0 && probed != -EAGAIN) {
    s.error.store(static_cast<int>(-probed), std::memory_order_release);
  }
}

long read_ring_locked(Stream& s, const iovec* iov, size_t n, size_t skip, size_t limit,
                      int flags) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  const bool peek = (flags & MSG_PEEK) != 0;
  size_t got = 0;
  if ((flags & MSG_TRUNC) == 0) {
    got = s.channel->rx_read(iov, n, skip, limit, peek);
    if (got == Channel::kFault) return -EFAULT;
  } else {  // on TCP it counts instead of copying (tcp(7)); the buffer may be no buffer
    got = peek ? std::min(s.channel->rx_available(), limit) : s.channel->rx_discard(limit);
  }
  if (got != 0 && !peek) count_taken_locked(s, got);
  return static_cast<long>(got);
}

long ring_step_locked(Stream& s, int fd, const iovec* iov, size_t n, size_t skip, size_t limit,
                      int flags) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  Channel& ch = *s.channel;
  // A call for no bytes waits for some, or for the end, as in tcp_recvmsg_locked().
  if (limit == 0 && ch.rx_available() != 0) return 0;
  long got = read_ring_locked(s, iov, n, skip, limit, flags);
  if (got != 0) return got;
  if (ch.rx_failed()) return -EPROTO;
  // Empty. Each of these was set after the last byte that it speaks of was published, so one more
  // look at the ring after reading it finds that byte.
  const Turn turn = ch.rx_turn();
  const bool event = s.tcp_event.load(std::memory_order_acquire);
  const bool gone = s.peer_gone.load(std::memory_order_acquire);
  if (turn.kind == TurnKind::kOpen && !event && !gone && !s.rx.shut) return -EAGAIN;
  if (turn.kind == TurnKind::kFrozen) {  // recalled by the sender: TCP goes on from here
    leave_ring_locked(s, turn.kind);
    return kRetryInKernel;
  }
  got = read_ring_locked(s, iov, n, skip, limit, flags);
  if (got != 0 || (limit == 0 && ch.rx_available() != 0)) return got;
  if (turn.kind == TurnKind::kEnded || gone) {
    // Drained. Ended: FIN follows on TCP. Gone: the peer let go of the channel with the direction
    // open, so nothing more can come on it (it died, or became another program). Either way the
    // kernel knows.
    if (ch.rx_failed()) return -EPROTO;
    leave_ring_locked(s, turn.kind);
    return kRetryInKernel;
  }
  if (s.rx.shut) return 0;
  const long probed = probe_tcp_locked(s, fd);
  if (probed == 0) {
    // FIN without a word in the channel: the peer was killed, or the program exits this instant.
    // What it published before is visible now.
    got = read_ring_locked(s, iov, n, skip, limit, flags);
    if (got != 0 || (limit == 0 && ch.rx_available() != 0)) return got;
    if (ch.rx_turn().kind != TurnKind::kOpen) return kLookAgain;
    if (ch.decides_alone()) return kPeerDied;
    // FIN follows an answered end, so this one is of a process that died, perhaps with bytes. The
    // line will say so.
    return s.peer_gone.load(std::memory_order_acquire) ? -ECONNRESET : -EAGAIN;
  }
  if (probed < 0) {
    // The reset may have come right behind the last bytes.
    if (ch.rx_available() == 0) return probed;
    keep_error(s, probed);
    return kLookAgain;
  }
  // Bytes on TCP while the ring is open: the direction was turned just now, or somebody writes to
  // the connection behind both libraries.
  if (ch.rx_turn().kind != TurnKind::kOpen) return kLookAgain;
  // Or the line of the words broke, the peer has heard of it, and we shall.
  return ch.decides_alone() ? -EPROTO : -EAGAIN;
}

/// How many bytes of the TCP stream may be read without passing the switch. 0: none now. The order
/// of the loads is the proof (PROTOCOL.md): what is queued before `start` is still unset lies
/// before N; a turn that is seen before an unset start means that there will never be one.
size_t tcp_allowance_locked(Stream& s, int fd, bool* never) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  Channel& ch = *s.channel;
  const auto queued = os::ioctl_int(fd, FIONREAD);
  full_fence();
  const bool turned = ch.rx_turn().kind != TurnKind::kOpen;
  const auto start = ch.rx_start();
  const uint64_t at = s.rx.offset.load(std::memory_order_relaxed);
  if (start) return *start - at;
  *never = turned;
  return queued ? static_cast<size_t>(*queued) : 0;
}

/// FIN on TCP, and the direction never came to the ring. Where the words are in memory it is what
/// it seems, but for an end before N. Over a line a START may have been lost with bytes behind it,
/// or the word that there will be none may be on its way: FIN overtakes it (PROTOCOL.md, "Across
/// hosts").
long end_before_start_locked(Stream& s, bool start_known) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  if (s.channel->decides_alone()) return start_known ? -ECONNRESET : 0;
  if (!start_known && s.channel->rx_replayed()) return 0;
  return s.peer_gone.load(std::memory_order_acquire) ? -ECONNRESET : -EAGAIN;
}

long tcp_step_locked(Stream& s, int fd, const iovec* iov, size_t n, size_t skip, size_t limit,
                     int flags) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  Channel& ch = *s.channel;
  for (;;) {
    if (const auto start = ch.rx_start()) {
      const uint64_t at = s.rx.offset.load(std::memory_order_relaxed);
      if (at > *start) return -EPROTO;
      if (at == *start) {
        s.rx.state = RxState::kRing;
        return kLookAgain;
      }
    }
    bool never = false;
    const size_t allowed = tcp_allowance_locked(s, fd, &never);
    if (never) {
      leave_ring_locked(s, TurnKind::kFrozen);
      return kRetryInKernel;
    }
    if (allowed == 0) {
      const bool known_start = ch.rx_start().has_value();
      // Nothing queued: empty, or at its end, or failed.
      const long probed = probe_tcp_locked(s, fd);
      if (probed > 0 || ch.rx_start() || ch.rx_turn().kind != TurnKind::kOpen) {
        keep_error(s, probed);
        continue;
      }
      if (probed == 0 && !s.rx.shut) return end_before_start_locked(s, known_start);
      return probed == -EAGAIN && s.rx.shut ? 0 : probed;
    }
    const bool known = ch.rx_start().has_value();
    iovec slice[kIovBatch];
    msghdr msg{};
    msg.msg_iov = slice;
    msg.msg_iovlen = iov_slice(iov, n, skip, std::min(limit, allowed), slice, kIovBatch);
    const auto got = os::recvmsg(fd, &msg, (flags & ~MSG_WAITALL) | MSG_DONTWAIT);
    if (!got) {
      if (got.error() == EAGAIN && s.rx.shut) return 0;
      return -value(got.error());
    }
    if (*got == 0) return limit == 0 || s.rx.shut ? 0 : end_before_start_locked(s, known);
    if ((flags & MSG_PEEK) == 0) {
      s.rx.offset.fetch_add(*got, std::memory_order_relaxed);
      s.received[0].fetch_add(*got, std::memory_order_relaxed);
    } else if (*got == allowed && known && limit > allowed) {
      // Up to the switch, and nothing was taken: what follows is the ring's. A program that peeks
      // for a whole header would peek for ever.
      const long more = read_ring_locked(s, iov, n, skip + *got, limit - *got, flags);
      return static_cast<long>(*got) + std::max(more, 0L);
    }
    return static_cast<long>(*got);
  }
}

}  // namespace

long rx_try_locked(Stream& s, int fd, const iovec* iov, size_t n, size_t skip, size_t limit,
                   int flags) noexcept {
  for (;;) {
    long got = 0;
    switch (s.rx.state) {
      case RxState::kKernel:
        return kRetryInKernel;
      case RxState::kTcp:
        got = tcp_step_locked(s, fd, iov, n, skip, limit, flags);
        break;
      case RxState::kRing:
        got = ring_step_locked(s, fd, iov, n, skip, limit, flags);
        break;
    }
    if (got == kLookAgain) continue;
    return got;
  }
}

}  // namespace rsock::stream
