// Adaptive spinning: worth it only while recent waits ended within the spin.
//
// A wait that ends while spinning makes the next spin longer, up to the maximum; one that does not
// halves it, down to none. A stream that has stopped spinning tries again now and then, provided
// that its waits, asleep, end soon enough for a spin to have caught them; each failed try doubles
// the time to the next. So an idle stream sleeps at once, a busy one never enters the kernel, and
// on a machine without a free core, where the spinner takes the very time that its peer needs,
// spinning ends after a few waits.
#pragma once

#include <algorithm>

#include "core/base/clock.h"
#include "core/base/config.h"
#include "core/base/thread_signals.h"
#include "core/stream/stream.h"

namespace rsock::stream {

class SpinBudget {
 public:
  /// `state` belongs to the caller for the time of the wait.
  explicit SpinBudget(SpinState& state) noexcept
      : state_(state), began_(ticks()), max_(max_ticks()) {
    if (!state.begun) {
      state = SpinState{};
      state.begun = true;
      state.limit = max_;
    }
    limit_ = std::min(state.limit, max_);
    if (limit_ == 0 && max_ != 0 && state.until_try == 0) limit_ = max_ / 2;  // a try
  }
  /// True while another look at the ring is worth it, and no handler waits for the end of it.
  bool more() const noexcept { return ticks() - began_ < limit_ && !thread_signals().postponed; }

  /// The wait ended while spinning.
  void hit() noexcept {
    state_.limit = std::min(max_, std::max(limit_ * 2, max_ / 4));
    state_.try_gap = kFirstGap;
  }
  /// The wait had to sleep; it is over now.
  void missed() noexcept {
    SpinState& state = state_;
    if (limit_ != 0) {
      const bool was_try = state.limit == 0;
      state.limit = was_try || limit_ / 2 < max_ / 32 ? 0 : limit_ / 2;
      if (was_try) state.try_gap = std::min<uint32_t>(state.try_gap * 2, kLastGap);
      state.until_try = state.try_gap;
    } else if (state.until_try != 0 && ticks() - began_ < max_) {
      --state.until_try;
    }
  }
  static uint64_t max_ticks() noexcept {
    return static_cast<uint64_t>(config().spin_us * ticks_per_us());
  }

 private:
  static constexpr uint32_t kFirstGap = 16;  // waits
  static constexpr uint32_t kLastGap = 4096;

  SpinState& state_;
  uint64_t began_;
  uint64_t max_;
  uint64_t limit_;
};

}  // namespace rsock::stream
