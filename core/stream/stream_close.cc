// The end of a stream: shutdown and close. Orderly close gives the peer every byte, then EOF (D10).

#include <fcntl.h>

#include <utility>

#include "core/base/log.h"
#include "core/base/thread_signals.h"
#include "core/os/os.h"
#include "core/os/owned_fd.h"
#include "core/stream/hand_over.h"
#include "core/stream/holders.h"
#include "core/stream/keeper.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"
#include "core/stream/stay.h"

namespace rsock::stream {
namespace {

/// Our direction is over: nothing follows what was sent. FIN may have to wait behind a replay.
void end_tx_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  s.tx.shut = true;
  if (!s.channel || s.tx.ring_done) return;
  s.tx_wanted.store(false, std::memory_order_relaxed);
  if (s.tx.state == TxState::kKernel) {
    (void)s.channel->tx_end();
    s.tx.ring_done = true;
    s.channel->tx_set_replayed();
  } else {
    if (s.tx.state == TxState::kRing) {
      const Turn turn = s.peer_gone.load(std::memory_order_acquire) ? s.channel->tx_recall()
                                                                    : s.channel->tx_end();
      // A peer that drained the ring lets go of the channel too. Only once it has, its count is
      // final: a count from before the hang-up would send bytes again that it has read meanwhile.
      const uint64_t unread =
          s.channel->decides_alone() && s.channel->tx_unread() != 0 && s.channel->peer_let_go()
              ? s.channel->tx_unread()
              : 0;
      if (turn.kind == TurnKind::kFrozen) {
        begin_replay_locked(s, turn.at);
      } else if (turn.kind == TurnKind::kOpen) {
        return;  // asked: the answer comes by the keeper, and FIN behind it
      } else if (unread != 0) {
        begin_replay_locked(s, s.channel->tx_tail() - unread);
      } else {
        s.channel->tx_set_replayed();
        finish_tx_locked(s);
      }
    }
    if (s.tx.state == TxState::kReplay) (void)flush_replay_locked(s);
  }
  s.channel->wake_peer();
  Keeper::kick_peer_locked(s);
}

/// SO_LINGER as it is set: close waits so long until the peer has acknowledged every byte, a signal
/// comes or the time is over (sk_stream_wait_close() in net/core/stream.c, also with O_NONBLOCK).
struct Linger {
  bool on = false;
  int seconds = 0;

  bool resets() const noexcept { return on && seconds == 0; }
  bool waits() const noexcept { return on && seconds != 0; }
  /// A negative time is a very long one (sock_set_linger() in net/core/sock.c).
  Deadline deadline() const noexcept {
    return seconds < 0 ? Deadline::never() : Deadline::after_ns(saturated_ns(seconds, 0));
  }
};

Linger linger_of(int fd) noexcept {
  linger now{};
  socklen_t len = sizeof(now);
  if (!os::getsockopt(fd, SOL_SOCKET, SO_LINGER, &now, &len)) return {};
  return {now.l_onoff != 0, now.l_linger};
}

/// What is left of the time is the kernel's, for the bytes that it still holds and FIN. It counts
/// in seconds, and none of them would be a reset.
void leave_rest_of_time(int fd, const Deadline& deadline) noexcept {
  constexpr uint64_t kSecondNs = 1'000'000'000;
  if (deadline.is_never()) return;
  const uint64_t left = (deadline.remaining_ns() + kSecondNs / 2) / kSecondNs;
  const linger rest{left != 0 ? 1 : 0, static_cast<int>(left)};
  (void)os::setsockopt(fd, SOL_SOCKET, SO_LINGER, &rest, sizeof(rest));
}

/// The close of this thread that has to wait, between before_close() and after_close(). Handlers
/// are held meanwhile: one would find the close over, as behind a system call, and may leave by
/// siglongjmp.
struct WaitingClose {
  Stream* stream = nullptr;
  Deadline deadline = Deadline::never();
};
constinit thread_local WaitingClose t_waiting __attribute__((tls_model("initial-exec")));

/// No descriptor for the keeper to go on with: this close waits, with the program's number, and to
/// everybody else that is one of the library's. The answer to an end takes one turn of the network,
/// a replay as long as the peer takes to read. True: the kernel has everything, or the connection
/// is reset; false: a descriptor came free after all.
bool sent_with_the_number_locked(Stream& s, int fd, const Linger& lingers,
                                 const HandlerWatch& since) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  {
    MutexLock rx(s.rx.mutex);
    Keeper::keep_number_locked(s, fd);
  }
  const Deadline deadline = lingers.deadline();
  bool sent = lingers.waits() && wait_until_kernel_sends_locked(s, deadline, since) == 0;
  const bool in_time = sent;
  sent = sent || kernel_sends_in_the_end_locked(s, kStuckNs);
  MutexLock rx(s.rx.mutex);
  Keeper::free_number_locked(s, fd);
  if (lingers.waits()) leave_rest_of_time(fd, in_time ? deadline : Deadline::after_ns(0));
  if (sent) return true;
  if (Keeper::adopt_locked(s, fd)) return false;
  RSOCK_LOG(kError, "fd %d: no descriptor left to finish sending: connection reset", fd);
  make_close_reset(fd);
  finish_tx_locked(s);
  return true;
}

