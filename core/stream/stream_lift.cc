// Lifting: from the first worthy byte to the switch. PROTOCOL.md, "Lifting".

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>

#include <utility>

#include "core/base/config.h"
#include "core/base/deadline.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/holders.h"
#include "core/stream/keeper.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {
namespace {

constexpr Reason kUnseen = "used without our seeing it";

/// A count of the kernel's and how much of it is still queued, read at one moment.
struct Counted {
  struct tcp_info info;
  uint64_t queued;
};

enum class Asked { kAnswered, kNotKnown, kTooLively };

Asked ask_counts(int fd, unsigned long queue, Counted* counted) noexcept {
  for (int i = 0; i < 8; ++i) {
    const auto before = os::ioctl_int(fd, queue);
    socklen_t len = sizeof(counted->info);
    counted->info = {};
    if (!before || !os::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &counted->info, &len)) {
      return Asked::kNotKnown;  // an old kernel
    }
    const auto after = os::ioctl_int(fd, queue);
    if (!after || *before != *after) continue;  // bytes came or went in between: ask again
    counted->queued = static_cast<uint64_t>(*after);
    return Asked::kAnswered;
  }
  return Asked::kTooLively;
}

/// Does the kernel agree with our count of received bytes? If not, somebody reads this connection
/// without our seeing it (stdio inside libc, io_uring, another process). Without an answer there is
/// no proof against it. tcpi_bytes_received counts a received FIN (net/ipv4/tcp_input.c, tcp_fin).
bool kernel_agrees_on_received(int fd, uint64_t offset) noexcept {
  Counted c;
  if (ask_counts(fd, SIOCINQ, &c) != Asked::kAnswered) return true;
  const uint64_t taken = c.info.tcpi_bytes_received - c.queued;
  return taken == offset || taken == offset + 1;
}

/// The same for sent bytes; tcpi_bytes_acked counts our SYN if we connected.
bool kernel_agrees_on_sent(int fd, uint64_t offset) noexcept {
  Counted c;
  if (ask_counts(fd, SIOCOUTQ, &c) != Asked::kAnswered) return true;
  const uint64_t given = c.info.tcpi_bytes_acked + c.queued;
  return given == offset || given == offset + 1;
}

enum class Count { kAgrees, kTaken, kUnseen };

/// Gate taken, nobody else has the stream: is what this direction has moved over TCP what we know
/// of? Where others had it since we looked, they may have moved more. Then the kernel's count is
/// taken, and the stream lifted a little later: if it moves without us again, it is not by others.
Count settle(std::atomic<uint64_t>& offset, uint64_t off_tcp, bool& others_moved,
             std::optional<uint64_t> exact, bool agrees) noexcept {
  if (!std::exchange(others_moved, false)) return agrees ? Count::kAgrees : Count::kUnseen;
  if (!exact) return Count::kUnseen;
  const uint64_t before = offset.exchange(*exact + off_tcp, std::memory_order_relaxed);
  return before == *exact + off_tcp ? Count::kAgrees : Count::kTaken;
}

Count settle_received_locked(Stream& s) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  const int fd = s.fd.load(std::memory_order_relaxed);
  const uint64_t counted = s.rx.offset.load(std::memory_order_relaxed) - s.rx.off_tcp;
  const bool others = s.rx.others_moved;
  return settle(s.rx.offset, s.rx.off_tcp, s.rx.others_moved,
                others ? kernel_received(fd) : std::nullopt,
                others || kernel_agrees_on_received(fd, counted));
}

Count settle_sent_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  const int fd = s.fd.load(std::memory_order_relaxed);
  const uint64_t counted = s.tx.offset.load(std::memory_order_relaxed) - s.tx.off_tcp;
  const bool others = s.tx.others_moved;
  return settle(s.tx.offset, s.tx.off_tcp, s.tx.others_moved,
                others ? kernel_sent(s, fd) : std::nullopt,
                others || kernel_agrees_on_sent(fd, counted));
}

/// No lift with this count.
void leave_on_tcp(Stream& s, Count count) noexcept {
  if (count == Count::kAgrees) return;
  if (count == Count::kUnseen) (void)pin(s, kUnseen);
  set_down(s, count == Count::kUnseen ? kUnseen : "others moved bytes of it");
}

}  // namespace

