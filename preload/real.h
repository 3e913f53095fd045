// Pointers to libc's own functions: what a program would have called without us.
//
// Purpose: `real.read(fd, buf, n)` is the next definition of read behind ours, whoever that is.
// Thread safety: all from any thread, also in signal handlers and before any constructor has run.
// Invariant: a pointer is never null. At first it leads to a function that looks the name up
// (next_symbol.h: no lock, no allocation), stores what it found and calls it: the usual call has
// nothing to check.
#pragma once

#include <atomic>
#include <cerrno>

#include "preload/libc_names.h"

namespace rsock::preload {

/// The type of a function without [[noreturn]], which clang counts as part of it.
template <typename R, typename... A, bool N>
auto plain(R (*)(A...) noexcept(N)) -> R (*)(A...) noexcept(N);
template <typename R, typename... A, bool N>
auto plain(R (*)(A..., ...) noexcept(N)) -> R (*)(A..., ...) noexcept(N);
#define RSOCK_TYPE(name) decltype(::rsock::preload::plain(&::name))

template <typename Fn>
class RealCall {
 public:
  constexpr explicit RealCall(Fn first) : target_(first) {}

  // Relaxed, both: libc's code was there before us, so the pointer publishes nothing but itself.
  template <typename... A>
  [[gnu::always_inline]] auto operator()(A... args) const {
    return target_.load(std::memory_order_relaxed)(args...);
  }
  Fn get() const noexcept { return target_.load(std::memory_order_relaxed); }
  void set(Fn fn) noexcept { target_.store(fn, std::memory_order_relaxed); }

 private:
  std::atomic<Fn> target_;
};

/// In the order of intercept.def, so that the calls of one loop share a cache line.
struct alignas(64) RealCalls {
#define RSOCK_CALL(name, kind, number, presence, effect) RealCall<RSOCK_TYPE(name)> name;
#define RSOCK_LIBC(name, kind, presence, effect) RealCall<RSOCK_TYPE(name)> name;
#include "preload/intercept.def"
};

extern constinit RealCalls real;

/// libc's vfork, for the jump in processes.cc.
void* real_vfork() noexcept;

}  // namespace rsock::preload
