// A futex lock that thread safety analysis can see, that knows its owner, and that survives fork.
//
// Purpose: libstdc++'s std::mutex is invisible to clang's analysis, calls into pthread (which a
// program may interpose), and cannot be re-initialised in a forked child. This one is 8 bytes and
// constinit. Ownership: embedded in the object it guards. Memory may be type-stable: locking a
// recycled object is safe, the caller re-checks identity afterwards. Thread safety: all members may
// be called from any thread; not recursive. Invariants:
//  1. word_ is 0 (free), 1 (held) or 2 (held, somebody sleeps or is about to).
//  2. owner_ is the holder's thread tag while held; a thread compares it with its own tag only, so
//  a
//     relaxed load is enough: no other thread can make it equal to mine.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/base/thread_annotations.h"

namespace rsock {

/// A value that differs between the live threads of a process, without a system call: the address
/// of a thread-local, cut to 32 bits (the thread areas lie further apart than 64 bytes).
inline uint32_t thread_tag() noexcept {
  static thread_local char anchor __attribute__((tls_model("initial-exec")));
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(&anchor) >> 6) | 1u;
}

class Mutex;

/// The mutex that the calling thread is taking or letting go of at this instant, or null. A signal
/// handler that interrupts it there finds the word changed and the owner not yet, or no longer, set.
inline const Mutex*& mutex_in_transition() noexcept {
  static thread_local const Mutex* mutex __attribute__((tls_model("initial-exec"))) = nullptr;
  return mutex;
}

class RSOCK_CAPABILITY("mutex") Mutex {
 public:
  constexpr Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() noexcept RSOCK_ACQUIRE() {
    Transition transition(this);
    uint32_t expected = 0;
    // acquire pairs with the release in unlock(): the holder sees what the last one wrote.
    if (__builtin_expect(!word_.compare_exchange_strong(expected, 1, std::memory_order_acquire,
                                                        std::memory_order_relaxed),
                         0)) {
      lock_slow();
    }
    owner_.store(thread_tag(), std::memory_order_relaxed);
  }

  bool try_lock() noexcept RSOCK_TRY_ACQUIRE(true) {
    Transition transition(this);
    uint32_t expected = 0;
    if (!word_.compare_exchange_strong(expected, 1, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
      return false;
    }
    owner_.store(thread_tag(), std::memory_order_relaxed);
    return true;
  }

  void unlock() noexcept RSOCK_RELEASE() {
    Transition transition(this);
    owner_.store(0, std::memory_order_relaxed);
    // release pairs with the acquire in lock(). The exchange tells whether somebody sleeps.
    if (word_.exchange(0, std::memory_order_release) == 2) wake_one();
  }

  /// True when the calling thread holds the lock, or is just taking it or letting it go (a signal
  /// handler asks this before it locks).
  bool held_by_me() const noexcept {
    return owner_.load(std::memory_order_relaxed) == thread_tag() ||
           mutex_in_transition() == this;
  }

  /// True when another thread waits for the lock: a holder that spins for data lets go.
  bool contended() const noexcept { return word_.load(std::memory_order_relaxed) == 2; }

  /// In a forked child only, before any other thread exists: whoever held it is gone.
  void reset_after_fork() noexcept {
    word_.store(0, std::memory_order_relaxed);
    owner_.store(0, std::memory_order_relaxed);
  }

 private:
  /// Restores what was there: a handler may lock something else in the middle of our transition.
  class Transition {
   public:
    explicit Transition(const Mutex* mutex) noexcept : before_(mutex_in_transition()) {
      mutex_in_transition() = mutex;
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    ~Transition() {
      std::atomic_signal_fence(std::memory_order_seq_cst);
      mutex_in_transition() = before_;
    }
    Transition(const Transition&) = delete;
    Transition& operator=(const Transition&) = delete;

   private:
    const Mutex* const before_;
  };

  void lock_slow() noexcept;
  void wake_one() noexcept;

  std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> owner_{0};
};

class RSOCK_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) noexcept RSOCK_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RSOCK_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace rsock
