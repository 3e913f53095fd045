// Memory for bytes on their way from a file into a stream.
//
// Purpose: sendfile on a lifted stream copies through a buffer that is too large for the program's
// stack (a thread may have PTHREAD_STACK_MIN) and may not come from malloc (core/DESIGN.md: the
// data path runs inside of it). A few mappings are kept and lent out. Thread safety: any thread,
// lock-free, also in signal handlers and after fork.
#pragma once

#include <atomic>
#include <cstddef>

#include "core/os/os.h"

namespace rsock::stream {

class BounceBuffer {
 public:
  static constexpr size_t kSize = 64 * 1024;

  BounceBuffer() noexcept {
    for (auto& slot : kept_) {
      // acquire pairs with the release below: the last borrower is done with the bytes.
      if ((memory_ = slot.exchange(nullptr, std::memory_order_acquire)) != nullptr) return;
    }
    if (const auto fresh = os::map_private_reserved(kSize)) memory_ = *fresh;
  }
  ~BounceBuffer() {
    if (memory_ == nullptr) return;
    for (auto& slot : kept_) {
      void* empty = nullptr;
      if (slot.compare_exchange_strong(empty, memory_, std::memory_order_release,
                                       std::memory_order_relaxed)) {
        return;
      }
    }
    os::unmap(memory_, kSize);
  }
  BounceBuffer(const BounceBuffer&) = delete;
  BounceBuffer& operator=(const BounceBuffer&) = delete;

  /// Null: no memory.
  void* data() const noexcept { return memory_; }

 private:
  static inline std::atomic<void*> kept_[4] = {};
  void* memory_ = nullptr;
};

}  // namespace rsock::stream
