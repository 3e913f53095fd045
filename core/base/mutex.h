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
//  3. While it is held, taken or let go of the program's handlers wait (thread_signals.h).
#pragma once

#include <atomic>
#include <cstdint>

#include "core/base/thread_annotations.h"
#include "core/base/thread_signals.h"

namespace rsock {

/// A value that differs between the live threads of a process, without a system call: the address
/// of a thread-local, cut to 32 bits (the thread areas lie further apart than 64 bytes).
inline uint32_t thread_tag() noexcept {
  static thread_local char anchor __attribute__((tls_model("initial-exec")));
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(&anchor) >> 6) | 1u;
}

class RSOCK_CAPABILITY("mutex") Mutex {
 public:
  constexpr Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() noexcept RSOCK_ACQUIRE() {
    hold_handlers();
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
    hold_handlers();
    uint32_t expected = 0;
    if (!word_.compare_exchange_strong(expected, 1, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
      release_handlers();
      return false;
    }
    owner_.store(thread_tag(), std::memory_order_relaxed);
    return true;
  }

  void unlock() noexcept RSOCK_RELEASE() {
    owner_.store(0, std::memory_order_relaxed);
    // release pairs with the acquire in lock(). The exchange tells whether somebody sleeps.
    if (word_.exchange(0, std::memory_order_release) == 2) wake_one();
    release_handlers();
  }

  /// True when the calling thread holds the lock. (Handlers do not come while it does:
  /// thread_signals.h. Unless one was installed behind our back; that one asks this.)
  bool held_by_me() const noexcept {
    return owner_.load(std::memory_order_relaxed) == thread_tag();
  }

  /// True when another thread waits for the lock: a holder that spins for data lets go.
  bool contended() const noexcept { return word_.load(std::memory_order_relaxed) == 2; }

  /// In a forked child only, before any other thread exists: whoever held it is gone.
  void reset_after_fork() noexcept {
    word_.store(0, std::memory_order_relaxed);
    owner_.store(0, std::memory_order_relaxed);
  }

 private:
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
