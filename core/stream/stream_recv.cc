// Receiving: the kernel while the gate is open, else TCP up to N, then the ring.

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>

#include <algorithm>

#include "core/base/deadline.h"
#include "core/os/os.h"
#include "core/stream/bell_sleep.h"
#include "core/stream/iov.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"
#include "core/stream/spin.h"
#include "core/stream/stay.h"

namespace rsock::stream {
namespace {

constexpr int kKernelOnlyFlags = MSG_OOB | MSG_ERRQUEUE;

/// A number of the stream that is open as long as the lock is held: the caller's own may be closed
/// meanwhile, and be another file's.
int fd_locked(Stream& s) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  return s.fd.load(std::memory_order_relaxed);
}

/// Sleeps until something may have changed. Called with the lock held, returns with it held.
long sleep_for_bytes(Stream& s, Stay& stay, Deadline deadline, const HandlerWatch& since,
                     const iovec* iov, size_t n, size_t skip, size_t limit, int flags,
                     long* got) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  std::shared_ptr<Channel> ch = s.channel;
  const uint32_t bell = ch->rx_bell();
  ch->rx_arm(transport::Sleep::kFutex);
  *got = rx_try_locked(s, fd_locked(s), iov, n, skip, limit, flags);
  if (*got != -EAGAIN) return 0;
  stay.note_locked();
  timespec storage;
  // Bytes in hand: a signal ends the call, whatever SA_RESTART says (tcp_recvmsg returns the
  // count).
  return sleep_on_bell(s.rx.mutex, std::move(ch), &Channel::rx_sleep, bell,
                       deadline.for_futex(&storage, skip != 0), since);
}

long wait_locked(Stream& s, Stay& stay, Deadline deadline, const HandlerWatch& since,
                 const iovec* iov, size_t n, size_t skip, size_t limit, int flags,
                 long* got) noexcept RSOCK_REQUIRES(s.rx.mutex) {
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
  const long result = sleep_for_bytes(s, stay, deadline, since, iov, n, skip, limit, flags, got);
  spin.missed();
  return result;
}

/// FIN or RST has come: what TCP holds is all that it will hold.
bool tcp_is_over(int fd) noexcept { return os::poll_now(fd, POLLRDHUP) != 0; }

/// MSG_PEEK found `have` bytes of the `want` with which it is content: waits for more. False: this
/// is all there will be.
bool wait_for_more_locked(Stream& s, Stay& stay, const iovec* iov, size_t n, size_t have,
                          size_t total, size_t want, int flags, Deadline deadline,
                          const HandlerWatch& since) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  if (s.rx.state == RxState::kKernel || have >= want) return false;
  if (s.rx.state == RxState::kRing && have >= s.channel->capacity()) return false;
  std::shared_ptr<Channel> ch = s.channel;
  const uint32_t bell = ch->rx_bell();
  ch->rx_arm(transport::Sleep::kFutex);
  const int fd = fd_locked(s);
  if (rx_try_locked(s, fd, iov, n, 0, total, flags) != static_cast<long>(have)) return true;
  if (s.channel != ch || s.rx.shut || s.peer_gone.load(std::memory_order_acquire) ||
      ch->rx_turn().kind != TurnKind::kOpen || tcp_is_over(fd)) {
    return false;
  }
  stay.note_locked();
  timespec storage;
  const long slept = sleep_on_bell(s.rx.mutex, std::move(ch), &Channel::rx_sleep, bell,
                                   deadline.for_futex(&storage, true), since);
  return slept == 0 && s.rx.state != RxState::kKernel;
}

/// The bytes with which a call is content (sock_rcvlowat() in include/net/sock.h).
size_t enough(const Stream& s, size_t total, int flags) noexcept {
  if ((flags & MSG_WAITALL) != 0) return total;
  return std::min<size_t>(total, s.low_water.load(std::memory_order_relaxed));
}