void read_options(Stream& s, int fd) noexcept {
  if (const auto flags = os::fcntl(fd, F_GETFL)) {
    s.nonblocking.store((*flags & O_NONBLOCK) != 0, std::memory_order_relaxed);
  }
  timeval tv{};
  socklen_t len = sizeof(tv);
  if (os::getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, &len)) {
    s.rcv_timeout_ns.store(socket_timeout_ns(tv), std::memory_order_relaxed);
  }
  len = sizeof(tv);
  if (os::getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, &len)) {
    s.snd_timeout_ns.store(socket_timeout_ns(tv), std::memory_order_relaxed);
  }
  read_limits(s, fd);
}

namespace {

bool has_cookie(int fd, uint64_t cookie) noexcept {
  const auto now = os::getsockopt_u64(fd, SO_COOKIE);
  return now && *now == cookie;
}

void notice_ready_if_free(Stream& s) noexcept {
  if (!s.tx.mutex.try_lock()) return;
  notice_ready_locked(s);
  s.tx.mutex.unlock();
}

/// The peer's word that it is ready comes with a kick, which may be lost; then nobody else would
/// look and the stream would stay on TCP. Traffic that is still there looks itself, now and then.
void look_for_ready(Stream& s) noexcept {
  if ((s.calls.fetch_add(1, std::memory_order_relaxed) & 15) == 0) notice_ready_if_free(s);
}

}  // namespace

std::optional<uint64_t> kernel_received(int fd) noexcept {
  Counted c;
  if (ask_counts(fd, SIOCINQ, &c) != Asked::kAnswered) return std::nullopt;
  const uint64_t taken = c.info.tcpi_bytes_received - c.queued;
  if (c.info.tcpi_state == kEstablished) return taken;
  if (c.info.tcpi_state == kCloseWait) return taken - 1;
  return std::nullopt;
}

std::optional<uint64_t> kernel_sent(const Stream& s, int fd) noexcept {
  Counted c;
  if (ask_counts(fd, SIOCOUTQ, &c) != Asked::kAnswered) return std::nullopt;
  if (c.info.tcpi_state != kEstablished && c.info.tcpi_state != kCloseWait) return std::nullopt;
  return c.info.tcpi_bytes_acked + c.queued - (s.connected_here ? 1 : 0);
}

void note_traffic(Stream& s) noexcept {
  if (s.lift_asked.load(std::memory_order_relaxed)) {
    if (s.has_channel.load(std::memory_order_relaxed)) look_for_ready(s);
    return;
  }
  const uint32_t calls = s.calls.fetch_add(1, std::memory_order_relaxed) + 1;
  const Config& c = config();
  if (calls < c.lift_calls &&
      s.tx.offset.load(std::memory_order_relaxed) + s.rx.offset.load(std::memory_order_relaxed) <
          c.lift_bytes) {
    return;
  }
  if (s.lift_asked.exchange(true, std::memory_order_acq_rel)) return;
  if (s.pinned.load(std::memory_order_relaxed)) return;
  Keeper::ask_for_lift(s);
}

int strict_error(Stream& s) noexcept {
  return s.strict_failed.load(std::memory_order_relaxed) ? ECONNABORTED : 0;
}

