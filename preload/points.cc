// pthread_cancel and the calls that it ends, and what a thread's signal mask means for our copies.
//
// A call of ours ends by pthread_cancel where libc's would: before it begins, and in its sleep
// (core/base/call_state.h). It acts here, in the entry, when everything of the call is given back.
// Asynchronous cancellation is put off while a thread is in here: it would act in the middle.
//
// Who cancels finds the target's record by its address: pthread_t is the thread's own area (glibc,
// nptl/descr.h), and initial-exec variables lie at one distance from it in every thread.

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include "core/base/deadline.h"
#include "core/base/thread_signals.h"
#include "preload/entry.h"

namespace rsock::preload {
namespace {

using std::memory_order_relaxed;

constexpr long kBlock = 0;    // SIG_BLOCK
constexpr long kUnblock = 1;  // SIG_UNBLOCK

CallState& state_of(pthread_t thread) noexcept {
  const auto mine = reinterpret_cast<uintptr_t>(&call_state());
  return *reinterpret_cast<CallState*>(thread + (mine - pthread_self()));
}

uint64_t change_mask(long how, uint64_t signals) noexcept {
  uint64_t old = 0;
  raw_syscall(SYS_rt_sigprocmask, how, signals != 0 ? reinterpret_cast<long>(&signals) : 0,
              reinterpret_cast<long>(&old), sizeof(old));
  return old;
}

constexpr uint64_t bit(int signal_number) { return uint64_t{1} << (signal_number - 1); }

uint64_t faults(uint32_t attention) noexcept {
  return ((attention & CallState::kSegvBlocked) != 0 ? bit(SIGSEGV) : 0) |
         ((attention & CallState::kBusBlocked) != 0 ? bit(SIGBUS) : 0);
}

uint32_t learn_mask(CallState& c) noexcept {
  const uint64_t mask = change_mask(kBlock, 0);
  uint32_t now = 0;
  if ((mask & bit(SIGSEGV)) != 0) now |= CallState::kSegvBlocked;
  if ((mask & bit(SIGBUS)) != 0) now |= CallState::kBusBlocked;
  c.attention.fetch_and(
      ~(CallState::kMaskUnknown | CallState::kSegvBlocked | CallState::kBusBlocked),
      memory_order_relaxed);
  return c.attention.fetch_or(now, memory_order_relaxed) | now;
}

/// Threads between our note of a cancellation and libc's.
constinit std::atomic<int> g_cancelling{0};

/// Returns if no cancellation is due any more: this thread is being cancelled already, and the call
/// is a clean-up handler's (pthread_testcancel() then does nothing). The note is taken back.
void act() {
  const Deadline hopeless = Deadline::after_ns(1'000'000'000);
  bool in_time = true;
  while (in_time) {
    // The target may meet our note of it a moment before libc's. seq_cst: asked before libc is.
    const bool under_way = g_cancelling.load(std::memory_order_seq_cst) != 0;
    pthread_testcancel();
    if (!under_way) break;
    sched_yield();
    in_time = !hopeless.passed();
  }
  call_state().attention.fetch_and(~CallState::kRequested, memory_order_relaxed);
}

}  // namespace

uint32_t attend_before(bool point) {
  CallState& c = call_state();
  uint32_t attention = c.attention.load(memory_order_relaxed);
  if ((attention & CallState::kMaskUnknown) != 0) attention = learn_mask(c);
  uint32_t owed = 0;
  if ((attention & CallState::kAsync) != 0) {
    real.pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, nullptr);
    owed |= CallState::kAsync;
  }
  if (point && (attention & CallState::kRequested) != 0) pthread_testcancel();
  // A fault of ours (core/base/try_copy.h) while its signal is blocked would end the process.
  if (const uint64_t blocked = faults(attention); blocked != 0) {
    change_mask(kUnblock, blocked);
    owed |= attention & (CallState::kSegvBlocked | CallState::kBusBlocked);
  }
  return owed;
}

bool attend_after(uint32_t owed, bool point) {
  CallState& c = call_state();
  bool again = false;
  const int saved_errno = errno;
  if (const uint64_t blocked = faults(owed); blocked != 0) change_mask(kBlock, blocked);
  if (c.act) {
    c.act = false;
    if (point) act();
    again = point;
  }
  // It acts if a cancellation is due. Where libc's function is none to be left, the next one is.
  const bool due = (c.attention.load(memory_order_relaxed) & CallState::kRequested) != 0;
  if ((owed & CallState::kAsync) != 0 && (point || !due)) {
    real.pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, nullptr);
  }
  errno = saved_errno;
  return again;
}

}  // namespace rsock::preload

using namespace rsock;
using namespace rsock::preload;

RSOCK_EXPORT int pthread_cancel(pthread_t thread) {
  if (!own_process()) return real.pthread_cancel(thread);  // a child of vfork: whatever that means
  CallState& target = state_of(thread);
  // Before libc's: afterwards the thread may be gone. Held in its sleep it is not.
  // seq_cst pairs with act().
  g_cancelling.fetch_add(1, std::memory_order_seq_cst);
  const bool held = target.request_and_hold();
  const int result = real.pthread_cancel(thread);
  g_cancelling.fetch_sub(1, std::memory_order_seq_cst);
  if (held) target.wake_held();
  return result;
}

RSOCK_EXPORT int pthread_setcanceltype(int type, int* old) {
  CallState& c = call_state();
  if (type == PTHREAD_CANCEL_ASYNCHRONOUS)
    c.attention.fetch_or(CallState::kAsync, memory_order_relaxed);
  // May not return.
  const int result = real.pthread_setcanceltype(type, old);
  if (type == PTHREAD_CANCEL_DEFERRED)
    c.attention.fetch_and(~CallState::kAsync, memory_order_relaxed);
  return result;
}

RSOCK_EXPORT int pthread_sigmask(int how, const sigset_t* set, sigset_t* old) noexcept {
  const int result = real.pthread_sigmask(how, set, old);
  if (set != nullptr)
    call_state().attention.fetch_or(CallState::kMaskUnknown, memory_order_relaxed);
  return result;
}

RSOCK_EXPORT int sigprocmask(int how, const sigset_t* set, sigset_t* old) noexcept {
  const int result = real.sigprocmask(how, set, old);
  if (set != nullptr)
    call_state().attention.fetch_or(CallState::kMaskUnknown, memory_order_relaxed);
  return result;
}
