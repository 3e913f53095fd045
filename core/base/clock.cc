#include "core/base/clock.h"

#include <time.h>

#include <atomic>

namespace rsock {

uint64_t monotonic_ns() noexcept {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(ts.tv_nsec);
}

uint64_t ticks_per_us() noexcept {
  // Relaxed: every thread that measures gets the same answer within noise, so any of them may win.
  static constinit std::atomic<uint64_t> cached{0};
  uint64_t known = cached.load(std::memory_order_relaxed);
  if (known != 0) return known;
  const uint64_t t0 = monotonic_ns();
  const uint64_t c0 = ticks();
  uint64_t t1;
  do {
    t1 = monotonic_ns();
  } while (t1 - t0 < 50'000);
  const uint64_t c1 = ticks();
  known = (c1 - c0) * 1000 / (t1 - t0);
  if (known == 0) known = 1;
  cached.store(known, std::memory_order_relaxed);
  return known;
}

}  // namespace rsock
