#include "core/base/mutex.h"

#include <linux/futex.h>

#include "core/base/clock.h"
#include "core/base/raw_syscall.h"

namespace rsock {

void Mutex::lock_slow() noexcept {
  // A short spin: sections are a copy long at most.
  for (int i = 0; i < 100; ++i) {
    uint32_t expected = 0;
    if (word_.load(std::memory_order_relaxed) == 0 &&
        word_.compare_exchange_weak(expected, 1, std::memory_order_acquire,
                                    std::memory_order_relaxed)) {
      return;
    }
    cpu_relax();
  }
  // acquire pairs with unlock(). We mark 2 even when nobody else sleeps: one needless wake at most.
  while (word_.exchange(2, std::memory_order_acquire) != 0) {
    raw_syscall(SYS_futex, reinterpret_cast<long>(&word_), FUTEX_WAIT_PRIVATE, 2, 0);
  }
}

void Mutex::wake_one() noexcept {
  raw_syscall(SYS_futex, reinterpret_cast<long>(&word_), FUTEX_WAKE_PRIVATE, 1);
}

}  // namespace rsock
