// A point in time after which a wait is over; none = for ever.
#pragma once

#include <sys/time.h>
#include <time.h>

#include <cstdint>

#include "core/base/clock.h"
#include "core/base/thread_signals.h"

namespace rsock {

/// A duration of the program's in nanoseconds; what does not fit is some 292 years, which is meant
/// as "for ever" (tv_sec = INT64_MAX is a way to say so). Negative ones are negative.
inline int64_t saturated_ns(int64_t seconds, int64_t rest_ns) noexcept {
  int64_t ns = 0;
  if (__builtin_mul_overflow(seconds, int64_t{1'000'000'000}, &ns) ||
      __builtin_add_overflow(ns, rest_ns, &ns)) {
    return seconds < 0 ? INT64_MIN : INT64_MAX;
  }
  return ns;
}
/// SO_RCVTIMEO and SO_SNDTIMEO as we keep them, 0: none. The kernel takes a negative one for "do
/// not wait" (sock_set_timeout() in net/core/sock.c).
inline int64_t socket_timeout_ns(const timeval& tv) noexcept {
  const int64_t ns = saturated_ns(tv.tv_sec, int64_t{tv.tv_usec} * 1000);
  return ns < 0 ? 1 : ns;
}

class Deadline {
 public:
  static constexpr Deadline never() noexcept { return Deadline(0); }
  static Deadline after_ns(int64_t ns) noexcept {
    return Deadline(monotonic_ns() + static_cast<uint64_t>(ns < 0 ? 0 : ns));
  }
  /// SO_RCVTIMEO's convention: 0 is no limit.
  static Deadline from_option(int64_t ns) noexcept { return ns == 0 ? never() : after_ns(ns); }
  static Deadline from_timeout(const timespec* t) noexcept {
    return t == nullptr ? never() : after_ns(saturated_ns(t->tv_sec, t->tv_nsec));
  }

  bool is_never() const noexcept { return at_ == 0; }
  bool passed() const noexcept { return at_ != 0 && monotonic_ns() >= at_; }
  uint64_t remaining_ns() const noexcept {
    const uint64_t now = monotonic_ns();
    return now >= at_ ? 0 : at_ - now;
  }
  /// For a system call: null when there is no limit, else *storage.
  const timespec* as_timespec(timespec* storage) const noexcept {
    if (at_ == 0) return nullptr;
    const uint64_t left = remaining_ns();
    storage->tv_sec = static_cast<time_t>(left / 1'000'000'000u);
    storage->tv_nsec = static_cast<long>(left % 1'000'000'000u);
    return storage;
  }
  /// As as_timespec(), for a futex: with `interruptible` there is always a timeout, because only a
  /// futex wait with one ends with EINTR under SA_RESTART (os::futex_wait).
  const timespec* for_futex(timespec* storage, bool interruptible) const noexcept {
    if (at_ == 0 && interruptible) {
      *storage = {365 * 24 * 3600, 0};
      return storage;
    }
    return as_timespec(storage);
  }

  /// A handler came between our locks, before a futex wait with `timeout` (from for_futex()): one
  /// in the kernel would have ended with EINTR (signal(7)).
  static bool ended_by_handler(const HandlerWatch& since, const timespec* timeout) noexcept {
    return timeout != nullptr ? since.interrupted() : since.broken();
  }

 private:
  explicit constexpr Deadline(uint64_t at) noexcept : at_(at) {}
  uint64_t at_;
};

}  // namespace rsock