/// What was sent is not out yet: the keeper goes on, on a descriptor of its own, and the program's
/// number is closed at once. With SO_LINGER this thread waits for that in after_close(). True: no
/// descriptor was to be had, and it is done already.
bool sent_or_adopted_locked(Stream& s, int fd, const Linger& lingers,
                            const HandlerWatch& since) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  {
    MutexLock rx(s.rx.mutex);
    if (Keeper::adopt_locked(s, fd)) {
      s.channel->wake_local();  // threads that still wait meet `closed`
      if (!lingers.waits()) return false;
      s.awaited = true;
      hold_handlers();
      t_waiting = {&s, lingers.deadline()};
      return false;
    }
  }
  return sent_with_the_number_locked(s, fd, lingers, since);
}

/// The wait of a close whose stream is adopted. Nobody else finishes it meanwhile.
void finish_awaited(Stream& s, const Deadline& deadline) noexcept {
  const HandlerWatch since;
  bool lied = false;
  {
    MutexLock tx(s.tx.mutex);
    // A signal that came since before_close() waits for the end of this call.
    if (!thread_signals().postponed) {
      lied = wait_until_kernel_sends_locked(s, deadline, since) == -EPROTO;
    }
  }
  if (lied) fail_stream(s, failure_of(s));
  bool finished = false;
  {
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    s.awaited = false;
    finished = s.tx.state == TxState::kKernel;
    if (finished) leave_rest_of_time(s.fd.load(std::memory_order_relaxed), deadline);
  }
  if (finished) {
    finish_if_adopted(s, /*lingers=*/true);
  } else {
    Keeper::leave_to_keeper();
  }
}

/// The last descriptor goes. True: the stream is finished; false: the keeper carries on with it.
/// *last is the channel, if there was one: its doorbell's number must stay taken until nobody
/// watches it any more.
bool close_last(Stream& s, int fd, std::shared_ptr<Channel>* last) noexcept {
  const HandlerWatch since;
  MutexLock tx(s.tx.mutex);
  bool reset = false;
  bool alone = false;  // with another holder this close ends nothing
  {
    MutexLock rx(s.rx.mutex);
    s.closed.store(true, std::memory_order_release);
    if (s.tx.barred) {
      s.tx.barred = false;
      s.tx.gate.give_back();
    }
    if (!s.channel) return true;
    alone = sole_holder(s);
    reset = unread_in_channel_locked(s) && alone;
  }
  Linger lingers = linger_of(fd);
  if (reset) make_close_reset(fd);
  if (reset || lingers.resets()) {
    // RST tells the peer; what it has in its ring it may still read, as from its kernel's queue.
    if (s.tx.state != TxState::kKernel) finish_tx_locked(s);
  } else {
    end_tx_locked(s);
    lingers.on = lingers.on && alone;
    if (s.tx.state != TxState::kKernel && !sent_or_adopted_locked(s, fd, lingers, since)) {
      return false;
    }
  }
  MutexLock rx(s.rx.mutex);
  if (!s.channel) return true;  // went while we waited
  if (s.rx.state != RxState::kKernel) finish_rx_locked(s);
  *last = take_channel_locked(s);
  (*last)->wake_local();  // threads that still wait meet `closed`
  return true;
}

/// Another name of the same stream, when the one that the keeper uses goes.
void choose_other_fd(Stream& s, int gone) noexcept {
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  if (s.fd.load(std::memory_order_relaxed) != gone) return;
  for (int fd = 0; fd <= FdTable::highest(); ++fd) {
    if (fd != gone && FdTable::stream(fd) == &s) {
      Keeper::move_watch_locked(s, fd);
      return;
    }
  }
}