/// The managed half of recv(): loops over attempts and waits.
long recv_managed(Stream& s, Stay& stay, const iovec* iov, size_t n, size_t total, size_t* done,
                  int flags) noexcept {
  const uint32_t generation = s.generation.load(std::memory_order_relaxed);
  const bool blocking = may_wait(s, flags);
  const Deadline deadline =
      Deadline::from_option(blocking ? s.rcv_timeout_ns.load(std::memory_order_relaxed) : 0);
  HandlerWatch since;
  MutexLock lock(s.rx.mutex);
  for (;;) {
    if (*done == 0 && deadline.is_never()) since.begin_again();
    if (!s.owned_by(generation) || s.closed.load(std::memory_order_relaxed)) return -EBADF;
    long got = rx_try_locked(s, fd_locked(s), iov, n, *done, total - *done, flags);
    long waited = 0;
    if (got == -EAGAIN && blocking) {
      waited = wait_locked(s, stay, deadline, since, iov, n, *done, total - *done, flags, &got);
      if (waited == 0 && got == -EAGAIN) continue;
    }
    if (waited != 0) return *done != 0 ? static_cast<long>(*done) : waited;
    if (got == kRetryInKernel || got == kPeerDied) {
      return got == kPeerDied && *done != 0 ? static_cast<long>(*done) : got;
    }
    if (got <= 0) return *done != 0 ? static_cast<long>(*done) : got;
    const size_t want = enough(s, total, flags);
    if ((flags & MSG_PEEK) != 0 && static_cast<size_t>(got) < want && blocking &&
        wait_for_more_locked(s, stay, iov, n, static_cast<size_t>(got), total, want, flags,
                             deadline, since)) {
      continue;
    }
    *done += static_cast<size_t>(got);
    // At the switch, what follows is in the ring. A count shorter than asked for means to many that
    // all is read (epoll(7), EPOLLET), and no edge would follow.
    while (s.rx.state == RxState::kTcp && *done < total && (flags & MSG_PEEK) == 0) {
      const long more = rx_try_locked(s, fd_locked(s), iov, n, *done, total - *done, flags);
      if (more <= 0) break;
      *done += static_cast<size_t>(more);
    }
    if (*done >= want || (flags & MSG_PEEK) != 0) {
      return static_cast<long>(*done);
    }
  }
}

/// A call that gave 0 met the end of the kernel's stream: it was not for no bytes, and not the
/// program that shut its own side.
bool met_the_end(Stream& s) noexcept {
  {
    MutexLock lock(s.rx.mutex);
    if (s.rx.shut) return false;
  }
  const int fd = s.fd.load(std::memory_order_relaxed);
  if (!tcp_is_over(fd)) return false;
  const auto queued = os::ioctl_int(fd, SIOCINQ);
  return !queued || *queued == 0;
}

/// The end of a stream of which something is missing: -errno, once, and then as after any reset 0.
long end_that_was_none(Stream& s) noexcept {
  if (const int e = take_error(s); e != 0) return -e;
  return s.error_told.exchange(true, std::memory_order_acq_rel) ? 0 : -ECONNRESET;
}

