// A point in time after which a wait is over; none = for ever.
#pragma once

#include <time.h>

#include <cstdint>

#include "core/base/clock.h"

namespace rsock::stream {

class Deadline {
 public:
  static Deadline never() noexcept { return Deadline(0); }
  static Deadline after_ns(int64_t ns) noexcept {
    return Deadline(monotonic_ns() + static_cast<uint64_t>(ns < 0 ? 0 : ns));
  }
  /// SO_RCVTIMEO's convention: 0 is no limit.
  static Deadline from_option(int64_t ns) noexcept { return ns == 0 ? never() : after_ns(ns); }
  static Deadline from_timeout(const timespec* t) noexcept {
    return t == nullptr ? never() : after_ns(t->tv_sec * 1'000'000'000LL + t->tv_nsec);
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

 private:
  explicit constexpr Deadline(uint64_t at) noexcept : at_(at) {}
  uint64_t at_;
};

}  // namespace rsock::stream
