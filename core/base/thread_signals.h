// When a thread may run the program's signal handlers: not while it holds a lock of ours.
//
// Purpose: a system call is over before its thread runs a handler, so on Linux a handler may close,
// shut down, fork or _exit in the middle of a send. Ours is no system call; a handler that ran
// while its thread holds a stream's lock would wait for itself. So a handler that comes then is
// postponed to the moment of the last unlock, where the kernel delivers the signal for good: a few
// instructions or one copy later, as it would have come after the kernel's copy. Who: Mutex counts;
// preload/handlers.cc postpones (it stands between the kernel and the handlers). Thread safety:
// each thread its own. Initial-exec: no allocation, so usable from any context.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/base/raw_syscall.h"

namespace rsock {

struct ThreadSignals {
  int depth = 0;           // locks held, or being taken or let go
  bool postponed = false;  // all signals are blocked; `mask` is what the program had
  uint64_t mask = 0;       // the kernel's sigset
  uint32_t ran = 0;        // handlers that have run in this thread
  uint32_t broke = 0;      // of these, without SA_RESTART
};

namespace detail {
inline constinit thread_local ThreadSignals thread_signals
    __attribute__((tls_model("initial-exec")));
}  // namespace detail

inline ThreadSignals& thread_signals() noexcept { return detail::thread_signals; }

/// The kernel's mask of this thread; `old` may be null.
inline void set_signal_mask(const uint64_t& mask, uint64_t* old) noexcept {
  constexpr long kSetMask = 2;  // SIG_SETMASK
  raw_syscall(SYS_rt_sigprocmask, kSetMask, reinterpret_cast<long>(&mask),
              reinterpret_cast<long>(old), sizeof(mask));
}

/// Lets in what was postponed: the kernel runs the handlers before this returns.
inline void deliver_postponed() noexcept {
  ThreadSignals& t = thread_signals();
  const uint64_t mask = t.mask;
  t.postponed = false;
  set_signal_mask(mask, nullptr);
}

inline void hold_handlers() noexcept {
  ++thread_signals().depth;
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

inline void release_handlers() noexcept {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  ThreadSignals& t = thread_signals();
  if (--t.depth == 0 && __builtin_expect(t.postponed, 0)) deliver_postponed();
}

class HandlersHeld {
 public:
  HandlersHeld() noexcept { hold_handlers(); }
  ~HandlersHeld() { release_handlers(); }
  HandlersHeld(const HandlersHeld&) = delete;
  HandlersHeld& operator=(const HandlersHeld&) = delete;
};

/// All signals of this thread blocked in the kernel; mask() is what they were, for a wait that lets
/// them in (epoll_pwait(2)). Two system calls: for waits, where a postponed handler would not end
/// the wait.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept { set_signal_mask(~uint64_t{0}, &mask_); }
  ~SignalsBlocked() { set_signal_mask(mask_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  /// The kernel's sigset: 8 bytes.
  const uint64_t* mask() const noexcept { return &mask_; }

 private:
  uint64_t mask_ = 0;
};

/// In a forked child, when all locks have been made anew.
inline void handlers_after_fork_child() noexcept {
  ThreadSignals& t = thread_signals();
  t.depth = 0;
  if (t.postponed) deliver_postponed();
}

/// Has a handler run since the call began? A wait in the kernel would have ended (signal(7)); ours
/// asks before it sleeps, because a handler may have run in between locks.
class HandlerWatch {
 public:
  HandlerWatch() noexcept : ran_(thread_signals().ran), broke_(thread_signals().broke) {}
  /// A call that has moved nothing, and has no time limit, begins again after a handler with
  /// SA_RESTART: what ran so far was before it.
  void begin_again() noexcept {
    if (!broken()) *this = HandlerWatch();
  }
  /// For calls that SA_RESTART begins again.
  bool broken() const noexcept { return thread_signals().broke != broke_; }
  /// For calls that end whatever SA_RESTART says: poll and its kin, waits with a time limit, and
  /// those that have moved bytes.
  bool interrupted() const noexcept { return thread_signals().ran != ran_; }

 private:
  uint32_t ran_;
  uint32_t broke_;
};

}  // namespace rsock
