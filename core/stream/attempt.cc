#include "core/stream/attempt.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "core/base/config.h"
#include "core/os/os.h"
#include "core/stream/holders.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/lineage.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

constexpr uid_t kOverflowUid = 65534;  // include/linux/highuid.h, DEFAULT_OVERFLOWUID

/// The beginning of a file of /proc, terminated. 0: can't be read.
size_t read_text(const char* path, char* text, size_t size) noexcept {
  const auto fd = os::make_internal([=] { return os::open(path, O_RDONLY | O_CLOEXEC, 0); });
  if (!fd) return 0;
  const auto n = os::read(fd->get(), text, size - 1);
  text[n ? *n : 0] = '\0';
  return n ? *n : 0;
}

/// Options set before the stream was known, whose effect only the kernel reproduces.
Reason kernel_only_option(int fd) noexcept {
  if (const auto flags = os::fcntl(fd, F_GETFL); flags && (*flags & O_ASYNC) != 0) return "O_ASYNC";
  const auto on = [fd](int level, int name) {
    const auto v = os::getsockopt_int(fd, level, name);
    return v && *v > 0;
  };
  if (const auto v = os::getsockopt_int(fd, SOL_SOCKET, SO_RCVLOWAT); v && *v > kMostLowWater)
    return "SO_RCVLOWAT";
  // The _NEW names are others for the getter (net/core/sock.c, sk_getsockopt).
  for (const int name : {SO_TIMESTAMP_OLD, SO_TIMESTAMPNS_OLD, SO_TIMESTAMPING_OLD,
                         SO_TIMESTAMP_NEW, SO_TIMESTAMPNS_NEW, SO_TIMESTAMPING_NEW}) {
    if (on(SOL_SOCKET, name)) return "SO_TIMESTAMP";
  }
  if (const auto v = os::getsockopt_int(fd, SOL_SOCKET, SO_PEEK_OFF); v && *v >= 0)
    return "SO_PEEK_OFF";
  if (on(SOL_SOCKET, SO_OOBINLINE)) return "SO_OOBINLINE";
  if (on(IPPROTO_TCP, TCP_INQ)) return "TCP_INQ";
  return nullptr;
}

std::optional<wire::FourTuple> tuple_of(int fd) noexcept {
  sockaddr_storage local;
  sockaddr_storage remote;
  socklen_t local_len = sizeof(local);
  socklen_t remote_len = sizeof(remote);
  if (!os::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &local_len) ||
      !os::getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &remote_len)) {
    return std::nullopt;
  }
  return wire::FourTuple::from(reinterpret_cast<sockaddr*>(&local), local_len,
                               reinterpret_cast<sockaddr*>(&remote), remote_len);
}

/// In a user namespace all users that are not mapped look like the overflow uid, each the same as
/// any other: then it proves nothing.
bool may_be_anybody(uid_t uid) noexcept {
  char text[128];
  if (const size_t n = read_text("/proc/sys/kernel/overflowuid", text, sizeof(text)); n != 0) {
    if (uid != strtoul(text, nullptr, 10)) return false;
  } else if (uid != kOverflowUid) {
    return false;
  }
  // Three numbers a line: first inside, first outside, how many. All of them: nobody is unmapped.
  if (read_text("/proc/self/uid_map", text, sizeof(text)) == 0) return true;
  char* rest = text;
  const unsigned long inside = strtoul(rest, &rest, 10);
  (void)strtoul(rest, &rest, 10);
  return inside != 0 || strtoul(rest, &rest, 10) != UINT32_MAX;
}

}  // namespace

// --- what the kernel says of both ends ---

bool peer_may_speak(Attempt& a) noexcept {
  ucred credentials{};
  socklen_t len = sizeof(credentials);
  if (!os::getsockopt(a.connection.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &len))
    return false;
  a.partner = {credentials.pid, credentials.uid};
  return is_peer(credentials.uid, a.peer);
}

bool is_peer(uint32_t uid, const PeerFacts& facts) noexcept {
  return uid == 0 || (uid == facts.uid && !may_be_anybody(uid));
}

