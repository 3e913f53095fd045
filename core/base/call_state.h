// What a thread's calls have to see to before they begin and after they end, and how a sleep of
// ours is ended by pthread_cancel.
//
// Purpose: a blocking call that the kernel serves is a cancellation point, a raw system call of
// ours is none; and nobody may be unwound out of the middle of our work. So a cancellation never
// acts in here: pthread_cancel (preload/points.cc) notes itself at its target and ends the target's
// sleep; the call then goes back up as if a signal had come (-ECANCELED), everything it held is let
// go of, and the entry acts. Who cancels finds this record by the thread's own address. Thread
// safety: attention, sleep, wake and arg are for who cancels; the rest is the thread's alone.
// Initial-exec: no allocation, so usable from any context.
//
// Invariants:
//  1. `attention` is 0 where a call has nothing to see to: one load and one branch for each call.
//  2. kRequested is set before the thread is cancelled, and stays until the thread finds that
//  nothing is due any more (its own clean-up handlers call us).
//  3. While `sleep` is kHeld or kLeft the thread does not leave its sleep, so `wake`, `arg` and the
//  record itself live.
//  4. kAsleep is stored before `attention` is looked at, kRequested before `sleep` is (both
//  seq_cst): one of the two sees the other.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace rsock {

struct CallState {
  // Bits of `attention`.
  static constexpr uint32_t kRequested = 1;    // somebody cancels this thread
  static constexpr uint32_t kAsync = 2;        // PTHREAD_CANCEL_ASYNCHRONOUS
  static constexpr uint32_t kMaskUnknown = 4;  // whether SIGSEGV and SIGBUS are blocked
  static constexpr uint32_t kSegvBlocked = 8;  // they are
  static constexpr uint32_t kBusBlocked = 16;

  enum Sleep : uint32_t {
    kAwake,
    kAsleep,
    kHeld,  // asleep, and somebody is about to wake it
    kLeft,  // it woke, and waits for that one to let go
  };

  std::atomic<uint32_t> attention{kMaskUnknown};
  bool act = false;  // a sleep was ended by a cancellation: the entry acts on it
  std::atomic<uint32_t> sleep{kAwake};
  void (*wake)(void*) noexcept = nullptr;
  void* arg = nullptr;
  long thread = 0;  // its number, once it was asked for; not in a forked child

  /// From here on nobody uses `wake`. True: it was asleep.
  bool leave_sleep() noexcept;

  // --- for who cancels ---
  /// Before the thread is cancelled. True: it sleeps, and stays in here until wake_held().
  bool request_and_hold() noexcept;
  void wake_held() noexcept;
};

namespace detail {
inline constinit thread_local CallState call_state __attribute__((tls_model("initial-exec")));
}  // namespace detail

inline CallState& call_state() noexcept { return detail::call_state; }

/// A sleep that pthread_cancel ends. Around the system call, without any lock.
class CancellableSleep {
 public:
  using Wake = void (*)(void*) noexcept;

  /// `wake(arg)`, called by another thread, ends the sleep, also one that begins a moment later.
  CancellableSleep(Wake wake, void* arg) noexcept {
    CallState& c = call_state();
    // Of a call that a signal handler interrupts, in which we are now.
    outer_ = c.leave_sleep();
    outer_wake_ = c.wake;
    outer_arg_ = c.arg;
    int state = PTHREAD_CANCEL_DISABLE;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    if (state != PTHREAD_CANCEL_ENABLE) return;
    pthread_setcancelstate(state, nullptr);
    enabled_ = true;
    c.wake = wake;
    c.arg = arg;
    c.sleep.store(CallState::kAsleep, std::memory_order_seq_cst);
  }

  ~CancellableSleep() {
    CallState& c = call_state();
    (void)c.leave_sleep();
    if (!outer_) return;
    c.wake = outer_wake_;
    c.arg = outer_arg_;
    c.sleep.store(CallState::kAsleep, std::memory_order_seq_cst);
    if (requested()) outer_wake_(outer_arg_);
  }
  CancellableSleep(const CancellableSleep&) = delete;
  CancellableSleep& operator=(const CancellableSleep&) = delete;

  /// True: the call ends, with -ECANCELED, and the entry acts. Asked before the sleep and after it.
  bool cancelled() const noexcept {
    if (!enabled_ || !requested()) return false;
    call_state().act = true;
    return true;
  }

 private:
  static bool requested() noexcept {
    return (call_state().attention.load(std::memory_order_seq_cst) & CallState::kRequested) != 0;
  }

  bool enabled_ = false;
  bool outer_ = false;
  Wake outer_wake_ = nullptr;
  void* outer_arg_ = nullptr;
};

/// Wakes a thread that sleeps in the kernel by a call that no signal restarts (poll and its kin),
/// with libc's own signal for this purpose: its handler finds nothing to do.
void wake_for_cancel(void* thread) noexcept;
/// The argument for it.
void* this_thread_number() noexcept;

}  // namespace rsock
