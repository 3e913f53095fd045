// Who may be inside the kernel with this direction, and when the direction may change hands.
//
// Purpose: while a direction runs on plain TCP, calls go straight to the kernel; the gate only
// counts them. To lift, the direction must be taken at a moment when nobody is inside (a thread
// that sits in a kernel recv would miss the switch). The gate never makes anybody wait: take()
// succeeds only when the count is zero, and whoever leaves last is told so that it can try. Thread
// safety: lock-free, any thread, also signal handlers. Invariants: kManaged is set only by take()
// and cleared only by give_back(); the count below it is the number of calls in the kernel, plus,
// for an instant, callers that found kManaged and step back.
#pragma once

#include <atomic>
#include <cstdint>

namespace rsock::stream {

class Gate {
 public:
  static constexpr uint32_t kManaged = 1u << 31;

  /// True: the caller is counted and may call the kernel, then must leave(). False: managed.
  bool enter() noexcept {
    // Most calls of a lifted stream end here, without an atomic read-modify-write: that costs more
    // than the rest of this function.
    if (managed()) return false;
    // acquire pairs with give_back(): what the managed time left behind (offsets) is visible.
    if ((word_.fetch_add(1, std::memory_order_acquire) & kManaged) == 0) return true;
    word_.fetch_sub(1, std::memory_order_relaxed);
    return false;
  }

  /// True: nobody is inside any more; the moment to try take().
  bool leave() noexcept {
    // release pairs with take(): the offsets that this call counted are visible to the taker.
    return word_.fetch_sub(1, std::memory_order_release) == 1;
  }

  /// Takes the direction out of the kernel's hands if nobody is inside.
  bool take() noexcept {
    uint32_t expected = 0;
    return word_.compare_exchange_strong(expected, kManaged, std::memory_order_acq_rel,
                                         std::memory_order_relaxed);
  }

  void give_back() noexcept { word_.fetch_and(~kManaged, std::memory_order_release); }
  bool managed() const noexcept { return (word_.load(std::memory_order_acquire) & kManaged) != 0; }
  /// Nobody inside and not managed: the stream may be recycled.
  bool idle() const noexcept { return word_.load(std::memory_order_acquire) == 0; }
  /// In a forked child: whoever was inside is gone.
  void reset_after_fork() noexcept { word_.store(0, std::memory_order_relaxed); }

 private:
  std::atomic<uint32_t> word_{0};
};

/// Leaves on every way out, also when pthread_cancel unwinds a kernel call.
template <typename OnLast>
class GateVisit {
 public:
  GateVisit(Gate& gate, OnLast on_last) noexcept : gate_(gate), on_last_(on_last) {}
  ~GateVisit() {
    if (gate_.leave()) on_last_();
  }
  GateVisit(const GateVisit&) = delete;
  GateVisit& operator=(const GateVisit&) = delete;

 private:
  Gate& gate_;
  OnLast on_last_;
};

}  // namespace rsock::stream
