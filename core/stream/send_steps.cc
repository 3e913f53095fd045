// One attempt to send on a managed direction: the ring, or after a freeze the replay first, with the
// waits for room. The kernel's half is in stream_send.cc.

#include <algorithm>

#include "core/base/deadline.h"
#include "core/stream/bell_sleep.h"
#include "core/stream/moves.h"
#include "core/stream/send_steps.h"
#include "core/stream/socket_ops.h"
#include "core/stream/spin.h"

namespace rsock::stream {
namespace {

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

/// By reference where the path can, else copied.
size_t write_file_locked(Stream& s, transport::ByteSource& file, size_t limit) noexcept
    RSOCK_REQUIRES(s.tx.mutex) {
  const size_t passed = file.file() < 0 || g_file_locks.load(std::memory_order_relaxed)
                            ? 0
                            : s.channel->tx_pass(file.file(), file.offset(), limit);
  if (passed == 0) return s.channel->tx_fill(file, limit);
  watch_lane(s);
  file.skip(passed);
  count_managed(s.zero_copied, passed);
  return passed;
}

/// One attempt in the ring. 0: go on (look at *done); -EAGAIN: full; -EFAULT.
long write_ring_locked(Stream& s, const Payload& from, size_t total, size_t* done) noexcept
    RSOCK_REQUIRES(s.tx.mutex) {
  size_t limit = total - *done;
  if (tx_bound_locked(s) < s.channel->capacity()) limit = std::min(limit, tx_room_locked(s, limit));
  const size_t took = from.file != nullptr ? write_file_locked(s, *from.file, limit)
                                           : s.channel->tx_write(from.iov, from.n, *done, limit);
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

}  // namespace

Step send_managed(Stream& s, Stay& stay, const Payload& from, size_t total, size_t* done, int flags,
                  long* error, bool* fin) noexcept {
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
      if (*done >= total || (from.file != nullptr && from.file->done())) return Step::kDone;
      need = *done == 0 ? room_to_begin_locked(s, total, blocking) : 1;
      if (!blocking && *done == 0 && !may_begin_locked(s, need, total)) {
        if (from.file != nullptr && from.file->at_end()) continue;
        if (tell_no_space_locked(s) && may_begin_locked(s, need, total)) continue;
        s.tx.full_at = tx_room_locked(s, 1);
        *error = -EAGAIN;
        return Step::kError;
      }
      if (tx_room_locked(s, need) >= need) {
        const long e = write_ring_locked(s, from, total, done);
        if (e == 0) continue;
        if (e == -EFAULT) {
          *error = e;
          return Step::kError;
        }
      }
      if (from.file != nullptr && from.file->at_end()) continue;
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

}  // namespace rsock::stream
