// Receiving: the kernel while the gate is open, else TCP up to N, then the ring.

#include <poll.h>
#include <sys/ioctl.h>

#include <algorithm>

#include "core/os/os.h"
#include "core/stream/deadline.h"
#include "core/stream/iov.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"
#include "core/stream/spin.h"

namespace rsock::stream {
namespace {

constexpr int kKernelOnlyFlags = MSG_OOB | MSG_ERRQUEUE;

/// The peer's process ended without a word in the channel; what it left unread decides what that
/// means.
constexpr long kPeerDied = kRetryInKernel + 2;
/// Between the steps: the state changed, take the step that fits it now.
constexpr long kLookAgain = kRetryInKernel + 1;

/// TCP is at its end or failed, or has bytes it should not have. Called with an empty ring.
long probe_tcp_locked(Stream& s, int fd) noexcept {
  char byte;
  const auto seen = os::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (seen && *seen == 0) return 0;
  if (!seen) {
    if (seen.error() == EAGAIN) {
      s.tcp_event.store(false, std::memory_order_relaxed);
      return -EAGAIN;
    }
    return -value(seen.error());
  }
  return 1;
}

void count_ring_locked(Stream& s, size_t got) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  count_managed(s.rx.offset, got);
  s.rx.off_tcp += got;
  count_managed(s.received[static_cast<int>(s.channel->kind())], got);
}

long read_ring_locked(Stream& s, const iovec* iov, size_t n, size_t skip, size_t limit,
                      int flags) noexcept {
  const bool peek = (flags & MSG_PEEK) != 0;
  // MSG_TRUNC on TCP discards instead of copying (tcp(7)).
  const size_t got = (flags & MSG_TRUNC) != 0 && !peek
                         ? s.channel->rx_discard(limit)
                         : s.channel->rx_read(iov, n, skip, limit, peek);
  if (got != 0 && !peek) count_ring_locked(s, got);
  return static_cast<long>(got);
}

long ring_step_locked(Stream& s, int fd, const iovec* iov, size_t n, size_t skip, size_t limit,
                      int flags) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  Channel& ch = *s.channel;
  if (limit == 0) return ch.rx_available() != 0 ? 0 : -EAGAIN;
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
  if (got != 0) return got;
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
    return got != 0 ? got : (ch.rx_turn().kind == TurnKind::kOpen ? kPeerDied : kLookAgain);
  }
  if (probed < 0) return probed;
  // Bytes on TCP while the ring is open: the direction was turned just now, or somebody writes to
  // the connection behind both libraries.
  return ch.rx_turn().kind == TurnKind::kOpen ? -EPROTO : kLookAgain;
}

/// How many bytes of the TCP stream may be read without passing the switch. 0: none now. The order
/// of the loads is the proof (PROTOCOL.md): what is queued before `start` is still unset lies
/// before N; a turn that is seen before an unset start means that there will never be one.
size_t tcp_allowance_locked(Stream& s, int fd, bool* never) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  Channel& ch = *s.channel;
  const auto queued = os::ioctl_int(fd, FIONREAD);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool turned = ch.rx_turn().kind != TurnKind::kOpen;
  const auto start = ch.rx_start();
  const uint64_t at = s.rx.offset.load(std::memory_order_relaxed);
  if (start) return *start - at;
  *never = turned;
  return queued ? static_cast<size_t>(*queued) : 0;
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
      // Nothing queued: empty, or at its end, or failed.
      const long probed = probe_tcp_locked(s, fd);
      if (probed > 0 || ch.rx_start()) continue;
      if (probed == -EAGAIN && s.rx.shut) return 0;
      if (probed <= 0) {
        if (ch.rx_turn().kind != TurnKind::kOpen) continue;
        return probed;
      }
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
    if (*got == 0) return limit == 0 || !known || s.rx.shut ? 0 : -ECONNRESET;  // an end before N
    if ((flags & MSG_PEEK) == 0) {
      s.rx.offset.fetch_add(*got, std::memory_order_relaxed);
      s.received[0].fetch_add(*got, std::memory_order_relaxed);
    }
    return static_cast<long>(*got);
  }
}

/// Sleeps until something may have changed. Called with the lock held, returns with it held.
long sleep_for_bytes(Stream& s, int fd, Deadline deadline, const iovec* iov, size_t n, size_t skip,
                     size_t limit, int flags, long* got) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  std::shared_ptr<Channel> ch = s.channel;
  const uint32_t bell = ch->rx_bell();
  ch->rx_arm(transport::Sleep::kFutex);
  *got = rx_try_locked(s, fd, iov, n, skip, limit, flags);
  if (*got != -EAGAIN) return 0;
  timespec storage;
  // Bytes in hand: a signal ends the call, whatever SA_RESTART says (tcp_recvmsg returns the
  // count).
  const timespec* timeout = deadline.for_futex(&storage, skip != 0);
  if (timeout != nullptr && timeout->tv_sec == 0 && timeout->tv_nsec == 0) return -EAGAIN;
  s.rx.mutex.unlock();
  const auto slept = ch->rx_sleep(bell, timeout);
  ch.reset();
  s.rx.mutex.lock();
  if (slept) return 0;
  return slept.error() == ETIMEDOUT ? -EAGAIN : -value(slept.error());
}