/// fd is the last number. It is the caller's to close afterwards.
void close_for_good(Stream& s, int fd) noexcept {
  unlink_watchers(s);
  std::shared_ptr<Channel> last;
  if (!close_last(s, fd, &last)) return;
  unlink_watchers(s);
  last.reset();
  release_stream(s, fd);
}

}  // namespace

bool unread_in_channel_locked(Stream& s) noexcept {
  if (!s.channel) return false;
  const auto start = s.channel->rx_start();
  return start &&
         s.rx.offset.load(std::memory_order_relaxed) < *start + s.channel->rx_published() &&
         !s.channel->rx_replayed();
}

void make_close_reset(int fd) noexcept {
  const linger now{1, 0};
  (void)os::setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
}

long shutdown(Stream& s, int fd, int how, KernelCall kernel) {
  bool fin_owed = false;
  if (how == SHUT_WR || how == SHUT_RDWR) {
    MutexLock lock(s.tx.mutex);
    if (s.tx.barred) return -ENOTCONN;  // FIN would cut off what the parent still sends
    end_tx_locked(s);
    if (s.tx.state != TxState::kKernel) fin_owed = s.tx.fin_owed = true;
  }
  const auto in_kernel = [&]() -> long {
    if (!fin_owed) return kernel();
    if (how == SHUT_RDWR) (void)os::shutdown(fd, SHUT_RD);
    return 0;
  };
  long result = 0;
  if (how == SHUT_RD || how == SHUT_RDWR) {
    // Both at once, for whoever polls: the kernel's half of the answer (HUP) belongs to ours.
    MutexLock lock(s.rx.mutex);
    s.rx.shut = true;
    result = in_kernel();
  } else {
    result = in_kernel();
  }
  maybe_detach(s);
  wake_waiters(s);
  return result;
}

bool before_close(int fd) noexcept {
  const uintptr_t word = FdTable::word(fd);
  switch (FdTable::kind_of(word)) {
    case FdKind::kUnknown:
      return true;
    case FdKind::kInternal:
      return false;
    case FdKind::kTcpSocket:
      FdTable::clear(fd);
      return true;
    case FdKind::kEpoll:
      g_epoll_close(FdTable::object(fd, FdKind::kEpoll), fd);
      FdTable::clear(fd);
      return true;
    case FdKind::kStream:
      break;
  }
  Stream* s = FdTable::stream(fd);
  if (s == nullptr) return true;
  after_close();  // one of several at once (close_range): they wait one after the other
  // Cleared before the real close: the number can be reused by another thread in the same instant.
  // Whoever gets the stream out of the slot closes it; a second close of the same number finds
  // nothing.
  if (FdTable::kind_of(FdTable::clear(fd)) != FdKind::kStream) return true;
  if (s->fd_refs.fetch_sub(1, std::memory_order_acq_rel) > 1) {
    choose_other_fd(*s, fd);
    g_epoll_name_gone(*s, fd);
    return true;
  }
  if (leave_to_those_inside(*s, fd)) return true;
  // Before a close that waits: no epoll instance reports of it meanwhile (__fput() in
  // fs/file_table.c). And while the stream is ours: one that the keeper goes on with may be
  // another's the moment after.
  close_for_good(*s, fd);
  return true;
}

void close_orphan(Stream& s) noexcept {
  const int fd = s.fd.load(std::memory_order_relaxed);
  close_for_good(s, fd);
  Keeper::give_back(fd);
  after_close();  // SO_LINGER: whoever lets go of the file last waits
}

void after_close() noexcept {
  if (t_waiting.stream == nullptr) return;
  const WaitingClose waiting = std::exchange(t_waiting, {});
  finish_awaited(*waiting.stream, waiting.deadline);
  release_handlers();
}

void for_each_program_range(unsigned first, unsigned last, void (*range)(unsigned, unsigned, void*),
                            void* arg) noexcept {
  const unsigned highest = static_cast<unsigned>(FdTable::highest() + 1);
  unsigned begin = first;
  for (unsigned fd = first; fd <= last && fd < highest; ++fd) {
    if (FdTable::kind(static_cast<int>(fd)) != FdKind::kInternal) continue;
    if (fd > begin) range(begin, fd - 1, arg);
    begin = fd + 1;
  }
  if (begin <= last && begin >= first) range(begin, last, arg);
}

}  // namespace rsock::stream
