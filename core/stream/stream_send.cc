// Sending: the kernel while the gate is open, else the ring; after a freeze the replay goes first.

#include <fcntl.h>
#include <signal.h>

#include <algorithm>

#include "core/base/deadline.h"
#include "core/os/os.h"
#include "core/stream/bell_sleep.h"
#include "core/stream/iov.h"
#include "core/stream/moves.h"
#include "core/stream/send_steps.h"
#include "core/stream/socket_ops.h"
#include "core/stream/stay.h"

namespace rsock::stream {
namespace {

long count_sent(Stream& s, long r) noexcept {
  if (r > 0) {
    s.tx.offset.fetch_add(static_cast<uint64_t>(r), std::memory_order_relaxed);
    s.sent[0].fetch_add(static_cast<uint64_t>(r), std::memory_order_relaxed);
    note_traffic(s);
  }
  return r;
}

/// Leaving the kernel, the last one tries what had to wait for it.
struct AfterSend {
  Stream& s;
  void operator()() const noexcept {
    if (s.tx_wanted.load(std::memory_order_acquire)) try_switch_tx(s);
  }
};

/// A blocking call in the kernel returns when all is sent, and until then the direction can't
/// change hands. Who sends so much in one call does it by hand while the stream may still be
/// lifted.
constexpr size_t kLargeSend = 256 * 1024;

bool goes_by_hand(Stream& s, int fd, const iovec* iov, size_t n, int flags) noexcept {
  if (s.tx.gate.managed()) return false;
  if (s.pinned.load(std::memory_order_relaxed)) return false;
  if (s.not_lifted.load(std::memory_order_relaxed) != nullptr &&
      !s.has_channel.load(std::memory_order_relaxed)) {
    return false;
  }
  if (!may_wait(s, flags) || !iov_acceptable(iov, n) || iov_total(iov, n) < kLargeSend ||
      iov_impossible(iov, n) || s.tx.mutex.held_by_me()) {
    return false;
  }
  // Of the stream's own record: known only once it is lifted.
  const auto status = os::fcntl(fd, F_GETFL);
  timeval limit{};
  socklen_t len = sizeof(limit);
  return status && (*status & O_NONBLOCK) == 0 &&
         os::getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, &len) && limit.tv_sec == 0 &&
         limit.tv_usec == 0;
}

/// One attempt in the kernel, on a number that is surely the stream's. Who may `wait` for room
/// keeps the stream.
long send_now(Stream& s, Stay& stay, const iovec* iov, size_t n, size_t skip, size_t limit,
              int flags, bool wait) noexcept {
  iovec slice[kIovBatch];
  msghdr msg{};
  msg.msg_iov = slice;
  msg.msg_iovlen = iov_slice(iov, n, skip, limit, slice, kIovBatch);
  MutexLock lock(s.tx.mutex);
  if (s.closed.load(std::memory_order_relaxed)) return -EBADF;
  const auto sent =
      os::sendmsg(s.fd.load(std::memory_order_relaxed), &msg, flags | MSG_NOSIGNAL | MSG_DONTWAIT);
  // The gate is left before the next attempt.
  if (wait && (sent ? *sent < limit : sent.error() == EAGAIN)) stay.note_locked();
  return sent ? static_cast<long>(*sent) : -value(sent.error());
}

/// As the kernel ends a call that moved nothing.
long send_failed(long error, int flags) noexcept {
  if (error == -EPIPE && (flags & MSG_NOSIGNAL) == 0) os::raise_here(SIGPIPE);
  return error;
}

/// The kernel's half without the program's own call: for much at once, for the rest of a message
/// whose beginning went into the ring before the direction was set down (a blocking send never
/// returns a short count for our reasons), and for a call whose number was closed while it slept.
/// The gate is held for an attempt only. Empty: the direction is not the kernel's, or not any more.
std::optional<long> send_by_hand(Stream& s, Stay& stay, const iovec* iov, size_t n, size_t total,
                                 size_t* done, int flags) noexcept {
  const bool blocking = may_wait(s, flags);
  const Deadline deadline =
      Deadline::from_option(blocking ? s.snd_timeout_ns.load(std::memory_order_relaxed) : 0);
  HandlerWatch since;
  while (*done < total) {
    if (*done == 0) {
      if (deadline.is_never()) since.begin_again();
      if (const int e = strict_error(s); __builtin_expect(e != 0, 0)) return -e;
    }
    if (s.tx_wanted.load(std::memory_order_acquire)) try_switch_tx(s);
    if (!s.tx.gate.enter()) return std::nullopt;
    long r = 0;
    {
      GateVisit visit(s.tx.gate, AfterSend{s});
      if (*done == 0) {
        if (const int e = take_error(s); __builtin_expect(e != 0, 0)) return -e;
      }
      r = count_sent(s, send_now(s, stay, iov, n, *done, total - *done, flags, blocking));
    }
    if (r == -EAGAIN && blocking) {
      r = sleep_in_kernel(s.fd.load(std::memory_order_relaxed), POLLOUT, deadline, since,
                          *done != 0);
    }
    if (r < 0) {  // with bytes sent the next call of the program meets the error
      return *done != 0 ? static_cast<long>(*done) : send_failed(r, flags);
    }
    *done += static_cast<size_t>(r);
  }
  return static_cast<long>(*done);
}

}  // namespace

