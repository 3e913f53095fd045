// socket to getpeername: the kernel does the work (D1), we take note.

#include "core/base/config.h"
#include "core/base/try_copy.h"
#include "preload/entry.h"

namespace rsock::preload {
namespace {

/// So that a program that only asks the name service or the system log never starts us.
bool may_be_tcp(int domain, int type) noexcept {
  return (domain == AF_INET || domain == AF_INET6) && (type & 0xf) == SOCK_STREAM;
}

bool is_disconnect(const sockaddr* addr, socklen_t len) noexcept {
  sa_family_t family = AF_INET;
  return len >= sizeof(family) && try_get(&family, &addr->sa_family) && family == AF_UNSPEC;
}

}  // namespace
}  // namespace rsock::preload

using namespace rsock;
using namespace rsock::preload;

RSOCK_EXPORT int socket(int domain, int type, int protocol) noexcept {
  const int fd = real.socket(domain, type, protocol);
  if (fd >= 0 && may_be_tcp(domain, type) && tracking()) {
    stream::on_socket(fd, domain, type, protocol);
  }
  return fd;
}

RSOCK_EXPORT int socketpair(int domain, int type, int protocol, int fds[2]) noexcept {
  return real.socketpair(domain, type, protocol, fds);
}

RSOCK_EXPORT int bind(int fd, const sockaddr* addr, socklen_t len) noexcept {
  return real.bind(fd, addr, len);
}

RSOCK_EXPORT int listen(int fd, int backlog) noexcept { return real.listen(fd, backlog); }

RSOCK_EXPORT int connect(int fd, const sockaddr* addr, socklen_t len) {
  const uintptr_t w = FdTable::word(fd);
  if (w == 0) return real.connect(fd, addr, len);
  // AF_UNSPEC dissolves the connection: what was agreed about it ends with it.
  if (FdTable::stream(fd) != nullptr && is_disconnect(addr, len)) {
    stream::pin_to_tcp(fd, "connect to AF_UNSPEC");
  }
  return at_point([=] {
    const long result = outcome(real.connect(fd, addr, len));
    if (tracking()) stream::on_connect(fd, result);
    leave_to_stdio(fd);
    return static_cast<int>(answer(result));
  });
}

RSOCK_EXPORT int accept(int listener, sockaddr* addr, socklen_t* len) {
  return at_point([=] {
    const int fd = real.accept(listener, addr, len);
    if (fd >= 0 && tracking()) stream::on_accept(listener, fd, 0);
    leave_to_stdio(fd);
    return fd;
  });
}

RSOCK_EXPORT int accept4(int listener, sockaddr* addr, socklen_t* len, int flags) {
  return at_point([=] {
    const int fd = real.accept4(listener, addr, len, flags);
    if (fd >= 0 && tracking()) stream::on_accept(listener, fd, flags);
    leave_to_stdio(fd);
    return fd;
  });
}

RSOCK_EXPORT int shutdown(int fd, int how) noexcept {
  Stream* s = FdTable::stream(fd);
  if (s == nullptr) return real.shutdown(fd, how);
  return aside([=] {
    auto kernel = in_kernel([=] { return real.shutdown(fd, how); });
    return static_cast<int>(answer(stream::shutdown(*s, fd, how, kernel)));
  });
}

RSOCK_EXPORT int getsockopt(int fd, int level, int name, void* value, socklen_t* len) noexcept {
  Stream* s = FdTable::stream(fd);
  if (s == nullptr) return real.getsockopt(fd, level, name, value, len);
  return aside([=] {
    auto kernel = in_kernel([=] { return real.getsockopt(fd, level, name, value, len); });
    return static_cast<int>(answer(stream::getsockopt(*s, fd, level, name, value, len, kernel)));
  });
}

RSOCK_EXPORT int setsockopt(int fd, int level, int name, const void* value,
                            socklen_t len) noexcept {
  Stream* s = FdTable::stream(fd);
  if (s == nullptr) return real.setsockopt(fd, level, name, value, len);
  return aside([=] {
    auto kernel = in_kernel([=] { return real.setsockopt(fd, level, name, value, len); });
    return static_cast<int>(answer(stream::setsockopt(*s, fd, level, name, value, len, kernel)));
  });
}

RSOCK_EXPORT int getsockname(int fd, sockaddr* addr, socklen_t* len) noexcept {
  return real.getsockname(fd, addr, len);
}

RSOCK_EXPORT int getpeername(int fd, sockaddr* addr, socklen_t* len) noexcept {
  return real.getpeername(fd, addr, len);
}

RSOCK_SAME_BODY(__connect, connect);
