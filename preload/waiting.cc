// poll, select and epoll: to the kernel at once while nothing of ours can be in the set.

#include <time.h>

#include "core/base/try_copy.h"
#include "core/poll/readiness_ops.h"
#include "preload/entry.h"

namespace rsock::preload {
namespace {

/// A limit in milliseconds as a timespec; null where it is for ever.
class Milliseconds {
 public:
  explicit Milliseconds(int ms) noexcept
      : forever_(ms < 0), limit_{ms / 1000, (ms % 1000) * 1'000'000L} {}
  const timespec* get() const noexcept { return forever_ ? nullptr : &limit_; }

 private:
  bool forever_;
  timespec limit_;
};

// What is not acceptable, or can't be read, is for the kernel to refuse.
bool acceptable(const timeval* limit) noexcept {
  timeval t{};
  return limit == nullptr || (try_get(&t, limit) && t.tv_sec >= 0 && t.tv_usec >= 0);
}
bool acceptable(const timespec* limit) noexcept {
  timespec t{};
  return limit == nullptr ||
         (try_get(&t, limit) && t.tv_sec >= 0 && t.tv_nsec >= 0 && t.tv_nsec < 1'000'000'000);
}
constexpr size_t kSigsetBytes = 8;  // the kernel's
bool acceptable(const sigset_t* mask) noexcept {
  return mask == nullptr || readable(mask, kSigsetBytes);
}

/// select takes more than a million microseconds for seconds (fs/select.c, kern_select).
timespec to_timespec(const timeval& t) noexcept {
  return {t.tv_sec + t.tv_usec / 1'000'000, (t.tv_usec % 1'000'000) * 1000L};
}

/// What select looks at: see poll::select_width(). Before the first socket we have no descriptors.
int width(int n) noexcept { return n > FD_SETSIZE && started() ? poll::select_width(n) : n; }

bool is_epoll(int epfd) noexcept { return FdTable::kind(epfd) == FdKind::kEpoll; }

/// epoll_wait in all its forms: to the library where it knows the instance, also when no stream
/// exists any more: an event of ours may still lie in the kernel's set.
bool for_us(int epfd) noexcept { return is_epoll(epfd); }

int note_epoll(int epfd) noexcept {
  if (epfd >= 0 && tracking()) poll::on_epoll_create(epfd);
  return epfd;
}

}  // namespace
}  // namespace rsock::preload

using namespace rsock;
using namespace rsock::preload;

RSOCK_EXPORT int poll(pollfd* fds, nfds_t n, int timeout) {
  if (!poll::may_matter()) return real.poll(fds, n, timeout);
  return at_point([=] {
    const Milliseconds limit(timeout);
    auto kernel = in_kernel([=] { return real.poll(fds, n, timeout); });
    return static_cast<int>(answer(poll::poll(fds, n, limit.get(), nullptr, kernel)));
  });
}

RSOCK_EXPORT int ppoll(pollfd* fds, nfds_t n, const timespec* timeout, const sigset_t* mask) {
  if (!poll::may_matter() || !acceptable(timeout) || !acceptable(mask)) {
    return real.ppoll(fds, n, timeout, mask);
  }
  return at_point([=] {
    auto kernel = in_kernel([=] { return real.ppoll(fds, n, timeout, mask); });
    return static_cast<int>(answer(poll::poll(fds, n, timeout, mask, kernel)));
  });
}

RSOCK_EXPORT int select(int n, fd_set* read, fd_set* write, fd_set* except, timeval* timeout) {
  n = width(n);
  if (!poll::may_matter() || !acceptable(timeout)) {
    return real.select(n, read, write, except, timeout);
  }
  return at_point([=] {
    const bool limited = timeout != nullptr;
    const timespec limit = limited ? to_timespec(*timeout) : timespec{};
    timespec left = limit;
    bool done = false;  // by the kernel
    auto kernel = in_kernel([=] { return real.select(n, read, write, except, timeout); }, done);
    const long result = poll::select(n, read, write, except, limited ? &limit : nullptr,
                                     limited ? &left : nullptr, nullptr, kernel);
    // Linux tells what is left of the limit; where the kernel did the waiting it has done so.
    // Where it can't, it says nothing (poll_select_finish() in fs/select.c).
    if (limited && !done) (void)try_put(timeout, timeval{left.tv_sec, left.tv_nsec / 1000});
    return static_cast<int>(answer(result));
  });
}

RSOCK_EXPORT int pselect(int n, fd_set* read, fd_set* write, fd_set* except,
                         const timespec* timeout, const sigset_t* mask) {
  n = width(n);
  if (!poll::may_matter() || !acceptable(timeout) || !acceptable(mask)) {
    return real.pselect(n, read, write, except, timeout, mask);
  }
  return at_point([=] {
    auto kernel = in_kernel([=] { return real.pselect(n, read, write, except, timeout, mask); });
    // glibc's pselect leaves the limit as it is.
    return static_cast<int>(
        answer(poll::select(n, read, write, except, timeout, nullptr, mask, kernel)));
  });
}

RSOCK_EXPORT int epoll_create(int size) noexcept { return note_epoll(real.epoll_create(size)); }

RSOCK_EXPORT int epoll_create1(int flags) noexcept { return note_epoll(real.epoll_create1(flags)); }

RSOCK_EXPORT int epoll_ctl(int epfd, int op, int fd, epoll_event* event) noexcept {
  // A socket that is not connected yet is noted, whatever the instance.
  if (!is_epoll(epfd) && FdTable::kind(fd) != FdKind::kTcpSocket) {
    // An instance that came by exec or from outside: what it watches has to show in the kernel.
    if (FdTable::word(fd) != 0)
      stream::pin_to_tcp(fd, "watched by an epoll instance from elsewhere");
    return real.epoll_ctl(epfd, op, fd, event);
  }
  return aside([=] {
    auto kernel = in_kernel([=] { return real.epoll_ctl(epfd, op, fd, event); });
    return static_cast<int>(answer(poll::epoll_ctl(epfd, op, fd, event, kernel)));
  });
}

RSOCK_EXPORT int epoll_wait(int epfd, epoll_event* events, int most, int timeout) {
  if (!for_us(epfd)) return real.epoll_wait(epfd, events, most, timeout);
  return at_point([=] {
    const Milliseconds limit(timeout);
    auto kernel = in_kernel([=] { return real.epoll_wait(epfd, events, most, timeout); });
    return static_cast<int>(
        answer(poll::epoll_wait(epfd, events, most, limit.get(), nullptr, kernel)));
  });
}

RSOCK_EXPORT int epoll_pwait(int epfd, epoll_event* events, int most, int timeout,
                             const sigset_t* mask) {
  if (!for_us(epfd) || !acceptable(mask)) {
    return real.epoll_pwait(epfd, events, most, timeout, mask);
  }
  return at_point([=] {
    const Milliseconds limit(timeout);
    auto kernel = in_kernel([=] { return real.epoll_pwait(epfd, events, most, timeout, mask); });
    return static_cast<int>(
        answer(poll::epoll_wait(epfd, events, most, limit.get(), mask, kernel)));
  });
}

RSOCK_EXPORT int epoll_pwait2(int epfd, epoll_event* events, int most, const timespec* timeout,
                              const sigset_t* mask) {
  if (!for_us(epfd) || !acceptable(timeout) || !acceptable(mask)) {
    return real.epoll_pwait2(epfd, events, most, timeout, mask);
  }
  return at_point([=] {
    auto kernel = in_kernel([=] { return real.epoll_pwait2(epfd, events, most, timeout, mask); });
    return static_cast<int>(answer(poll::epoll_wait(epfd, events, most, timeout, mask, kernel)));
  });
}

// FORTIFY: `size` bytes are at fds. libc's own function ends the program where they do not suffice.

RSOCK_EXPORT int __poll_chk(pollfd* fds, nfds_t n, int timeout, size_t size) {
  return size / sizeof(*fds) < n ? real.__poll_chk(fds, n, timeout, size) : ::poll(fds, n, timeout);
}

RSOCK_EXPORT int __ppoll_chk(pollfd* fds, nfds_t n, const timespec* timeout, const sigset_t* mask,
                             size_t size) {
  return size / sizeof(*fds) < n ? real.__ppoll_chk(fds, n, timeout, mask, size)
                                 : ::ppoll(fds, n, timeout, mask);
}

RSOCK_SAME_BODY(__poll, poll);
RSOCK_SAME_BODY(__select, select);
