#include "core/base/call_state.h"

#include <sched.h>
#include <time.h>

#include "core/base/raw_syscall.h"

namespace rsock {
namespace {

constexpr long kSigCancel = 32;  // glibc's SIGCANCEL, nptl/internaltypes.h: SIGRTMIN of the kernel

/// glibc sets the handler in the first pthread_cancel (nptl/pthread_cancel.c). Without one the
/// signal would end the process.
bool has_handler() noexcept {
  struct {
    unsigned long handler, flags, restorer, mask;
  } now{};
  return raw_syscall(SYS_rt_sigaction, kSigCancel, 0, reinterpret_cast<long>(&now), 8) == 0 &&
         now.handler > 1;
}

constexpr timespec kSecondTry{0, 50'000};

}  // namespace

bool CallState::leave_sleep() noexcept {
  for (;;) {
    uint32_t was = kAsleep;
    // acquire pairs with wake_held(): the waker is done.
    if (sleep.compare_exchange_strong(was, kAwake, std::memory_order_seq_cst,
                                      std::memory_order_acquire)) {
      return true;
    }
    if (was == kAwake) return false;
    if (was == kLeft || !sleep.compare_exchange_strong(was, kLeft, std::memory_order_seq_cst)) {
      continue;
    }
    while (sleep.load(std::memory_order_acquire) == kLeft) sched_yield();
    return true;
  }
}

bool CallState::request_and_hold() noexcept {
  attention.fetch_or(kRequested, std::memory_order_seq_cst);
  uint32_t expected = kAsleep;
  return sleep.compare_exchange_strong(expected, kHeld, std::memory_order_seq_cst,
                                       std::memory_order_relaxed);
}

void CallState::wake_held() noexcept {
  // A signal that comes in the last instant before the system call ends no sleep. Bounded: the
  // thread may be in a handler, which takes as long as it likes and looks here afterwards.
  constexpr int kTries = 20;
  wake(arg);
  for (int i = 1; i < kTries && wake == &wake_for_cancel; ++i) {
    raw_syscall(SYS_nanosleep, reinterpret_cast<long>(&kSecondTry), 0);
    if (sleep.load(std::memory_order_acquire) == kLeft) break;
    wake(arg);
  }
  // release: our last look at `wake` and `arg`.
  uint32_t expected = kHeld;
  if (!sleep.compare_exchange_strong(expected, kAsleep, std::memory_order_release,
                                     std::memory_order_acquire)) {
    sleep.store(kAwake, std::memory_order_release);
  }
}

void wake_for_cancel(void* thread) noexcept {
  if (!has_handler()) return;
  raw_syscall(SYS_tgkill, raw_syscall(SYS_getpid), reinterpret_cast<long>(thread), kSigCancel);
}

void* this_thread_number() noexcept {
  CallState& c = call_state();
  if (c.thread == 0) c.thread = raw_syscall(SYS_gettid);
  return reinterpret_cast<void*>(c.thread);
}

}  // namespace rsock
