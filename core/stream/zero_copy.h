// The numbers of a stream's MSG_ZEROCOPY sends, and which of them are complete and not yet told.
//
// Purpose: the kernel numbers a socket's zero-copy sends from 0, and so does the program. While a
// channel carries the stream the kernel does not see them, so its numbers fall behind; what its
// error queue says is translated. Pure: no system call, no lock.
// Thread safety: none of its own; pending() alone may be asked by any thread.
//
// Invariants.
//  1. next_ counts the program's sends, kernel_next_ those of them that the kernel took.
//  2. spans_[0, spans_used_) rise in `from`: the kernel's numbers from there on are `plus` behind.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace rsock::stream {

class ZeroCopies {
 public:
  struct Range {
    uint32_t first;
    uint32_t last;
    bool copied;
  };

  void reset() noexcept {
    next_ = kernel_next_ = 0;
    spans_used_ = waiting_used_ = 0;
    pending_.store(false, std::memory_order_relaxed);
  }
  /// The kernel took a send.
  void taken_by_kernel() noexcept;
  /// A channel took one: it is complete, because its bytes were copied.
  void copied() noexcept;
  /// Something to tell that the kernel's queue does not have. Any thread.
  bool pending() const noexcept { return pending_.load(std::memory_order_acquire); }
  /// The oldest of it; only if pending().
  Range take() noexcept;
  /// What the kernel calls `range`: the program's numbers. Two spans: the first, and the rest is
  /// pending.
  Range translate(Range range) noexcept;

 private:
  struct Span {
    uint32_t from;
    uint32_t plus;
  };
  uint32_t plus_at(uint32_t kernels, uint32_t* until) const noexcept;
  void add_waiting(Range range) noexcept;

  uint32_t next_ = 0;
  uint32_t kernel_next_ = 0;
  uint8_t spans_used_ = 0;
  uint8_t waiting_used_ = 0;
  std::atomic<bool> pending_{false};
  // A stream that goes to and fro more often than this with completions unread has them numbered
  // wrongly: nobody has so many outstanding.
  std::array<Span, 4> spans_{};
  std::array<Range, 4> waiting_{};
};

}  // namespace rsock::stream
