// Descriptors, options and ioctls: what the program may ask of a stream, and what pins it to TCP.

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>

#include "core/base/config.h"
#include "core/base/log.h"
#include "core/base/try_copy.h"
#include "core/os/os.h"
#include "core/stream/hand_over.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {
namespace {

constexpr int kBufLock = 72;  // SO_BUF_LOCK, since Linux 5.14

bool is_tcp_socket(int fd) noexcept {
  const auto protocol = os::getsockopt_int(fd, SOL_SOCKET, SO_PROTOCOL);
  if (!protocol || *protocol != IPPROTO_TCP) return false;
  const auto domain = os::getsockopt_int(fd, SOL_SOCKET, SO_DOMAIN);
  return domain && (*domain == AF_INET || *domain == AF_INET6);
}

void track(int fd, bool nonblocking, bool connected_here) noexcept {
  Stream* s = acquire_stream(fd, nonblocking);
  if (s == nullptr) return;  // no memory: the socket is plain TCP
  s->connected_here = connected_here;
  FdTable::set(fd, FdKind::kStream, s);
  g_epoll_adopt(*s, fd);
}

int64_t timeval_ns(const void* value, socklen_t len) noexcept {
  if (value == nullptr || len < sizeof(timeval)) return 0;
  return socket_timeout_ns(*static_cast<const timeval*>(value));
}

/// A signal handler interrupted this very thread inside one of the stream's locks.
bool in_the_middle(const Stream& s) noexcept {
  return s.tx.mutex.held_by_me() || s.rx.mutex.held_by_me();
}

/// Under both locks: attach() reads the kernel's flag under them, and what it read is older.
void note_nonblocking(Stream& s, bool nonblocking) noexcept RSOCK_NO_TSA {
  const bool lock = !in_the_middle(s);
  if (lock) {
    s.tx.mutex.lock();
    s.rx.mutex.lock();
  }
  s.nonblocking.store(nonblocking, std::memory_order_relaxed);
  if (lock) {
    s.rx.mutex.unlock();
    s.tx.mutex.unlock();
  }
}

/// Options whose effect we do not reproduce on a channel: their user gets the kernel's stream.
Reason pins(int level, int name, const void* value, socklen_t len) noexcept {
  int v = 0;
  if (len >= sizeof(int)) (void)try_get(&v, static_cast<const int*>(value));
  if (level == SOL_SOCKET) {
    switch (name) {
      case SO_RCVLOWAT:
        return v > kMostLowWater || v < 0 ? "SO_RCVLOWAT" : nullptr;
      case SO_TIMESTAMP_OLD:
      case SO_TIMESTAMPNS_OLD:
      case SO_TIMESTAMPING_OLD:
      case SO_TIMESTAMP_NEW:
      case SO_TIMESTAMPNS_NEW:
      case SO_TIMESTAMPING_NEW:
        return v != 0 ? "SO_TIMESTAMP" : nullptr;
      case SO_PEEK_OFF:
        return v >= 0 ? "SO_PEEK_OFF" : nullptr;
      case SO_OOBINLINE:
        return v != 0 ? "SO_OOBINLINE" : nullptr;
      default:
        return nullptr;
    }
  }
  if (level == IPPROTO_TCP) {
    switch (name) {
      case TCP_ULP:
        return "TCP_ULP";
      case TCP_REPAIR:
        return "TCP_REPAIR";
      case TCP_INQ:
        return v != 0 ? "TCP_INQ" : nullptr;
      default:
        return nullptr;
    }
  }
  return nullptr;
}

}  // namespace

void on_socket(int fd, int domain, int type, int protocol) noexcept {
  if (!config().enabled || fd < 0) return;
  if ((domain != AF_INET && domain != AF_INET6) || (type & 0xf) != SOCK_STREAM) return;
  if (protocol != 0 && protocol != IPPROTO_TCP) return;
  FdTable::set(fd, FdKind::kTcpSocket);
}

void on_connect(int fd, long result) noexcept {
  if (result < 0 && result != -EINPROGRESS && result != -EINTR) return;
  if (FdTable::kind(fd) != FdKind::kTcpSocket) return;
  // O_NONBLOCK is read from the kernel when the stream is lifted.
  track(fd, false, true);
  Stream* s = result > 0 ? FdTable::stream(fd) : nullptr;
  if (s == nullptr) return;
  s->tx.offset.fetch_add(static_cast<uint64_t>(result), std::memory_order_relaxed);
  s->sent[0].fetch_add(static_cast<uint64_t>(result), std::memory_order_relaxed);
}

