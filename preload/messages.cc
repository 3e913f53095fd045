// sendmsg to recvmmsg: buffers with a header beside them.

#include <time.h>

#include <algorithm>

#include "core/base/clock.h"
#include "core/base/try_copy.h"
#include "core/poll/readiness_ops.h"
#include "preload/entry.h"
#include "preload/iovecs.h"

namespace rsock::preload {
namespace {

/// One message to a stream, in the library's convention.
long send_message(Stream& s, int fd, const msghdr* msg, int flags) {
  auto kernel = in_kernel([&] { return real.sendmsg(fd, msg, flags); });
  if (const auto r = stream::send_by_kernel(s, flags, kernel)) return *r;
  if (!readable(msg, sizeof(*msg))) return kernel();  // EFAULT
  // SOL_SOCKET control data asks for things that only the kernel does (time stamps, priorities). It
  // gets the call once what we still have to send is out; a send waits for that, or says EAGAIN.
  if (msg->msg_controllen != 0) (void)stream::pin_to_tcp(fd, "sendmsg with control data");
  return send_pieces(&s, fd, msg->msg_iov, msg->msg_iovlen, flags, kernel);
}

/// One message to a TCP socket that is not connected: MSG_FASTOPEN connects it.
long send_unconnected(int fd, const msghdr* msg, int flags) {
  const long result = outcome(real.sendmsg(fd, msg, flags));
  if ((flags & MSG_FASTOPEN) != 0 && FdTable::kind(fd) == FdKind::kTcpSocket && tracking()) {
    stream::on_connect(fd, result);
  }
  return result;
}

/// What the kernel writes back for a TCP socket (net/socket.c, ____sys_recvmsg): no address, no
/// control data, and of the flags only the one that it echoes.
bool fill_header(msghdr* msg, int flags) noexcept {
  if (msg->msg_name != nullptr && !try_put(&msg->msg_namelen, socklen_t{0})) return false;
  return try_put(&msg->msg_controllen, size_t{0}) &&
         try_put(&msg->msg_flags, flags & MSG_CMSG_CLOEXEC);
}

long recv_message(Stream& s, int fd, msghdr* msg, int flags) {
  bool by_kernel = false;
  auto kernel = in_kernel([&] { return real.recvmsg(fd, msg, flags); }, by_kernel);
  if ((flags & MSG_ERRQUEUE) != 0) return stream::recv_error_queue(s, fd, msg, flags, kernel);
  if (const auto r = stream::recv_by_kernel(s, flags, kernel)) return *r;
  if (!readable(msg, sizeof(*msg))) return kernel();  // EFAULT
  const long result = recv_pieces(&s, fd, msg->msg_iov, msg->msg_iovlen, flags, kernel);
  // The bytes are gone then, as on Linux.
  if (result >= 0 && !by_kernel && !fill_header(msg, flags)) return -EFAULT;
  return result;
}

size_t total(const msghdr& msg) noexcept {
  size_t n = 0;
  for (size_t i = 0; i < msg.msg_iovlen; ++i) n += msg.msg_iov[i].iov_len;
  return n;
}

/// The time limit of recvmmsg: looked at after each message, never while waiting for one
/// (recvmmsg(2), BUGS). What is left is written back.
class TimeLimit {
 public:
  explicit TimeLimit(timespec* limit) noexcept : limit_(limit) {
    if (limit != nullptr) started_ = monotonic_ns();
  }
  bool valid() const noexcept {
    return limit_ == nullptr ||
           (limit_->tv_sec >= 0 && limit_->tv_nsec >= 0 && limit_->tv_nsec < 1'000'000'000);
  }
  bool over() noexcept {
    if (limit_ == nullptr || !writable(limit_, sizeof(*limit_))) return false;
    const uint64_t now = monotonic_ns();
    const uint64_t passed = now - started_;
    started_ = now;
    const auto seconds = static_cast<time_t>(passed / 1'000'000'000u);
    limit_->tv_sec -= seconds;
    limit_->tv_nsec -= static_cast<long>(passed % 1'000'000'000u);
    if (limit_->tv_nsec < 0) {
      limit_->tv_nsec += 1'000'000'000;
      --limit_->tv_sec;
    }
    if (limit_->tv_sec < 0) *limit_ = {0, 0};
    return limit_->tv_sec == 0 && limit_->tv_nsec == 0;
  }

 private:
  timespec* limit_;
  uint64_t started_ = 0;
};

/// net/socket.c, __sys_sendmmsg: stops at the first error or the first message that went only in
/// part; an error counts only if nothing went before it.
long send_messages(int fd, mmsghdr* messages, unsigned count, int flags) {
  if (count > kMaxPieces) count = kMaxPieces;
  const Stream* const first = FdTable::stream(fd);
  for (unsigned i = 0; i < count; ++i) {
    const msghdr* msg = &messages[i].msg_hdr;
    if (!readable(msg, sizeof(*msg))) return i > 0 ? static_cast<long>(i) : -EFAULT;
    Stream* s = FdTable::stream(fd);
    // Closed meanwhile: the number may be another file's.
    if (first != nullptr && s != first && i > 0) return i;
    const long r =
        s != nullptr ? send_message(*s, fd, msg, flags) : send_unconnected(fd, msg, flags);
    if (r < 0) return i > 0 ? i : r;
    if (!try_put(&messages[i].msg_len, static_cast<unsigned>(r)))
      return i > 0 ? static_cast<long>(i) : -EFAULT;
    if (static_cast<size_t>(r) < total(*msg)) return i + 1;
  }
  return count;
}

/// net/socket.c, do_recvmmsg.
long recv_messages(Stream& s, int fd, mmsghdr* messages, unsigned count, int flags,
                   timespec* timeout) {
  if (timeout != nullptr && !readable(timeout, sizeof(*timeout))) return -EFAULT;
  TimeLimit limit(timeout);
  if (!limit.valid()) return -EINVAL;
  int each = flags & ~MSG_WAITFORONE;
  for (unsigned i = 0; i < count; ++i) {
    if (i > 0 && FdTable::stream(fd) != &s) return i;  // closed meanwhile
    const long r = recv_message(s, fd, &messages[i].msg_hdr, each);
    if (r < 0) return i > 0 ? i : r;
    if (!try_put(&messages[i].msg_len, static_cast<unsigned>(r)))
      return i > 0 ? static_cast<long>(i) : -EFAULT;
    if ((flags & MSG_WAITFORONE) != 0) each |= MSG_DONTWAIT;
    if (limit.over() || (messages[i].msg_hdr.msg_flags & MSG_OOB) != 0) return i + 1;
  }
  return count;
}

/// Whether descriptors may be passed on in this message. Looks at the program's memory only where
/// there are streams to lose: a bad pointer is for the kernel to find.
bool may_pass_streams(const msghdr* msg) noexcept {
  return poll::may_matter() && readable(msg, sizeof(*msg)) && msg->msg_controllen != 0 &&
         readable(msg->msg_control, msg->msg_controllen);
}

/// One message that may pass streams on. In libc's convention.
ssize_t pass(int fd, const msghdr* msg, int flags) {
  const uint32_t key = stream::before_passing(msg);
  const ssize_t result = real.sendmsg(fd, msg, flags);
  const int saved_errno = errno;
  stream::after_passing(msg, key, result >= 0);
  errno = saved_errno;
  return result;
}

/// sendmmsg, one by one.
int pass_messages(int fd, mmsghdr* messages, unsigned count, int flags) {
  for (unsigned i = 0; i < count; ++i) {
    msghdr* const msg = &messages[i].msg_hdr;
    const ssize_t n = may_pass_streams(msg) ? pass(fd, msg, flags) : real.sendmsg(fd, msg, flags);
    if (n < 0) return i > 0 ? static_cast<int>(i) : -1;
    if (!try_put(&messages[i].msg_len, static_cast<unsigned>(n))) {
      return i > 0 ? static_cast<int>(i) : static_cast<int>(answer(-EFAULT));
    }
  }
  return static_cast<int>(count);
}

/// The kernel has filled in the header. Descriptors in it may be streams that were passed to us.
void note_received(const msghdr& msg, int flags) noexcept {
  if (msg.msg_controllen < CMSG_LEN(sizeof(int)) || msg.msg_control == nullptr) return;
  if (!tracking()) return;
  const int saved_errno = errno;
  stream::on_descriptors_received(&msg, (flags & MSG_PEEK) != 0);
  errno = saved_errno;
}

}  // namespace
}  // namespace rsock::preload

using namespace rsock;
using namespace rsock::preload;

RSOCK_EXPORT ssize_t sendmsg(int fd, const msghdr* msg, int flags) {
  Stream* s = FdTable::stream(fd);
  if (s != nullptr) return at_point([=] { return answer(send_message(*s, fd, msg, flags)); });
  if (FdTable::word(fd) != 0) return answer(send_unconnected(fd, msg, flags));
  // A stream among the descriptors passed on leaves our sight.
  if (may_pass_streams(msg)) [[unlikely]]
    return pass(fd, msg, flags);
  return real.sendmsg(fd, msg, flags);
}

RSOCK_EXPORT int sendmmsg(int fd, mmsghdr* messages, unsigned count, int flags) {
  if (FdTable::word(fd) != 0 && messages != nullptr) {
    return at_point(
        [=] { return static_cast<int>(answer(send_messages(fd, messages, count, flags))); });
  }
  if (poll::may_matter() && messages != nullptr) [[unlikely]] {
    // One of several that pass streams on, or fail: each has to be known by itself.
    for (unsigned i = 0; i < count && i < kMaxPieces; ++i) {
      if (may_pass_streams(&messages[i].msg_hdr)) {
        return pass_messages(fd, messages, std::min<unsigned>(count, kMaxPieces), flags);
      }
    }
  }
  return real.sendmmsg(fd, messages, count, flags);
}

RSOCK_EXPORT ssize_t recvmsg(int fd, msghdr* msg, int flags) {
  Stream* s = FdTable::stream(fd);
  if (s == nullptr) {
    const ssize_t result = real.recvmsg(fd, msg, flags);
    if (result >= 0) note_received(*msg, flags);
    return result;
  }
  return at_point([=] { return answer(recv_message(*s, fd, msg, flags)); });
}

RSOCK_EXPORT int recvmmsg(int fd, mmsghdr* messages, unsigned count, int flags, timespec* timeout) {
  Stream* s = FdTable::stream(fd);
  if (s == nullptr || messages == nullptr) {
    const int result = real.recvmmsg(fd, messages, count, flags, timeout);
    for (int i = 0; i < result; ++i) note_received(messages[i].msg_hdr, flags);
    return result;
  }
  return at_point([=] {
    return static_cast<int>(answer(recv_messages(*s, fd, messages, count, flags, timeout)));
  });
}
