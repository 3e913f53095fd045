// read to recvfrom and write to sendto: one buffer, or several, and nothing beside them.

#include <climits>

#include "core/base/try_copy.h"
#include "preload/entry.h"
#include "preload/iovecs.h"

using namespace rsock;
using namespace rsock::preload;

namespace rsock::preload {
namespace {

/// MSG_FASTOPEN on a socket that is not connected yet: a connect and a send in one, by the kernel.
ssize_t send_and_connect(int fd, const void* buf, size_t n, int flags, const sockaddr* addr,
                         socklen_t len) {
  const long result = outcome(real.sendto(fd, buf, n, flags, addr, len));
  if (FdTable::kind(fd) == FdKind::kTcpSocket && tracking()) {
    stream::on_connect(fd, result);
  }
  return answer(result);
}

/// A TCP socket has no address to tell: Linux says so by a length of 0 (move_addr_to_user() in
/// net/socket.c). The bytes are gone also where it can't.
long no_address(const sockaddr* addr, socklen_t* len) noexcept {
  if (addr == nullptr) return 0;
  socklen_t given = 0;
  if (!try_get(&given, len)) return -EFAULT;
  if (static_cast<int>(given) < 0) return -EINVAL;
  return try_put(len, socklen_t{0}) ? 0 : -EFAULT;
}

}  // namespace
}  // namespace rsock::preload

// --- sending ---------------------------------------------------------------------------------

RSOCK_EXPORT ssize_t write(int fd, const void* buf, size_t n) {
  const uintptr_t w = FdTable::word(fd);
  if (w != 0) [[unlikely]] {
    return send_at_point(w, buf, n, 0, [=] {
      return send_buffer(FdTable::stream(fd), fd, buf, n, 0,
                         in_kernel([=] { return real.write(fd, buf, n); }));
    });
  }
  return real.write(fd, buf, n);
}

RSOCK_EXPORT ssize_t writev(int fd, const iovec* iov, int count) {
  const uintptr_t w = FdTable::word(fd);
  if (w != 0) [[unlikely]] {
    return at_point([=] {
      auto kernel = in_kernel([=] { return real.writev(fd, iov, count); });
      return send_buffers(stream_in(w), fd, iov, count, 0, kernel);
    });
  }
  return real.writev(fd, iov, count);
}

RSOCK_EXPORT ssize_t send(int fd, const void* buf, size_t n, int flags) {
  const uintptr_t w = FdTable::word(fd);
  if (w != 0) [[unlikely]] {
    return send_at_point(w, buf, n, flags, [=] {
      auto kernel = in_kernel([=] { return real.send(fd, buf, n, flags); });
      return send_buffer(FdTable::stream(fd), fd, buf, n, flags, kernel);
    });
  }
  return real.send(fd, buf, n, flags);
}

RSOCK_EXPORT ssize_t sendto(int fd, const void* buf, size_t n, int flags, const sockaddr* addr,
                            socklen_t len) {
  const uintptr_t w = FdTable::word(fd);
  if (w != 0) [[unlikely]] {
    if ((flags & MSG_FASTOPEN) != 0) return send_and_connect(fd, buf, n, flags, addr, len);
    return send_at_point(w, buf, n, flags, [=]() -> ssize_t {
      auto kernel = in_kernel([=] { return real.sendto(fd, buf, n, flags, addr, len); });
      // Linux does not look at the address on a connected TCP socket, nor do we.
      return send_buffer(FdTable::stream(fd), fd, buf, n, flags, kernel);
    });
  }
  return real.sendto(fd, buf, n, flags, addr, len);
}

RSOCK_EXPORT ssize_t pwritev2(int fd, const iovec* iov, int count, off_t offset, int flags) {
  const uintptr_t w = FdTable::word(fd);
  if (w != 0) [[unlikely]] {
    return at_point([=]() -> ssize_t {
      auto kernel = in_kernel([=] { return real.pwritev2(fd, iov, count, offset, flags); });
      if (!plain_transfer(stream_in(w), fd, offset, flags)) return answer(kernel());
      return send_buffers(stream_in(w), fd, iov, count, message_flags(flags), kernel);
    });
  }
  return real.pwritev2(fd, iov, count, offset, flags);
}

// --- receiving -------------------------------------------------------------------------------

// A read of nothing is over before it reaches the socket (sock_read_iter() in net/socket.c), while
// a recv of nothing waits for bytes like any other.