bool attach(Stream& s, uint32_t generation, uint64_t cookie, std::shared_ptr<Channel> channel,
            uint64_t nonce, const wire::SocketName& peer_kick) noexcept {
  {
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    if (!s.owned_by(generation) || s.closed.load(std::memory_order_relaxed) || s.channel ||
        s.pinned.load(std::memory_order_relaxed) || !sole_holder(s) || s.lent != 0 ||
        is_at_stdio(s)) {
      return false;
    }
    const int fd = s.fd.load(std::memory_order_relaxed);
    if (!has_cookie(fd, cookie)) return false;  // what was agreed was agreed about another socket
    read_options(s, fd);
    s.channel = std::move(channel);
    s.channel_nonce = nonce;
    s.ever_attached = true;
    s.peer_kick = peer_kick;
    s.tx.ring_done = s.rx.ring_done = false;
    s.path_failed = false;
    s.path_failed_ns = 0;
    s.lane_calls = 0;
    s.full_watched.store(false, std::memory_order_relaxed);
    s.lane_watched.store(false, std::memory_order_relaxed);
    s.lane_head = UINT64_MAX;
    s.full_since_ns = 0;
    s.rx.end_due = false;
    s.tcp_event.store(false, std::memory_order_relaxed);
    s.peer_gone.store(false, std::memory_order_relaxed);
    s.rx.await_replay.store(false, std::memory_order_relaxed);
    s.doorbell_fd.store(s.channel->wait_fd(), std::memory_order_relaxed);
    s.has_channel.store(true, std::memory_order_release);
    if (s.tx.shut) {  // FIN is out already: this direction can't move any more
      (void)s.channel->tx_end();
      s.channel->tx_set_replayed();
      s.tx.ring_done = true;
    }
    Keeper::watch_locked(s);
  }
  // Pollers and epoll instances watch the doorbell before the first byte can come that way.
  path_changed(s);
  s.rx.want_ready.store(true, std::memory_order_release);
  try_ready(s);
  return true;
}

void notice_ready_locked(Stream& s) noexcept {
  if (s.channel && s.tx.state == TxState::kKernel && !s.tx.ring_done && !s.tx.shut &&
      s.channel->tx_peer_ready()) {
    s.tx_wanted.store(true, std::memory_order_release);
  }
}

void notice_ready(Stream& s) noexcept {
  notice_ready_if_free(s);
  if (s.tx_wanted.load(std::memory_order_acquire)) try_switch_tx(s);
}

void try_ready(Stream& s) noexcept {
  Count count = Count::kAgrees;
  {
    MutexLock lock(s.rx.mutex);
    if (!s.rx.want_ready.load(std::memory_order_relaxed) || !s.channel) return;
    // Whoever knows that the path is lost promises nothing on it: nobody would seal that direction.
    if (s.channel->path_failure() != nullptr) return;
    if (s.channel->rx_turn().kind != TurnKind::kOpen) {
      s.rx.want_ready.store(false, std::memory_order_relaxed);
      if (s.rx.state == RxState::kKernel) s.rx.ring_done = true;
      return;
    }
    if (!s.rx.gate.take()) return;  // whoever leaves the kernel last comes here again
    s.rx.want_ready.store(false, std::memory_order_relaxed);
    s.rx.state = RxState::kTcp;
    count = settle_received_locked(s);
    if (count == Count::kAgrees) {
      s.channel->rx_set_ready();
      s.channel->wake_peer();
      Keeper::kick_peer_locked(s);
    }
  }
  leave_on_tcp(s, count);
}

void try_switch_tx(Stream& s) noexcept {
  Count count = Count::kAgrees;
  {
    MutexLock lock(s.tx.mutex);
    if (!s.tx_wanted.load(std::memory_order_relaxed)) return;
    if (!s.channel || s.tx.ring_done || s.tx.state != TxState::kKernel || s.tx.shut) {
      s.tx_wanted.store(false, std::memory_order_relaxed);
      return;
    }
    if (s.channel->path_failure() != nullptr) {  // set_down() comes, and says that we never began
      s.tx_wanted.store(false, std::memory_order_relaxed);
      return;
    }
    if (s.channel->tx_turn().kind != TurnKind::kOpen) {
      s.tx_wanted.store(false, std::memory_order_relaxed);
      s.tx.ring_done = true;
      s.channel->tx_set_replayed();
      return;
    }
    if (!s.tx.gate.take()) return;
    s.tx_wanted.store(false, std::memory_order_relaxed);
    count = settle_sent_locked(s);
    if (count == Count::kAgrees) {
      const uint64_t offset = s.tx.offset.load(std::memory_order_relaxed);
      s.tx.state = TxState::kRing;
      s.channel->tx_set_start(offset);
      s.channel->wake_peer();
      s.ever_lifted |= 1u << static_cast<int>(s.channel->kind());
      RSOCK_LOG(kDebug, "fd %d: sending over the channel from byte %llu",
                s.fd.load(std::memory_order_relaxed), static_cast<unsigned long long>(offset));
    } else {
      s.tx.gate.give_back();
    }
  }
  leave_on_tcp(s, count);
}

}  // namespace rsock::stream
