// Sending: the kernel while the gate is open, else the ring; after a freeze the replay goes first.

#include <fcntl.h>
#include <signal.h>

#include <algorithm>

#include "core/base/cancel_off.h"
#include "core/base/deadline.h"
#include "core/base/try_copy.h"
#include "core/os/os.h"
#include "core/stream/bell_sleep.h"
#include "core/stream/bounce_buffer.h"
#include "core/stream/iov.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"
#include "core/stream/spin.h"
#include "core/stream/stay.h"

namespace rsock::stream {
namespace {

/// Result of the managed half: bytes so far are in *done.
enum class Step : uint8_t { kDone, kKernel, kError };

/// Room in the ring, or the direction changed, within the spin?
bool spin_for_room_locked(Stream& s, SpinBudget& spin, size_t need) noexcept
    RSOCK_REQUIRES(s.tx.mutex) {
  while (spin.more()) {
    if (tx_room_locked(s, need) >= need) {
      spin.hit();
      return true;
    }
    if (s.tx.mutex.contended()) return false;
    cpu_relax();
  }
  return false;
}

/// Sleeps until there may be `need` bytes of room. Lock held on entry and return. 0: look again;
/// else -errno. `partial`: bytes were taken already, so a signal ends the call, whatever SA_RESTART
/// says (tcp_sendmsg returns the count).
long wait_for_room_locked(Stream& s, Stay& stay, Deadline deadline, const HandlerWatch& since,
                          size_t need, bool partial) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  SpinBudget spin(s.tx.spin);
  if (s.tx.state == TxState::kRing && spin_for_room_locked(s, spin, need)) return 0;
  std::shared_ptr<Channel> ch = s.channel;
  const uint32_t bell = ch->tx_bell();
  ch->tx_arm(transport::Sleep::kFutex);
  if (s.tx.state == TxState::kRing &&
      (tx_room_locked(s, need) >= need || ch->tx_turn().kind != TurnKind::kOpen ||
       s.peer_gone.load(std::memory_order_acquire))) {
    return 0;
  }
  if (s.tx.state == TxState::kReplay && flush_replay_locked(s)) return 0;
  stay.note_locked();
  timespec storage;
  const long result = sleep_on_bell(s.tx.mutex, std::move(ch), &Channel::tx_sleep, bell,
                                    deadline.for_futex(&storage, partial), since);
  spin.missed();
  return result;
}

void count_ring_locked(Stream& s, size_t took) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  count_managed(s.tx.offset, took);
  s.tx.off_tcp += took;
  count_managed(s.sent[static_cast<int>(s.channel->kind())], took);
}

/// One attempt in the ring. 0: go on (look at *done); -EAGAIN: full; -EFAULT.
long write_ring_locked(Stream& s, const iovec* iov, size_t n, size_t total, size_t* done) noexcept
    RSOCK_REQUIRES(s.tx.mutex) {
  size_t limit = total - *done;
  if (tx_bound_locked(s) < s.channel->capacity()) limit = std::min(limit, tx_room_locked(s, limit));
  const size_t took = s.channel->tx_write(iov, n, *done, limit);
  if (took == Channel::kFault) return -EFAULT;
  if (took == 0) return -EAGAIN;
  count_ring_locked(s, took);
  *done += took;
  s.tx.full_at = 0;
  return 0;
}

/// A message of up to a third of the ring is taken whole or, without blocking, not at all. POLLOUT
/// promises a third, so this costs no progress; and programs that forget the rest of a short count
/// (iperf3 -F: its diskfile_send() reads the file over what was left) meet one as rarely as with
/// the kernel's far larger buffer.
bool takes_whole_locked(Stream& s, size_t total) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  return total > tx_bound_locked(s) / 3 || tx_room_locked(s, total) >= total;
}

/// Who was told that there is no room finds some when a third is free, as with the kernel
/// (sk_stream_wait_memory() in net/core/stream.c): until then a blocking send takes nothing. And a
/// buffer that was full for one message is full for smaller ones, until the peer has read.
size_t room_to_begin_locked(Stream& s, size_t total, bool blocking) noexcept
    RSOCK_REQUIRES(s.tx.mutex) {
  // Never more than a third: that is what POLLOUT, a waker and the peer's credits promise.
  const size_t third = std::max<size_t>(tx_bound_locked(s) / 3, 1);
  const bool waits = blocking && s.tx_nospace.load(std::memory_order_relaxed);
  return std::max(waits ? std::min(total, third) : 1, std::min(s.tx.full_at + 1, third));
}

/// A send without blocking begins only with room for what it needs.
bool may_begin_locked(Stream& s, size_t need, size_t total) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  return (tx_room_locked(s, need) >= need && takes_whole_locked(s, total)) ||
         s.channel->tx_failed();
}

