// A thread that sleeps in poll(2) with streams: its bell, and the watchers that strike it.
//
// A sleeper keeps its streams, as poll keeps its files (stream/stay.h).
// Ownership: all of it is the thread's, none of it a call's. A signal handler may leave poll() by
// siglongjmp, which runs no destructors, while the streams go on naming the watchers: what such a
// call left linked stays valid memory, is unlinked by the thread's next call, and at the latest by
// its end. The bell is one eventfd per thread that ever slept so, internal, made at the first need.
// The watchers lie in mapped memory, not in the heap: poll() is called from signal handlers.
// Thread safety: ring() from any thread; the rest from its own, also from a handler that interrupts
// a call of the same thread.
#pragma once

#include "core/os/owned_fd.h"
#include "core/stream/stream.h"

namespace rsock::poll {

class Sleeper;

/// What this thread's waits for readiness have taught; the streams in them differ from call to
/// call.
stream::SpinState& thread_spin() noexcept;

/// Links a sleeping thread to one stream.
class SleepWatcher final : public stream::Watcher {
 public:
  explicit SleepWatcher(Sleeper& owner) noexcept : owner_(owner) {}
  SleepWatcher(const SleepWatcher&) = delete;
  SleepWatcher& operator=(const SleepWatcher&) = delete;

  void on_maybe_ready(stream::Stream&) noexcept override;
  void on_path_changed(stream::Stream&) noexcept override;
  void on_closed(stream::Stream&) noexcept override;

 private:
  friend class Sleeper;
  void link(stream::Stream& s) noexcept;
  /// False: this very thread holds the lock, because a handler interrupted it there.
  bool unlink() noexcept;

  Sleeper& owner_;
  stream::Stream* stream_ = nullptr;
  uint32_t generation_ = 0;  // of the stream, when it was linked
};

class Sleeper {
 public:
  static Sleeper& mine() noexcept;
  Sleeper() = default;
  ~Sleeper();
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  /// One call's sleep, from before the first watcher until after the last.
  class Visit {
   public:
    explicit Visit(Sleeper& sleeper) noexcept : sleeper_(sleeper) { sleeper_.begin(); }
    ~Visit() { sleeper_.end(); }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    Sleeper& sleeper_;
  };

  /// Null: no memory. The stream's news then do not reach the sleeper.
  SleepWatcher* link(stream::Stream& s) noexcept;
  /// The bell; -1 when no descriptor is to be had.
  int fd() const noexcept { return bell_.get(); }
  void ring() noexcept;
  /// This thread closes s: a handler that interrupts its sleep, or the program after siglongjmp.
  void forget(stream::Stream& s) noexcept;
  /// In a forked child: the bell would be the parent's too.
  void forget_bell() noexcept { bell_.reset(); }

 private:
  struct Chunk;

  void begin() noexcept;
  void end() noexcept;
  void unlink_used() noexcept;
  SleepWatcher* at(size_t k) noexcept;

  os::OwnedFd bell_;
  Chunk* chunks_ = nullptr;
  // Atomic against handlers of this thread only.
  std::atomic<size_t> used_{0};
  std::atomic<bool> disturbed_{false};
};

}  // namespace rsock::poll
