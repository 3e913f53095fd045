// The full barrier, where the compilers' own is not enough.
#pragma once

#include <atomic>

namespace rsock {

/// What was stored before is seen by others before what is loaded after it: a seq_cst fence.
/// Partner: another one, or an atomic exchange, between the same two words in the other order.
inline void full_fence() noexcept {
#if defined(__x86_64__) && (defined(__clang__) || defined(__SANITIZE_THREAD__))
  // As g++ writes it: clang 14 writes mfence, which takes several times as long. And
  // ThreadSanitizer does not know fences; g++ refuses to compile them for it.
  asm volatile("lock orq $0, (%%rsp)" : : : "memory", "cc");
#elif defined(__aarch64__) && defined(__SANITIZE_THREAD__)
  asm volatile("dmb ish" : : : "memory");
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace rsock