/// The program is told to wait. It may do so in an edge-triggered epoll instance, whose item lies
/// there armed for bytes only: so room rings for it from here on. True: so it is, and who armed has
/// to look once more.
bool tell_no_space_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  // seq_cst pairs with drain_and_arm_locked(): either it sees this, or we see its watcher.
  note_full_locked(s);
  s.tx_nospace.store(true, std::memory_order_seq_cst);
  if (s.tx.state != TxState::kRing || s.watching.load(std::memory_order_seq_cst) == 0) return false;
  s.channel->tx_arm(transport::Sleep::kDoorbell);
  return true;
}

Step send_managed(Stream& s, Stay& stay, const iovec* iov, size_t n, size_t total, size_t* done,
                  int flags, long* error, bool* fin) noexcept {
  const uint32_t generation = s.generation.load(std::memory_order_relaxed);
  const bool blocking = may_wait(s, flags);
  const Deadline deadline =
      Deadline::from_option(blocking ? s.snd_timeout_ns.load(std::memory_order_relaxed) : 0);
  size_t need = 1;
  HandlerWatch since;
  MutexLock lock(s.tx.mutex);
  for (;;) {
    if (*done == 0 && deadline.is_never()) since.begin_again();
    if (!s.owned_by(generation) || s.closed.load(std::memory_order_relaxed)) {
      *error = -EBADF;
      return Step::kError;
    }
    if (s.tx.barred) {  // the parent's replay has a place in the stream, ours would have none
      *error = -ECONNRESET;
      return Step::kError;
    }
    // After FIN the kernel knows what to say (EPIPE and SIGPIPE).
    if (s.tx.fin_owed) {  // the kernel does not know of it yet, and must not take bytes before it
      *error = -EPIPE;
      return Step::kError;
    }
    *fin = s.tx.shut;
    if (s.tx.state == TxState::kKernel || s.tx.shut) return Step::kKernel;
    if ((s.channel->tx_maybe_turned() || s.peer_gone.load(std::memory_order_acquire)) &&
        obey_tx_turn_locked(s) && !s.tx.lied) {
      continue;
    }
    if (s.tx.lied) {
      *error = -EPROTO;
      return Step::kError;
    }
    if (s.tx.state == TxState::kRing) {
      if (*done >= total) return Step::kDone;
      need = *done == 0 ? room_to_begin_locked(s, total, blocking) : 1;
      if (!blocking && *done == 0 && !may_begin_locked(s, need, total)) {
        if (tell_no_space_locked(s) && may_begin_locked(s, need, total)) continue;
        s.tx.full_at = tx_room_locked(s, 1);
        *error = -EAGAIN;
        return Step::kError;
      }
      if (tx_room_locked(s, need) >= need) {
        const long e = write_ring_locked(s, iov, n, total, done);
        if (e == 0) continue;
        if (e == -EFAULT) {
          *error = e;
          return Step::kError;
        }
      }
      if (s.channel->tx_failed()) {
        *error = -EPROTO;
        return Step::kError;
      }
    } else if (flush_replay_locked(s)) {
      continue;
    }
    if (tell_no_space_locked(s) && !blocking && tx_room_locked(s, need) >= need) continue;
    if (!blocking) {
      *error = -EAGAIN;
      return Step::kError;
    }
    if (const long e = wait_for_room_locked(s, stay, deadline, since, need, *done != 0); e != 0) {
      *error = e;
      return Step::kError;
    }
  }
}

long count_sent(Stream& s, long r) noexcept {
  if (r > 0) {
    s.tx.offset.fetch_add(static_cast<uint64_t>(r), std::memory_order_relaxed);
    s.sent[0].fetch_add(static_cast<uint64_t>(r), std::memory_order_relaxed);
    note_traffic(s);
  }
  return r;
}

/// One attempt in the kernel, on a number that is surely the stream's.
long send_now(Stream& s, const iovec* iov, size_t n, size_t skip, size_t limit,
              int flags) noexcept {
  iovec slice[kIovBatch];
  msghdr msg{};
  msg.msg_iov = slice;
  msg.msg_iovlen = iov_slice(iov, n, skip, limit, slice, kIovBatch);
  MutexLock lock(s.tx.mutex);
  if (s.closed.load(std::memory_order_relaxed)) return -EBADF;
  const auto sent =
      os::sendmsg(s.fd.load(std::memory_order_relaxed), &msg, flags | MSG_NOSIGNAL | MSG_DONTWAIT);
  return sent ? static_cast<long>(*sent) : -value(sent.error());
}

