// MSG_ZEROCOPY: while a channel carries the stream each send is complete at once, copied, which is
// an answer that the kernel gives, too (SO_EE_CODE_ZEROCOPY_COPIED; over loopback always).

#include "core/stream/zero_copy.h"

#include <ctime>
// linux/errqueue.h needs it.
#include <linux/errqueue.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>

#include "core/os/os.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {

void ZeroCopies::taken_by_kernel() noexcept {
  const uint32_t plus = next_ - kernel_next_;
  if (plus != (spans_used_ != 0 ? spans_[spans_used_ - 1].plus : 0)) {
    if (spans_used_ == spans_.size()) {
      std::move(spans_.begin() + 1, spans_.end(), spans_.begin());
      --spans_used_;
    }
    spans_[spans_used_++] = {kernel_next_, plus};
  }
  ++next_;
  ++kernel_next_;
}

void ZeroCopies::copied() noexcept {
  add_waiting({next_, next_, true});
  ++next_;
}

/// Ranges that touch become one, as in the kernel's queue (skb_zerocopy_notify_extend()); so does
/// everything once there is no more place.
void ZeroCopies::add_waiting(Range range) noexcept {
  if (waiting_used_ != 0) {
    Range& last = waiting_[waiting_used_ - 1];
    if (waiting_used_ == waiting_.size() ||
        (last.last + 1 == range.first && last.copied == range.copied)) {
      last.last = range.last;
      return;
    }
  }
  waiting_[waiting_used_++] = range;
  pending_.store(true, std::memory_order_release);  // pairs with pending()
}

ZeroCopies::Range ZeroCopies::take() noexcept {
  const Range range = waiting_[0];
  std::move(waiting_.begin() + 1, waiting_.end(), waiting_.begin());
  if (--waiting_used_ == 0) pending_.store(false, std::memory_order_relaxed);
  return range;
}

uint32_t ZeroCopies::plus_at(uint32_t kernels, uint32_t* until) const noexcept {
  uint32_t plus = 0;
  *until = UINT32_MAX;
  for (size_t i = 0; i < spans_used_; ++i) {
    if (static_cast<int32_t>(spans_[i].from - kernels) > 0) {
      *until = spans_[i].from - 1;
      break;
    }
    plus = spans_[i].plus;
  }
  return plus;
}

ZeroCopies::Range ZeroCopies::translate(Range range) noexcept {
  Range told{0, 0, range.copied};
  for (bool first = true;; first = false) {
    uint32_t until = 0;
    const uint32_t plus = plus_at(range.first, &until);
    const uint32_t last = range.last - range.first > until - range.first ? until : range.last;
    const Range part{range.first + plus, last + plus, range.copied};
    if (first) {
      told = part;
    } else {
      add_waiting(part);
    }
    if (last == range.last) return told;
    range.first = last + 1;
  }
}

namespace {

bool enabled(int fd) noexcept {
  const auto on = os::getsockopt_int(fd, SOL_SOCKET, SO_ZEROCOPY);
  return on && *on != 0;
}

/// put_cmsg() in net/core/scm.c.
void put_control(msghdr* msg, int level, int type, const void* data, size_t size) noexcept {
  size_t length = CMSG_LEN(size);
  if (msg->msg_control == nullptr || msg->msg_controllen < sizeof(cmsghdr)) {
    msg->msg_flags |= MSG_CTRUNC;
    msg->msg_controllen = 0;
    return;
  }
  if (msg->msg_controllen < length) {
    msg->msg_flags |= MSG_CTRUNC;
    length = msg->msg_controllen;
  }
  cmsghdr header{};
  header.cmsg_level = level;
  header.cmsg_type = type;
  header.cmsg_len = length;
  auto* to = static_cast<char*>(msg->msg_control);
  std::memcpy(to, &header, sizeof(header));
  std::memcpy(to + CMSG_LEN(0), data, length - CMSG_LEN(0));
  msg->msg_controllen = std::min<size_t>(msg->msg_controllen, CMSG_SPACE(size));
}

/// What ip_recv_error() and ipv6_recv_error() write: the structure, and an offender that is nobody.
void describe(int fd, ZeroCopies::Range range, msghdr* msg) noexcept {
  struct {
    sock_extended_err error;
    sockaddr_in6 offender;  // the larger of the two
  } report{};
  report.error.ee_origin = SO_EE_ORIGIN_ZEROCOPY;
  report.error.ee_code = range.copied ? SO_EE_CODE_ZEROCOPY_COPIED : 0;
  report.error.ee_info = range.first;
  report.error.ee_data = range.last;
  const auto domain = os::getsockopt_int(fd, SOL_SOCKET, SO_DOMAIN);
  const bool v6 = domain && *domain == AF_INET6;
  msg->msg_namelen = 0;
  msg->msg_flags |= MSG_ERRQUEUE;
  put_control(msg, v6 ? SOL_IPV6 : SOL_IP, v6 ? IPV6_RECVERR : IP_RECVERR, &report,
              sizeof(report.error) + (v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in)));
}

/// The kernel has filled in a message of its queue.
void translate_message(Stream& s, msghdr* msg) noexcept {
  for (cmsghdr* c = CMSG_FIRSTHDR(msg); c != nullptr; c = CMSG_NXTHDR(msg, c)) {
    sock_extended_err error;
    const bool ours = (c->cmsg_level == SOL_IP && c->cmsg_type == IP_RECVERR) ||
                      (c->cmsg_level == SOL_IPV6 && c->cmsg_type == IPV6_RECVERR);
    if (!ours || c->cmsg_len < CMSG_LEN(sizeof(error))) continue;
    std::memcpy(&error, CMSG_DATA(c), sizeof(error));
    if (error.ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
    MutexLock lock(s.watch_mutex);
    const ZeroCopies::Range told = s.zero_copies.translate(
        {error.ee_info, error.ee_data, error.ee_code == SO_EE_CODE_ZEROCOPY_COPIED});
    error.ee_info = told.first;
    error.ee_data = told.last;
    std::memcpy(CMSG_DATA(c), &error, sizeof(error));
  }
}

}  // namespace

long send_zero_copy(Stream& s, int fd, const iovec* iov, size_t n, int flags, KernelCall kernel) {
  const int plain = flags & ~MSG_ZEROCOPY;
  bool by_kernel = false;
  const long sent = send(s, fd, iov, n, plain, [&]() -> long {
    by_kernel = true;
    return kernel();
  });
  if (sent <= 0 || !enabled(fd)) return sent;
  {
    MutexLock lock(s.watch_mutex);
    if (by_kernel) {
      s.zero_copies.taken_by_kernel();
    } else {
      s.zero_copies.copied();
    }
  }
  if (!by_kernel) wake_waiters(s);  // sk_error_report()
  return sent;
}

long recv_error_queue(Stream& s, int fd, msghdr* msg, int flags, KernelCall kernel) {
  const long r = kernel();
  if (r >= 0 && msg != nullptr) translate_message(s, msg);
  if (r != -EAGAIN || !s.zero_copies.pending()) return r;
  ZeroCopies::Range range;
  {
    MutexLock lock(s.watch_mutex);
    if (!s.zero_copies.pending()) return r;
    range = s.zero_copies.take();
  }
  if (msg != nullptr) {
    msg->msg_flags = flags & MSG_CMSG_CLOEXEC;
    describe(fd, range, msg);
  }
  if (!s.zero_copies.pending()) maybe_detach(s);  // which has waited for that
  return 0;
}

}  // namespace rsock::stream
