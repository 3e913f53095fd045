// Connections that this process has not made: they came by exec, or through a Unix socket.
//
// Who gave them away has written on them (notes.h) that somebody takes them over, and what the
// kernel does not tell. One without such a note may be in anybody's hands: it stays the kernel's
// alone. The rest the kernel knows: how many bytes have come and gone.

#include <linux/tcp.h>
#include <netinet/in.h>

#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/holders.h"
#include "core/stream/moves.h"
#include "core/stream/notes.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {
namespace {

bool is_tcp(int fd) noexcept {
  const auto protocol = os::getsockopt_int(fd, SOL_SOCKET, SO_PROTOCOL);
  if (!protocol || *protocol != IPPROTO_TCP) return false;
  const auto domain = os::getsockopt_int(fd, SOL_SOCKET, SO_DOMAIN);
  return domain && (*domain == AF_INET || *domain == AF_INET6);
}

/// Neither end has ended anything: what this process may do, and what is left to lift, is
/// everything.
bool is_whole(int fd) noexcept {
  struct tcp_info info {};
  socklen_t len = sizeof(info);
  return os::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) &&
         info.tcpi_state == kEstablished && os::poll_now(fd, POLLRDHUP) == 0;
}

uint64_t cookie_of(int fd) noexcept { return os::getsockopt_u64(fd, SO_COOKIE).value_or(0); }

/// Asked of the kernel once a stream.
uint64_t cookie_of(Stream& s, int fd) noexcept {
  uint64_t cookie = s.cookie.load(std::memory_order_relaxed);
  if (cookie != 0) return cookie;
  const uint32_t generation = s.generation.load(std::memory_order_acquire);
  cookie = cookie_of(fd);
  // Not that of a file which came to the number meanwhile.
  if (FdTable::stream(fd) == &s && s.owned_by(generation)) {
    s.cookie.store(cookie, std::memory_order_relaxed);
  }
  return cookie;
}

/// Another number of this process's that is the same stream; -1: none.
int other_number(int fd) noexcept {
  if (live_streams() == 0) return -1;
  const uint64_t cookie = cookie_of(fd);
  if (cookie == 0) return -1;
  const Stream* asked = nullptr;
  for (int other = 0; other <= FdTable::highest(); ++other) {
    Stream* const s = FdTable::stream(other);
    if (s == nullptr || s == asked) continue;
    asked = s;  // its other numbers mostly stand side by side
    if (cookie_of(*s, other) == cookie) return other;
  }
  return -1;
}

/// What is untracked is in nobody's view from here on: a note that is never taken back.
bool mark_for_good(int fd) noexcept { return write_holder(fd, fresh_id()); }

/// It is a stream of ours, or marked. False: the kernel has no room for a note of that, and the one
/// that it came with has to stay.
bool settle_with(int fd, const Carried& carried) noexcept {
  Stream* const s = is_whole(fd) ? acquire_stream(fd, false) : nullptr;
  if (s == nullptr) return mark_for_good(fd);
  read_options(*s, fd);
  s->connected_here = carried.connected_here;
  bool noted = false;
  {
    MutexLock tx(s->tx.mutex);
    MutexLock rx(s->rx.mutex);
    s->tx.off_tcp = carried.tx_off_tcp;
    s->rx.off_tcp = carried.rx_off_tcp;
    // While others use it the kernel may tell nothing, or something that is past the moment after:
    // it is asked again when this process is left alone.
    s->tx.offset.store(kernel_sent(*s, fd).value_or(0) + carried.tx_off_tcp,
                       std::memory_order_relaxed);
    s->rx.offset.store(kernel_received(fd).value_or(0) + carried.rx_off_tcp,
                       std::memory_order_relaxed);
    noted = write_note_locked(*s, fd);
  }
  FdTable::set(fd, FdKind::kStream, s);
  g_epoll_adopt(*s, fd);
  RSOCK_LOG(kDebug, "fd %d: taken over from another program", fd);
  return noted;
}

}  // namespace

bool is_left_to_us(int fd) noexcept {
  if (!is_tcp(fd)) return false;
  return other_number(fd) >= 0 || read_carried(fd, Way::kExec, exec_key()).has_value();
}

void on_inherited(int fd, bool track) noexcept {
  if (const int other = other_number(fd); other >= 0) return on_dup(other, fd);
  const auto carried = read_carried(fd, Way::kExec, exec_key());
  if (!carried) return;
  // Another note is there by now, or this one stays.
  if (track ? settle_with(fd, *carried) : mark_for_good(fd)) {
    erase_carried(fd, Way::kExec, exec_key());
  }
}

void on_received(int fd, bool peeked) noexcept {
  if (FdTable::word(fd) != 0 || !is_tcp(fd)) return;
  const auto key = find_passing(fd);
  // Whatever is written: a number of what this process has (MSG_PEEK gives one as well).
  const int other = other_number(fd);
  if (other >= 0) {
    on_dup(other, fd);
    // That number may have been closed meanwhile, and the stream with it.
    if (FdTable::stream(fd) == nullptr) return (void)mark_for_good(fd);
  } else {
    const auto carried = key ? read_carried(fd, Way::kPassing, *key) : std::nullopt;
    if (!carried) return;  // a note that is not whole stays: nobody lifts this one any more
    if (!settle_with(fd, *carried)) return;
  }
  if (key && !peeked) erase_carried(fd, Way::kPassing, *key);  // the message is still to come
}

}  // namespace rsock::stream