void on_accept(int listener, int fd, int flags) noexcept {
  if (!config().enabled || fd < 0) return;
  const FdKind kind = FdTable::kind(listener);
  if (kind != FdKind::kTcpSocket) {
    // Inherited listeners are unknown until they are used once.
    if (kind != FdKind::kUnknown || !is_tcp_socket(listener)) return;
    FdTable::set(listener, FdKind::kTcpSocket);
  }
  track(fd, (flags & SOCK_NONBLOCK) != 0, false);
}

void on_dup(int fd, int copy) noexcept {
  const uintptr_t word = FdTable::word(fd);
  switch (FdTable::kind_of(word)) {
    case FdKind::kStream: {
      Stream* s = FdTable::stream(fd);
      if (s == nullptr) return;
      s->fd_refs.fetch_add(1, std::memory_order_relaxed);
      FdTable::set(copy, FdKind::kStream, s);
      return;
    }
    case FdKind::kTcpSocket:
      FdTable::set(copy, FdKind::kTcpSocket);
      return;
    case FdKind::kEpoll:
      g_epoll_dup(FdTable::object(fd, FdKind::kEpoll), copy);
      return;
    case FdKind::kUnknown:
    case FdKind::kInternal:
      return;
  }
}

long ioctl(Stream& s, int fd, unsigned long request, void* arg, KernelCall kernel) {
  if (request == FIONBIO) {
    const long r = kernel();
    if (r >= 0) note_nonblocking(s, *static_cast<int*>(arg) != 0);
    return r;
  }
  if (request == FIOASYNC) pin_to_tcp(fd, "O_ASYNC", false);
  if (!s.has_channel.load(std::memory_order_acquire)) return kernel();
  if (request != SIOCINQ && request != SIOCOUTQ && request != SIOCOUTQNSD) return kernel();
  const long r = kernel();  // checks the argument's address for us
  if (r < 0) return r;
  auto* count = static_cast<int*>(arg);
  *count = static_cast<int>(request == SIOCINQ ? bytes_to_read(s, fd) : *count + bytes_unsent(s));
  return r;
}

long getsockopt(Stream& s, int fd, int level, int name, void* value, socklen_t* len,
                KernelCall kernel) {
  if (level == SOL_SOCKET && name == SO_ERROR) {
    const long r = kernel();
    if (r != 0 || *len < sizeof(int)) return r;
    int& told = *static_cast<int*>(value);
    if (const int owed = take_error(s); owed != 0) told = owed;
    note_told(s, -told);
    return r;
  }
  // It receives.
  if (level == IPPROTO_TCP && name == TCP_ZEROCOPY_RECEIVE) pin_to_tcp(fd, "TCP_ZEROCOPY_RECEIVE");
  const long r = kernel();
  if (r == 0 && level == IPPROTO_TCP && name == TCP_INFO) correct_tcp_info(s, fd, value, *len);
  return r;
}

long setsockopt(Stream& s, int fd, int level, int name, const void* value, socklen_t len,
                KernelCall kernel) {
  if (const Reason reason = pins(level, name, value, len); reason != nullptr) {
    // Of the options only these change what the kernel makes of the bytes that we still send.
    pin_to_tcp(fd, reason, level == IPPROTO_TCP && (name == TCP_ULP || name == TCP_REPAIR));
  }
  const long r = kernel();
  if (r == 0 && level == IPPROTO_TCP && name == TCP_USER_TIMEOUT) read_limits(s, fd);
  if (r != 0 || level != SOL_SOCKET) return r;
  // 64-bit machines have one structure under both names.
  if (name == SO_RCVTIMEO || name == SO_RCVTIMEO_NEW) {
    s.rcv_timeout_ns.store(timeval_ns(value, len), std::memory_order_relaxed);
  } else if (name == SO_SNDTIMEO || name == SO_SNDTIMEO_NEW) {
    s.snd_timeout_ns.store(timeval_ns(value, len), std::memory_order_relaxed);
  } else if (name == SO_SNDBUF || name == SO_SNDBUFFORCE || name == kBufLock ||
             name == SO_RCVLOWAT) {
    read_limits(s, fd);
    // Who waits may have enough now (sk_setsockopt(), tcp_set_rcvlowat()).
    if (s.has_channel.load(std::memory_order_acquire)) wake_waiters(s);
  }
  return r;
}

