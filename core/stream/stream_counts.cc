// How many bytes lie where: what ioctl(2) and TCP_INFO tell of them.

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <sys/ioctl.h>

#include <cstddef>
#include <cstring>

#include "core/os/os.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

/// Adds to a count at `offset`, if the program's structure reaches so far.
void add_to(void* info, size_t len, size_t offset, uint64_t more) noexcept {
  uint64_t count = 0;
  if (len < offset + sizeof(count)) return;
  auto* at = static_cast<char*>(info) + offset;
  std::memcpy(&count, at, sizeof(count));
  count += more;
  std::memcpy(at, &count, sizeof(count));
}

/// Of what was sent on the channel, what no acknowledgement would have come for yet. Over a queue
/// pair that is known. In shared memory both kernels' buffers are one, and the peer's would hold
/// the beginning of it, acknowledged.
uint64_t unacknowledged_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  if (s.tx.state == TxState::kReplay) return s.channel->tx_tail() - s.tx.replay_next;
  if (s.tx.state != TxState::kRing) return 0;
  const uint64_t n = s.channel->tx_undelivered();
  if (!s.channel->decides_alone()) return n;
  return n > kPeerHolds ? n - kPeerHolds : 0;
}

}  // namespace

long bytes_to_read(Stream& s, int fd) noexcept {
  MutexLock lock(s.rx.mutex);
  long n = 0;
  if (s.rx.state != RxState::kRing) {
    const auto queued = os::ioctl_int(fd, SIOCINQ);
    n = queued ? *queued : 0;
  }
  if (s.rx.state != RxState::kKernel && s.channel->rx_start()) {
    n += static_cast<long>(s.channel->rx_available());
  }
  return n;
}

long bytes_unsent(Stream& s) noexcept {
  MutexLock lock(s.tx.mutex);
  return static_cast<long>(unacknowledged_locked(s));
}

void correct_tcp_info(Stream& s, int fd, void* info, size_t len) noexcept {
  uint64_t sent = 0;
  uint64_t unacknowledged = 0;
  uint64_t received = 0;
  {
    MutexLock lock(s.tx.mutex);
    sent = s.tx.off_tcp;
    unacknowledged = std::min(unacknowledged_locked(s), sent);
  }
  {
    MutexLock lock(s.rx.mutex);
    received = s.rx.off_tcp;
    if (s.rx.state == RxState::kRing) received += s.channel->rx_available();
  }
  add_to(info, len, offsetof(tcp_info, tcpi_bytes_sent), sent);
  add_to(info, len, offsetof(tcp_info, tcpi_bytes_acked), sent - unacknowledged);
  add_to(info, len, offsetof(tcp_info, tcpi_bytes_received), received);
}

}  // namespace rsock::stream