std::optional<long> send_by_kernel(Stream& s, int flags, KernelCall kernel) {
  if ((flags & (MSG_OOB | MSG_ZEROCOPY)) != 0) return std::nullopt;  // send() knows more
  if (const int e = strict_error(s); __builtin_expect(e != 0, 0)) return -e;
  if (s.tx_wanted.load(std::memory_order_acquire)) try_switch_tx(s);
  if (!s.tx.gate.enter()) return std::nullopt;
  GateVisit visit(s.tx.gate, AfterSend{s});
  if (const int e = take_error(s); __builtin_expect(e != 0, 0)) return -e;
  const long r = kernel();
  note_told(s, r);
  return count_sent(s, r);
}

size_t send_short(Stream& s, const void* from, size_t n, int flags) noexcept {
  constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL | MSG_MORE;
  if ((flags & ~kFlags) != 0 || n == 0 || n > Channel::kShort || !s.tx.gate.managed()) return 0;
  if (!s.tx.mutex.try_lock()) return 0;
  size_t took = 0;
  // What send_managed() asks before it writes.
  if (s.tx.state == TxState::kRing && !s.tx.shut && !s.tx.fin_owed && !s.tx.lied &&
      s.send_bound.load(std::memory_order_relaxed) >= s.channel->capacity() && s.tx.full_at == 0 &&
      !s.closed.load(std::memory_order_relaxed) && !s.channel->tx_maybe_turned() &&
      !s.peer_gone.load(std::memory_order_acquire)) {
    took = s.channel->tx_put(from, n);
    if (took != 0) count_ring_locked(s, took);
  }
  s.tx.mutex.unlock();
  return took;
}

long send(Stream& s, int fd, const iovec* iov, size_t n, int flags, KernelCall kernel) {
  if (__builtin_expect((flags & MSG_OOB) != 0, 0)) {
    if (const int e = pin_to_tcp(fd, "MSG_OOB"); e != 0) return -e;
    return kernel();
  }
  if (__builtin_expect((flags & MSG_ZEROCOPY) != 0, 0)) {
    return send_zero_copy(s, fd, iov, n, flags, kernel);
  }
  Stay stay(s);
  size_t done = 0;
  size_t total = 0;
  for (;;) {
    // Once it has slept the number may be another file's.
    const bool own_number = !stay.noted() || FdTable::stream(fd) == &s;
    if (done == 0 && own_number && !goes_by_hand(s, fd, iov, n, flags)) {
      if (const auto r = send_by_kernel(s, flags, kernel)) return *r;
    } else if (!s.tx.gate.managed()) {
      if (total == 0) total = iov_total(iov, n);
      if (const auto r = send_by_hand(s, stay, iov, n, total, &done, flags)) return *r;
    }
    // A signal handler interrupted this very thread in the middle of a copy: it can't wait for
    // itself.
    if (s.tx.mutex.held_by_me()) return -EAGAIN;
    if (!iov_acceptable(iov, n)) return kernel();  // which moves nothing and knows the error
    if (total == 0) total = iov_total(iov, n);
    if (iov_impossible(iov, n)) return done != 0 ? static_cast<long>(done) : -EFAULT;
    long error = 0;
    bool fin = false;
    switch (send_managed(s, stay, {iov, n}, total, &done, flags, &error, &fin)) {
      case Step::kDone:
        return static_cast<long>(done);
      case Step::kKernel:
        maybe_detach(s);
        if (!fin) continue;  // the kernel's, or lifted again meanwhile: the loop finds out
        if (done == 0 && !own_number)
          return send_failed(send_now(s, stay, iov, n, 0, total, flags, false), flags);
        return done != 0 ? static_cast<long>(done) : kernel();
      case Step::kError:
        if (error == -EPROTO) {
          fail_stream(s, failure_of(s));
          if (done != 0) return static_cast<long>(done);
          const int e = take_error(s);
          error = e != 0 ? -e : -EPIPE;
        }
        if (error == -EPIPE && done == 0 && (flags & MSG_NOSIGNAL) == 0) {
          os::raise_here(SIGPIPE);  // the kernel does not know of our FIN yet
        }
        return done != 0 ? static_cast<long>(done) : error;
    }
  }
}

}  // namespace rsock::stream