void read_limits(Stream& s, int fd) noexcept {
  constexpr int kSendBufLock = 1;  // SOCK_SNDBUF_LOCK: set by the program, and not grown any more
  const auto locked = os::getsockopt_int(fd, SOL_SOCKET, kBufLock);
  const auto size = os::getsockopt_int(fd, SOL_SOCKET, SO_SNDBUF);
  const bool bounded = locked && (*locked & kSendBufLock) != 0 && size && *size > 0;
  s.send_bound.store(bounded ? static_cast<size_t>(*size) + kPeerHolds : SIZE_MAX,
                     std::memory_order_relaxed);
  const auto limit = os::getsockopt_int(fd, IPPROTO_TCP, TCP_USER_TIMEOUT);
  s.user_timeout_ms.store(limit && *limit > 0 ? static_cast<uint32_t>(*limit) : 0,
                          std::memory_order_relaxed);
  const auto mark = os::getsockopt_int(fd, SOL_SOCKET, SO_RCVLOWAT);
  s.low_water.store(mark && *mark > 1 ? static_cast<uint32_t>(*mark) : 1,
                    std::memory_order_relaxed);
}

void on_set_flags(Stream& s, int flags) noexcept {
  note_nonblocking(s, (flags & O_NONBLOCK) != 0);
  // SIGIO is the kernel's to send.
  if ((flags & O_ASYNC) != 0) pin_to_tcp(s.fd.load(std::memory_order_relaxed), "O_ASYNC", false);
}

bool pin(Stream& s, Reason reason) noexcept RSOCK_NO_TSA {
  const bool lock = !in_the_middle(s);
  if (lock) {
    s.tx.mutex.lock();
    s.rx.mutex.lock();
  }
  pin_locked(s, reason);
  const bool channel = s.channel != nullptr;
  if (lock) {
    s.rx.mutex.unlock();
    s.tx.mutex.unlock();
  }
  return channel && lock;  // in the middle of a call of its own thread nothing can be moved
}

int pin_to_tcp(int fd, const char* reason, bool will_send) noexcept {
  Stream* s = FdTable::stream(fd);
  if (s == nullptr) return 0;
  const uint32_t generation = s->generation.load(std::memory_order_acquire);
  const HandlerWatch since;
  if (FdTable::stream(fd) != s || !pin(*s, reason)) return 0;
  return leave_to_kernel(*s, generation, reason, will_send, since);
}

int leave_to_kernel(Stream& stream, uint32_t generation, Reason reason, bool will_send,
                    const HandlerWatch& since) noexcept {
  Stream* const s = &stream;
  // What the call sends must come behind our replay. That waits for the peer to read, as a send
  // would: with its limits, and not at all without blocking.
  const bool wait = will_send && !s->nonblocking.load(std::memory_order_relaxed);
  const Patience patience{
      Deadline::after_ns(kHandOverNs),
      wait ? Deadline::from_option(s->snd_timeout_ns.load(std::memory_order_relaxed))
           : Deadline::after_ns(0),
      wait ? &since : nullptr};
  (void)set_down_and_wait(*s, reason, patience);
  // Over a queue pair the peer may not even have said where it is (HandOver::kTheirs): whoever may
  // wait for it does.
  MutexLock lock(s->tx.mutex);
  const auto others = [&] {  // closed by another thread: the number is not this stream any more
    return !s->owned_by(generation) || s->closed.load(std::memory_order_relaxed);
  };
  long e = 0;
  // SA_RESTART begins the call again, as the send in the kernel that it stands for.
  while (wait && !others()) {
    e = -EINTR;
    if (since.broken()) break;
    e = wait_until_kernel_sends_locked(*s, patience.ours, HandlerWatch());
    if (e != -EINTR) break;
  }
  if (others() || s->tx.state == TxState::kKernel) return 0;
  return e == -EINTR ? EINTR : EAGAIN;
}

void leave_to_stdio(int fd) noexcept { (void)pin_to_tcp(fd, kAtStdio); }

}  // namespace rsock::stream
