// Time for waiting: a cheap tick for spinning, and the kernel's monotonic clock for everything
// else.
#pragma once

#include <cstdint>

namespace rsock {

/// Tells the core that this is a spin loop; lets a hyper-thread sibling run.
inline void cpu_relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

/// CLOCK_MONOTONIC in nanoseconds, through the vDSO (no system call). Async-signal-safe.
uint64_t monotonic_ns() noexcept;

/// A counter of constant rate: rdtsc, or the generic timer. Only differences mean anything.
inline uint64_t ticks() noexcept {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t v;
  asm volatile("mrs %0, cntvct_el0" : "=r"(v));
  return v;
#endif
}

/// Ticks per microsecond, measured once against CLOCK_MONOTONIC (the first call takes ~50 us).
uint64_t ticks_per_us() noexcept;

}  // namespace rsock