/// The kernel half; what a clean end means when a replay is still owed to us. It is clean only if
/// TCP gave everything that the sender had published (D10).
long judge_kernel_end(Stream& s, long r, bool may_wait, Deadline deadline) noexcept {
  const bool died =
      s.peer_gone.load(std::memory_order_acquire) && !s.rx.fin_seen.load(std::memory_order_relaxed);
  const bool owed = s.rx.await_replay.load(std::memory_order_acquire);
  if (r != 0 || (!died && !owed) || !met_the_end(s)) return r;
  if (died) {
    judge_unread(s);
    if (const int e = take_error(s); e != 0) return -e;
  }
  if (!owed) return 0;
  HandlerWatch since;
  MutexLock lock(s.rx.mutex);
  for (;;) {
    if (deadline.is_never()) since.begin_again();
    std::shared_ptr<Channel> channel = s.channel;
    // Reset by us: the bytes that were owed never come, whoever was told of it first.
    if (s.failed) return end_that_was_none(s);
    if (!channel) return 0;
    const uint32_t bell = channel->rx_bell();
    channel->rx_arm(transport::Sleep::kFutex);
    if (end_known_locked(s)) {
      if (all_received_locked(s)) return 0;
      s.rx.await_replay.store(false, std::memory_order_relaxed);
      return end_that_was_none(s);
    }
    // FIN has overtaken the word that the replay is complete; else the line ends, as the peer's
    // process did. For the program that is a wait for bytes like any other.
    if (!may_wait) return -EAGAIN;
    timespec storage;
    const long e = sleep_on_bell(s.rx.mutex, std::move(channel), &Channel::rx_sleep, bell,
                                 deadline.for_futex(&storage, false), since);
    if (e != 0) return e;
  }
}

/// An error that is owed to the program, if it is its turn: queued bytes come before it, and after
/// FIN the end does (SOCK_DONE; tcp_recvmsg_locked() looks at its queue first of all).
int error_before_bytes(Stream& s) noexcept {
  if (s.rx.fin_seen.load(std::memory_order_relaxed)) return 0;
  const auto queued = os::ioctl_int(s.fd.load(std::memory_order_relaxed), SIOCINQ);
  return queued && *queued > 0 ? 0 : take_error(s);
}

long count_received(Stream& s, long r, int flags) noexcept {
  if (r > 0 && (flags & (MSG_PEEK | kKernelOnlyFlags)) == 0) {
    s.rx.offset.fetch_add(static_cast<uint64_t>(r), std::memory_order_relaxed);
    s.received[0].fetch_add(static_cast<uint64_t>(r), std::memory_order_relaxed);
    note_traffic(s);
  }
  return r;
}

/// One attempt in the kernel, on a number that is surely the stream's.
long recv_now(Stream& s, const iovec* iov, size_t n, size_t skip, size_t limit,
              int flags) noexcept {
  iovec slice[kIovBatch];
  msghdr msg{};
  msg.msg_iov = slice;
  msg.msg_iovlen = iov_slice(iov, n, skip, limit, slice, kIovBatch);
  MutexLock lock(s.rx.mutex);
  if (s.closed.load(std::memory_order_relaxed)) return -EBADF;
  const auto got = os::recvmsg(fd_locked(s), &msg, (flags & ~MSG_WAITALL) | MSG_DONTWAIT);
  return got ? static_cast<long>(*got) : -value(got.error());
}

/// The kernel's half without the program's own call: for what is left of a blocking MSG_WAITALL
/// whose beginning came from the ring, and for a call whose number was closed while it slept.
long recv_by_hand(Stream& s, const iovec* iov, size_t n, size_t total, size_t done,
                  int flags) noexcept {
  const bool blocking = may_wait(s, flags);
  const Deadline deadline =
      Deadline::from_option(blocking ? s.rcv_timeout_ns.load(std::memory_order_relaxed) : 0);
  HandlerWatch since;
  for (;;) {
    if (done == 0 && deadline.is_never()) since.begin_again();
    if (done == 0 && s.error.load(std::memory_order_relaxed) != 0) {
      if (const int e = error_before_bytes(s); e != 0) return -e;
    }
    long r = recv_now(s, iov, n, done, total - done, flags);
    if (r == -EAGAIN && blocking) {
      r = sleep_in_kernel(s.fd.load(std::memory_order_relaxed), POLLIN | POLLRDHUP, deadline, since,
                          done != 0);
      if (r == 0) continue;
    }
    if (r <= 0) {
      if (done != 0) return static_cast<long>(done);
      r = judge_kernel_end(s, r, blocking, deadline);
      if (r == 0) {  // failed while the call waited
        if (const int e = take_error(s); __builtin_expect(e != 0, 0)) return -e;
      }
      note_told(s, r);
      return r;
    }
    (void)count_received(s, r, flags);
    done += static_cast<size_t>(r);
    if ((flags & MSG_PEEK) != 0 || done >= enough(s, total, flags)) return static_cast<long>(done);
  }
}

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
  if (__builtin_expect(s.error.load(std::memory_order_relaxed) != 0, 0)) {
    if (const int e = error_before_bytes(s); e != 0) return -e;
  }
  const bool blocking = may_wait(s, flags);
  // From the beginning: the kernel's wait and ours are one to the program.
  const Deadline deadline =
      Deadline::from_option(blocking ? s.rcv_timeout_ns.load(std::memory_order_relaxed) : 0);
  const long r = judge_kernel_end(s, kernel(), blocking, deadline);
  if (r == 0) {  // failed while the call was in the kernel
    if (const int e = take_error(s); __builtin_expect(e != 0, 0)) return -e;
  }
  // RSOCK_STRICT shut the connection while this call waited: that is no end of the stream.
  if (const int e = strict_error(s); __builtin_expect(e != 0, 0) && r <= 0) return -e;
  note_told(s, r);
  return count_received(s, r, flags);
}