RSOCK_EXPORT ssize_t read(int fd, void* buf, size_t n) {
  const uintptr_t w = FdTable::word(fd);
  if (w != 0 && n != 0) [[unlikely]] {
    return recv_at_point(w, buf, n, 0, [=] {
      return recv_buffer(FdTable::stream(fd), fd, buf, n, 0,
                         in_kernel([=] { return real.read(fd, buf, n); }));
    });
  }
  return real.read(fd, buf, n);
}

RSOCK_EXPORT ssize_t readv(int fd, const iovec* iov, int count) {
  const uintptr_t w = FdTable::word(fd);
  if (w != 0) [[unlikely]] {
    return at_point([=]() -> ssize_t {
      auto kernel = in_kernel([=] { return real.readv(fd, iov, count); });
      return read_buffers(stream_in(w), fd, iov, count, 0, kernel);
    });
  }
  return real.readv(fd, iov, count);
}

RSOCK_EXPORT ssize_t recv(int fd, void* buf, size_t n, int flags) {
  const uintptr_t w = FdTable::word(fd);
  if (w != 0) [[unlikely]] {
    return recv_at_point(w, buf, n, flags, [=] {
      auto kernel = in_kernel([=] { return real.recv(fd, buf, n, flags); });
      return recv_buffer(FdTable::stream(fd), fd, buf, n, flags, kernel);
    });
  }
  return real.recv(fd, buf, n, flags);
}

RSOCK_EXPORT ssize_t recvfrom(int fd, void* buf, size_t n, int flags, sockaddr* addr,
                              socklen_t* len) {
  const uintptr_t w = FdTable::word(fd);
  if (w != 0 && addr == nullptr) [[unlikely]] {
    return recv_at_point(w, buf, n, flags, [=] {
      auto kernel = in_kernel([=] { return real.recvfrom(fd, buf, n, flags, nullptr, len); });
      return recv_buffer(FdTable::stream(fd), fd, buf, n, flags, kernel);
    });
  }
  if (w != 0) [[unlikely]] {
    return at_point([=] {
      bool done = false;  // by the kernel
      auto kernel = in_kernel([=] { return real.recvfrom(fd, buf, n, flags, addr, len); }, done);
      const ssize_t result = recv_buffer(stream_in(w), fd, buf, n, flags, kernel);
      const long told = result >= 0 && !done ? no_address(addr, len) : 0;
      return told == 0 ? result : answer(told);
    });
  }
  return real.recvfrom(fd, buf, n, flags, addr, len);
}

RSOCK_EXPORT ssize_t preadv2(int fd, const iovec* iov, int count, off_t offset, int flags) {
  const uintptr_t w = FdTable::word(fd);
  if (w != 0) [[unlikely]] {
    return at_point([=]() -> ssize_t {
      auto kernel = in_kernel([=] { return real.preadv2(fd, iov, count, offset, flags); });
      if (!plain_transfer(stream_in(w), fd, offset, flags)) return answer(kernel());
      return read_buffers(stream_in(w), fd, iov, count, message_flags(flags), kernel);
    });
  }
  return real.preadv2(fd, iov, count, offset, flags);
}

// --- FORTIFY: libc's own function ends the program where the buffer is too small -------------

RSOCK_EXPORT ssize_t __read_chk(int fd, void* buf, size_t n, size_t size) {
  return n > size ? real.__read_chk(fd, buf, n, size) : ::read(fd, buf, n);
}

RSOCK_EXPORT ssize_t __recv_chk(int fd, void* buf, size_t n, size_t size, int flags) {
  return n > size ? real.__recv_chk(fd, buf, n, size, flags) : ::recv(fd, buf, n, flags);
}

RSOCK_EXPORT ssize_t __recvfrom_chk(int fd, void* buf, size_t n, size_t size, int flags,
                                    sockaddr* addr, socklen_t* len) {
  return n > size ? real.__recvfrom_chk(fd, buf, n, size, flags, addr, len)
                  : ::recvfrom(fd, buf, n, flags, addr, len);
}

RSOCK_SAME_BODY(__read, read);
RSOCK_SAME_BODY(__write, write);
RSOCK_SAME_BODY(__send, send);
RSOCK_SAME_BODY(preadv64v2, preadv2);
RSOCK_SAME_BODY(pwritev64v2, pwritev2);
