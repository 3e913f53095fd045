// Adaptive spinning: worth it only while recent waits ended within the spin.
//
// A wait first spins for spin_ticks; a wait that ended soon (spinning or asleep) sets them to the maximum,
// one that lasted longer halves them. An idle stream thus sleeps at once; a busy one never enters the kernel.
#pragma once

#include "core/base/clock.h"
#include "core/base/config.h"
#include "core/stream/stream.h"

namespace rsock::stream {

class SpinBudget {
 public:
  explicit SpinBudget(Stream& s) noexcept : s_(s), began_(ticks()), max_(max_ticks()) {
    const uint32_t now = s.spin_ticks.load(std::memory_order_relaxed);
    limit_ = now == 0 ? max_ : (now - 1 < max_ ? now - 1 : max_);
  }
  /// True while another look at the ring is worth it.
  bool more() const noexcept { return ticks() - began_ < limit_; }
  uint64_t elapsed() const noexcept { return ticks() - began_; }
  /// The wait is over: learn from it.
  void learn() noexcept {
    const uint64_t lasted = ticks() - began_;
    const uint32_t next = lasted <= max_ ? max_ : static_cast<uint32_t>(limit_ / 2);
    s_.spin_ticks.store(next + 1, std::memory_order_relaxed);  // 0 means "not measured yet"
  }
  static uint32_t max_ticks() noexcept {
    return static_cast<uint32_t>(config().spin_us * ticks_per_us());
  }

 private:
  Stream& s_;
  uint64_t began_;
  uint64_t max_;
  uint64_t limit_;
};

}  // namespace rsock::stream