/// Null: it is ours alone.
static Reason shared_with_child(Stream& s) noexcept {
  MutexLock lock(s.rx.mutex);
  if (!sole_holder(s)) return "shared with another process";
  return s.lent != 0 ? kLentReason : nullptr;
}

Reason examine(Seeker& a) noexcept {
  Stream& s = *a.stream;
  const int fd = s.fd.load(std::memory_order_relaxed);
  // The number may become another connection's while it is asked about: attach() compares the
  // cookie once more, under the stream's locks.
  a.own_cookie = os::getsockopt_u64(fd, SO_COOKIE).value_or(0);
  if (const Reason r = shared_with_child(s); r != nullptr) {
    look_at_lineages();  // the child may be gone, and the news of it on its way
    if (shared_with_child(s) != nullptr) {
      a.may_pass = a.shared = true;
      return r;
    }
  }
  if (is_at_stdio(s)) {  // sshd, which is left its connection there, moves it at once
    a.may_pass = true;
    return kAtStdio;
  }
  if (const Reason r = kernel_only_option(fd); r != nullptr) return r;
  const auto tuple = tuple_of(fd);
  if (!tuple) return kOverTooSoon;
  if (tuple->is_to_itself()) return "connected to itself";
  a.tuple = *tuple;
  const Config& c = config();
  const auto facts = find_socket(tuple->reverse());
  if (facts) {
    a.peer_here = true;
    a.peer = *facts;
    a.by_rdma = !c.allow_shm;
  } else if (facts.error() == ENOENT) {
    if (!c.allow_rdma) return "the peer is on another host";
    a.by_rdma = true;
  } else {
    a.may_pass = facts.error() == EMFILE || facts.error() == ENFILE || facts.error() == ENOMEM;
    return "sock_diag refused";
  }
  a.name = wire::rendezvous_name(*tuple, os::netns_cookie(fd));
  if (os::getsockopt_u64(fd, SO_COOKIE).value_or(0) != a.own_cookie) return kOverTooSoon;
  return nullptr;
}

// --- its connection ---

Result<os::OwnedFd> unix_socket() noexcept {
  return os::make_internal(
      [] { return os::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
}

Result<void> listen_on(const os::OwnedFd& fd, const wire::SocketName& name, int backlog) noexcept {
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(name, &address);
  const auto bound = os::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), len);
  return bound ? os::listen(fd.get(), backlog) : bound;
}

void watch(Attempt& a, int fd) noexcept {
  (void)keeper_watch(fd, EPOLLIN | EPOLLRDHUP, tagged(&a, KeeperTag::kAttempt));
}

void drop_connection(Attempt& a) noexcept {
  a.connection.reset();
  a.memfd.reset();
  a.segment.reset();
  a.inbox_size = 0;
}

bool send_message(Attempt& a, const uint8_t* bytes, size_t n, int passed_fd) noexcept {
  iovec iov{const_cast<uint8_t*>(bytes), n};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr msg{};
  msg.msg_iov = &iov;
  msg.msg_iovlen = 1;
  if (passed_fd >= 0) {
    msg.msg_control = control;
    msg.msg_controllen = sizeof(control);
    cmsghdr* c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &passed_fd, sizeof(int));
  }
  const auto sent = os::sendmsg(a.connection.get(), &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent && *sent == n;
}

int read_message(Attempt& a, size_t want, os::OwnedFd* passed) noexcept {
  while (a.inbox_size < want) {
    iovec iov{a.inbox + a.inbox_size, want - a.inbox_size};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)];
    msghdr msg{};
    msg.msg_iov = &iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control;
    msg.msg_controllen = sizeof(control);
    const os::MakingInternal guard;  // a descriptor may come with it
    const auto got = os::recvmsg(a.connection.get(), &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (!got) return got.error() == EAGAIN ? 0 : -1;
    if (*got == 0) return -1;
    for (cmsghdr* c = CMSG_FIRSTHDR(&msg); c != nullptr; c = CMSG_NXTHDR(&msg, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
        auto owned = os::raise(fd);
        if (owned && passed != nullptr && !*passed) *passed = std::move(*owned);  // else: closed
      }
    }
    a.inbox_size += *got;
  }
  return 1;
}

}  // namespace rsock::stream