long wait_locked(Stream& s, int fd, Deadline deadline, const iovec* iov, size_t n, size_t skip,
                 size_t limit, int flags, long* got) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  SpinBudget spin(s.rx.spin);
  *got = -EAGAIN;
  if (s.rx.state == RxState::kRing) {
    while (spin.more()) {
      if (s.channel->rx_available() != 0) {
        spin.hit();
        return 0;
      }
      if (s.rx.mutex.contended()) break;
      cpu_relax();
    }
  }
  const long result = sleep_for_bytes(s, fd, deadline, iov, n, skip, limit, flags, got);
  spin.missed();
  return result;
}

/// MSG_PEEK | MSG_WAITALL found `have` of `want` bytes: waits for more. False: this is all there
/// will be.
bool wait_for_more_locked(Stream& s, size_t have, size_t want, Deadline deadline) noexcept
    RSOCK_REQUIRES(s.rx.mutex) {
  if (s.rx.state != RxState::kRing || have >= want || have >= s.channel->capacity()) return false;
  std::shared_ptr<Channel> ch = s.channel;
  const uint32_t bell = ch->rx_bell();
  ch->rx_arm(transport::Sleep::kFutex);
  if (ch->rx_available() > have) return true;
  if (ch->rx_turn().kind != TurnKind::kOpen || s.tcp_event.load(std::memory_order_acquire) ||
      s.rx.shut) {
    return false;
  }
  timespec storage;
  const timespec* timeout = deadline.for_futex(&storage, true);
  s.rx.mutex.unlock();
  const auto slept = ch->rx_sleep(bell, timeout);
  ch.reset();
  s.rx.mutex.lock();
  return slept.has_value() && s.rx.state == RxState::kRing;
}

/// The managed half of recv(): loops over attempts and waits.
long recv_managed(Stream& s, int fd, const iovec* iov, size_t n, size_t total, size_t* done,
                  int flags) noexcept {
  const uint32_t generation = s.generation.load(std::memory_order_relaxed);
  const bool blocking =
      (flags & MSG_DONTWAIT) == 0 && !s.nonblocking.load(std::memory_order_relaxed);
  const Deadline deadline =
      Deadline::from_option(blocking ? s.rcv_timeout_ns.load(std::memory_order_relaxed) : 0);
  MutexLock lock(s.rx.mutex);
  for (;;) {
    if (!s.owned_by(generation) || s.closed.load(std::memory_order_relaxed)) return -EBADF;
    long got = rx_try_locked(s, fd, iov, n, *done, total - *done, flags);
    long waited = 0;
    if (got == -EAGAIN && blocking) {
      waited = wait_locked(s, fd, deadline, iov, n, *done, total - *done, flags, &got);
      if (waited == 0 && got == -EAGAIN) continue;
    }
    if (waited != 0) return *done != 0 ? static_cast<long>(*done) : waited;
    if (got == kRetryInKernel || got == kPeerDied) {
      return got == kPeerDied && *done != 0 ? static_cast<long>(*done) : got;
    }
    if (got <= 0) return *done != 0 ? static_cast<long>(*done) : got;
    if ((flags & MSG_PEEK) != 0 && (flags & MSG_WAITALL) != 0 && blocking &&
        wait_for_more_locked(s, static_cast<size_t>(got), total, deadline)) {
      continue;
    }
    *done += static_cast<size_t>(got);
    if (*done >= total || (flags & MSG_WAITALL) == 0 || (flags & MSG_PEEK) != 0) {
      return static_cast<long>(*done);
    }
  }
}

/// The kernel half; what a clean end means when a replay is still owed to us. It is clean only if
/// TCP gave everything that the sender had published (D10).
long judge_kernel_end(Stream& s, long r) noexcept {
  if (r == 0 && s.peer_gone.load(std::memory_order_acquire) &&
      !s.rx.fin_seen.load(std::memory_order_relaxed)) {
    judge_unread(s);
    if (const int e = take_error(s); e != 0) return -e;
  }
  if (r != 0 || !s.rx.await_replay.load(std::memory_order_acquire)) return r;
  MutexLock lock(s.rx.mutex);
  if (!s.channel || s.channel->rx_replayed()) return 0;
  const auto start = s.channel->rx_start();
  const uint64_t at = s.rx.offset.load(std::memory_order_relaxed);
  if (!start || at >= *start + s.channel->rx_published()) return 0;
  s.rx.await_replay.store(false, std::memory_order_relaxed);
  return -ECONNRESET;
}