size_t recv_short(Stream& s, void* to, size_t n, int flags) noexcept {
  constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
  if ((flags & ~kFlags) != 0 || n == 0 || n > Channel::kShort || !s.rx.gate.managed()) return 0;
  if (!s.rx.mutex.try_lock()) return 0;
  size_t got = 0;
  // What recv_managed() asks before it reads.
  if (s.rx.state == RxState::kRing && !s.closed.load(std::memory_order_relaxed) &&
      s.low_water.load(std::memory_order_relaxed) == 1) {
    got = s.channel->rx_take(to, n);
    if (got != 0) count_taken_locked(s, got);
  }
  s.rx.mutex.unlock();
  return got;
}

long recv(Stream& s, int fd, const iovec* iov, size_t n, int flags, KernelCall kernel) {
  if (__builtin_expect((flags & kKernelOnlyFlags) != 0, 0)) {
    if ((flags & MSG_OOB) != 0) pin_to_tcp(fd, "MSG_OOB", false);
    return kernel();
  }
  Stay stay(s);
  size_t done = 0;
  size_t total = 0;
  for (;;) {
    // Once it has slept the number may be another file's.
    if (done == 0 && (!stay.noted() || FdTable::stream(fd) == &s)) {
      if (const auto r = recv_by_kernel(s, flags, kernel)) return *r;
    } else if (s.rx.gate.enter()) {
      GateVisit visit(s.rx.gate, AfterRecv{s});
      return recv_by_hand(s, iov, n, total, done, flags);
    }
    // A signal handler interrupted this very thread in the middle of a copy: it can't wait for
    // itself.
    if (s.rx.mutex.held_by_me()) return -EAGAIN;
    if (!iov_acceptable(iov, n)) return kernel();  // which moves nothing and knows the error
    if (total == 0) total = iov_total(iov, n);
    if (iov_impossible(iov, n)) return done != 0 ? static_cast<long>(done) : -EFAULT;
    long r = recv_managed(s, stay, iov, n, total, &done, flags);
    if (r == -EPROTO) {
      fail_stream(s, "peer broke the protocol");
      return done != 0 ? static_cast<long>(done) : end_that_was_none(s);
    }
    if (r == kPeerDied) {
      judge_unread(s);
      r = 0;
    }
    if (r == 0) {
      // The end was reached in the ring: an error that is owed to the program comes before it.
      if (const int e = take_error(s); e != 0) return -e;
    }
    if (r != kRetryInKernel) {
      note_told(s, r);
      return r;
    }
    maybe_detach(s);
    if (done != 0 && done >= enough(s, total, flags)) return static_cast<long>(done);
  }
}

}  // namespace rsock::stream