/// The kernel's half without the program's own call: for the rest of a message whose beginning went
/// into the ring before the direction was set down (a blocking send never returns a short count for
/// our reasons), and for a call whose number was closed while it slept.
long send_by_hand(Stream& s, const iovec* iov, size_t n, size_t total, size_t done,
                  int flags) noexcept {
  const bool blocking = may_wait(s, flags);
  const Deadline deadline =
      Deadline::from_option(blocking ? s.snd_timeout_ns.load(std::memory_order_relaxed) : 0);
  HandlerWatch since;
  while (done < total) {
    if (done == 0 && deadline.is_never()) since.begin_again();
    if (done == 0) {
      if (const int e = take_error(s); __builtin_expect(e != 0, 0)) return -e;
    }
    long r = send_now(s, iov, n, done, total - done, flags);
    if (r == -EAGAIN && blocking) {
      r = sleep_in_kernel(s.fd.load(std::memory_order_relaxed), POLLOUT, deadline, since,
                          done != 0);
      if (r == 0) continue;
    }
    if (r < 0) {  // with bytes sent the next call of the program meets the error
      if (done != 0) break;
      if (r == -EPIPE && (flags & MSG_NOSIGNAL) == 0) os::raise_here(SIGPIPE);
      return r;
    }
    (void)count_sent(s, r);
    done += static_cast<size_t>(r);
  }
  return static_cast<long>(done);
}

/// Leaving the kernel, the last one tries what had to wait for it.
struct AfterSend {
  Stream& s;
  void operator()() const noexcept {
    if (s.tx_wanted.load(std::memory_order_acquire)) try_switch_tx(s);
  }
};

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
    if (done == 0 && own_number) {
      if (const auto r = send_by_kernel(s, flags, kernel)) return *r;
    } else if (s.tx.gate.enter()) {
      GateVisit visit(s.tx.gate, AfterSend{s});
      return send_by_hand(s, iov, n, total, done, flags);
    }
    // A signal handler interrupted this very thread in the middle of a copy: it can't wait for
    // itself.
    if (s.tx.mutex.held_by_me()) return -EAGAIN;
    if (!iov_acceptable(iov, n)) return kernel();  // which moves nothing and knows the error
    if (total == 0) total = iov_total(iov, n);
    if (iov_impossible(iov, n)) return done != 0 ? static_cast<long>(done) : -EFAULT;
    long error = 0;
    bool fin = false;
    switch (send_managed(s, stay, iov, n, total, &done, flags, &error, &fin)) {
      case Step::kDone:
        return static_cast<long>(done);
      case Step::kKernel:
        maybe_detach(s);
        if (!fin) continue;  // the kernel's, or lifted again meanwhile: the loop finds out
        if (done == 0 && !own_number) return send_by_hand(s, iov, n, total, done, flags);
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

namespace {

/// Copies a piece of the file through a buffer into the stream. Used while the stream is lifted.
long sendfile_piece(Stream& s, int fd, int in_fd, off_t* offset, size_t want, void* buffer) {
  if (want > BounceBuffer::kSize) want = BounceBuffer::kSize;
  const auto got = os::pread(in_fd, buffer, want, *offset);
  if (!got) return -value(got.error());
  if (*got == 0) return 0;
  iovec iov{buffer, *got};
  const long sent = send(s, fd, &iov, 1, 0, [&]() -> long {
    // The whole call is inside (stay.h): a number of ours stays until it leaves.
    const int number = FdTable::stream(fd) == &s ? fd : s.fd.load(std::memory_order_relaxed);
    const auto r = os::send(number, buffer, *got, 0);
    return r ? static_cast<long>(*r) : -value(r.error());
  });
  if (sent > 0) *offset += sent;
  return sent;
}

}  // namespace

long sendfile(Stream& s, int fd, int in_fd, off_t* offset, size_t count, KernelCall kernel) {
  if (const auto r = send_by_kernel(s, 0, kernel)) return *r;
  const CancelOff whole;  // no cancellation point, while send() is one
  off_t at = 0;
  if (offset != nullptr) {
    if (!try_get(&at, offset)) return -EFAULT;
  } else {
    const auto position = os::lseek(in_fd, 0, SEEK_CUR);
    if (!position) {  // not seekable: only the kernel can move it
      if (const int e = pin_to_tcp(fd, "sendfile from a pipe"); e != 0) return -e;
      return kernel();
    }
    at = *position;
  }
  constexpr size_t kMax = 0x7ffff000;  // sendfile(2): at most this many bytes a call
  if (count > kMax) count = kMax;
  const BounceBuffer buffer;
  if (buffer.data() == nullptr) return -ENOMEM;
  Stay stay(s);
  {
    MutexLock lock(s.tx.mutex);
    stay.note_locked();
  }
  size_t done = 0;
  long error = 0;
  while (done < count) {
    const long r = sendfile_piece(s, fd, in_fd, &at, count - done, buffer.data());
    if (r <= 0) {
      error = r;
      break;
    }
    done += static_cast<size_t>(r);
  }
  if (offset != nullptr) {
    if (!try_put(offset, at)) return -EFAULT;  // the bytes are sent all the same
  } else {
    (void)os::lseek(in_fd, at, SEEK_SET);
  }
  return done != 0 || error == 0 ? static_cast<long>(done) : error;
}

}  // namespace rsock::stream
