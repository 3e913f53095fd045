// Ends that were no orderly ones: the peer died with bytes of ours unread, or it lied.

#include <poll.h>
#include <sys/ioctl.h>

#include "core/base/deadline.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

/// A process that ends closes its descriptors in no order that we could rely on. Waits a moment for
/// both signs of its death, FIN on TCP and the hang-up of the doorbell. Only one: it lives, and
/// shut down or let go of one thing.
bool both_ends_gone(int fd, int doorbell) noexcept {
  constexpr int64_t kSignsNs = 10'000'000;
  const Deadline deadline = Deadline::after_ns(kSignsNs);
  for (;;) {
    pollfd signs[2] = {{fd, POLLRDHUP, 0}, {doorbell, POLLRDHUP, 0}};
    timespec now{0, 0};
    (void)os::ppoll(signs, 2, &now, nullptr, 0);
    if (signs[0].revents != 0 && signs[1].revents != 0) return true;
    if (deadline.passed()) return false;
    pollfd missing = signs[signs[0].revents != 0 ? 1 : 0];
    timespec left;
    deadline.as_timespec(&left);
    (void)os::ppoll(&missing, 1, &left, nullptr, 0);
  }
}

}  // namespace

void judge_unread(Stream& s) noexcept {
  MutexLock lock(s.tx.mutex);
  // Where the words go by a line, a peer that died is found by what it did not say
  // (obey_tx_turn_locked).
  if (!s.channel || !s.channel->decides_alone()) return;
  if (s.tx.state != TxState::kRing || s.channel->tx_unread() == 0) return;
  const int fd = s.fd.load(std::memory_order_relaxed);
  if (!both_ends_gone(fd, s.channel->wait_fd())) return;
  const Turn turn = s.channel->tx_recall();
  if (turn.kind != TurnKind::kFrozen || turn.at >= s.channel->tx_tail()) return;
  char byte = 0;
  const auto seen = os::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (!seen && seen.error() != EAGAIN) {
    // The kernel tells an error once: it was meant for the program.
    s.error.store(value(seen.error()), std::memory_order_release);
  } else {
    // Let the dead peer's kernel reset the connection for real, so that all later calls see what
    // follows a reset; the error that it leaves (EPIPE after FIN, tcp_reset()) is replaced by the
    // one that fits.
    (void)os::send(fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)os::getsockopt_int(fd, SOL_SOCKET, SO_ERROR);
    s.error.store(ECONNRESET, std::memory_order_release);
  }
  s.channel->tx_set_replayed();
  finish_tx_locked(s);
}

/// The peer went, and what came from it before that is not read yet. A reset leaves it to be read
/// (tcp_reset() keeps the receive queue), whatever became of our bytes.
static bool leaves_bytes_locked(Stream& s, int fd) noexcept RSOCK_REQUIRES(s.tx.mutex, s.rx.mutex) {
  if (!s.peer_gone.load(std::memory_order_acquire) || s.closed.load(std::memory_order_relaxed) ||
      s.rx.shut || s.channel->rx_failed()) {
    return false;
  }
  if (s.rx.state != RxState::kKernel && s.channel->rx_available() != 0) return true;
  const auto queued = os::ioctl_int(fd, FIONREAD);
  return queued && *queued > 0;
}

/// The kernel's stream as after a reset whose error is ours to tell, once.
static void end_in_kernel_locked(Stream& s, int fd, int error) noexcept
    RSOCK_REQUIRES(s.tx.mutex, s.rx.mutex) {
  // The peer's RST may have been first, and then the program has heard of it or still will.
  auto pending = os::getsockopt_int(fd, SOL_SOCKET, SO_ERROR);
  if (!pending || *pending == 0) {
    pending = s.error_told.load(std::memory_order_acquire) ? 0 : error;
  }
  const bool readable = leaves_bytes_locked(s, fd);
  if (readable) {
    (void)os::shutdown(fd, SHUT_WR);  // and the peer's end follows what is left
  } else {
    // The bytes that remain on TCP continue nothing: nobody may read them as if they did. Under the
    // locks, because close() passes through them before the number is free.
    abort_connection(fd);
    (void)os::getsockopt_int(fd, SOL_SOCKET, SO_ERROR);  // what that leaves behind is ours
    if (s.rx.state != RxState::kKernel) finish_rx_locked(s);
    s.rx.ring_done = true;
    s.rx.await_replay.store(false, std::memory_order_relaxed);
  }
  if (*pending != 0) s.error.store(*pending, std::memory_order_release);
}

/// The locked part of fail_stream(). False: another thread was first.
static bool fail_locked(Stream& s, Reason reason, int error) noexcept
    RSOCK_REQUIRES(s.tx.mutex, s.rx.mutex) {
  // Another thread failed it, or closed it: the number may be another connection's by now. (An
  // adopted stream is closed, and its number the library's own.)
  const bool gone =
      s.closed.load(std::memory_order_relaxed) && !s.adopted.load(std::memory_order_relaxed);
  if (!s.channel || gone || s.failed) return false;
  s.failed = true;
  const int fd = s.fd.load(std::memory_order_relaxed);
  count_refusal(reason);
  RSOCK_LOG(kError, "fd %d: %s: connection reset", fd, reason);
  s.pinned.store(true, std::memory_order_relaxed);
  s.strange.store(true, std::memory_order_relaxed);
  end_in_kernel_locked(s, fd, error);
  if (s.tx.state != TxState::kKernel) finish_tx_locked(s);
  s.tx.ring_done = true;
  s.tx.lied = false;
  return true;
}

void fail_stream(Stream& s, Reason reason, int error) noexcept {
  bool failed = false;
  {
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    failed = fail_locked(s, reason, error);
  }
  if (failed) maybe_detach(s);
  wake_waiters(s);  // in any case: a close that waits for the last byte looks, and gives up
}

void abort_connection(int fd) noexcept {
  // Connecting to AF_UNSPEC aborts: RST to the peer, queues purged (net/ipv4/tcp.c,
  // tcp_disconnect).
  sockaddr none{};
  none.sa_family = AF_UNSPEC;
  (void)os::connect(fd, &none, sizeof(none));
  // Reads would say ENOTCONN now. Shut as well, it is what it is after the peer's RST: the error
  // once, then the end, EPIPE, POLLHUP (inet_shutdown() does it, and complains).
  (void)os::shutdown(fd, SHUT_RDWR);
}

}  // namespace rsock::stream