long count_received(Stream& s, long r, int flags) noexcept {
  if (r > 0 && (flags & (MSG_PEEK | kKernelOnlyFlags)) == 0) {
    s.rx.offset.fetch_add(static_cast<uint64_t>(r), std::memory_order_relaxed);
    s.received[0].fetch_add(static_cast<uint64_t>(r), std::memory_order_relaxed);
    note_traffic(s);
  }
  return r;
}

/// What is left of a blocking MSG_WAITALL whose beginning came from the ring.
long recv_rest_in_kernel(Stream& s, int fd, const iovec* iov, size_t n, size_t total, size_t done,
                         int flags) noexcept {
  iovec slice[kIovBatch];
  msghdr msg{};
  msg.msg_iov = slice;
  msg.msg_iovlen = iov_slice(iov, n, done, total - done, slice, kIovBatch);
  const auto got = os::recvmsg(fd, &msg, flags);
  if (!got) return static_cast<long>(done);
  return static_cast<long>(done) + count_received(s, static_cast<long>(*got), flags);
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

namespace {

/// Leaving the kernel, the last one tries what had to wait for it.
struct AfterRecv {
  Stream& s;
  void operator()() const noexcept {
    if (s.rx.want_ready.load(std::memory_order_acquire)) try_ready(s);
  }
};

}  // namespace

std::optional<long> recv_by_kernel(Stream& s, int flags, KernelCall kernel) {
  if ((flags & kKernelOnlyFlags) != 0) return std::nullopt;  // recv() knows what to do first
  if (const int e = strict_error(s); __builtin_expect(e != 0, 0)) return -e;
  if (!s.rx.gate.enter()) return std::nullopt;
  GateVisit visit(s.rx.gate, AfterRecv{s});
  // After FIN the end comes before any error (SOCK_DONE in tcp_recvmsg_locked()).
  if (!s.rx.fin_seen.load(std::memory_order_relaxed)) {
    if (const int e = take_error(s); __builtin_expect(e != 0, 0)) return -e;
  }
  return count_received(s, judge_kernel_end(s, kernel()), flags);
}

size_t recv_short(Stream& s, void* to, size_t n, int flags) noexcept {
  constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
  if ((flags & ~kFlags) != 0 || n == 0 || n > Channel::kShort || !s.rx.gate.managed()) return 0;
  if (address_impossible(to) || !s.rx.mutex.try_lock()) return 0;
  size_t got = 0;
  // What recv_managed() asks before it reads.
  if (s.rx.state == RxState::kRing && !s.closed.load(std::memory_order_relaxed)) {
    got = s.channel->rx_take(to, n);
    if (got != 0) count_ring_locked(s, got);
  }
  s.rx.mutex.unlock();
  return got;
}

long recv(Stream& s, int fd, const iovec* iov, size_t n, int flags, KernelCall kernel) {
  if (__builtin_expect((flags & kKernelOnlyFlags) != 0, 0)) {
    if ((flags & MSG_OOB) != 0) pin_to_tcp(fd, "MSG_OOB");
    return kernel();
  }
  size_t done = 0;
  size_t total = 0;
  for (;;) {
    if (done == 0) {
      if (const auto r = recv_by_kernel(s, flags, kernel)) return *r;
    } else if (s.rx.gate.enter()) {
      GateVisit visit(s.rx.gate, AfterRecv{s});
      return recv_rest_in_kernel(s, fd, iov, n, total, done, flags);
    }
    // A signal handler interrupted this very thread in the middle of a copy: it can't wait for
    // itself.
    if (s.rx.mutex.held_by_me()) return -EAGAIN;
    if (!iov_acceptable(iov, n)) return kernel();  // which moves nothing and knows the error
    if (total == 0) total = iov_total(iov, n);
    // MSG_TRUNC takes bytes away without touching the buffer.
    if ((flags & MSG_TRUNC) == 0 && iov_impossible(iov, n))
      return done != 0 ? static_cast<long>(done) : -EFAULT;
    long r = recv_managed(s, fd, iov, n, total, &done, flags);
    if (r == -EPROTO) {
      fail_stream(s, "peer broke the protocol");
      return done != 0 ? static_cast<long>(done) : -ECONNRESET;
    }
    if (r == kPeerDied) {
      judge_unread(s);
      r = 0;
    }
    if (r == 0) {
      // The end was reached in the ring: an error that is owed to the program comes before it.
      if (const int e = take_error(s); e != 0) return -e;
    }
    if (r != kRetryInKernel) return r;
    maybe_detach(s);
    if (done != 0 && ((flags & MSG_WAITALL) == 0 || done >= total)) return static_cast<long>(done);
  }
}

}  // namespace rsock::stream
