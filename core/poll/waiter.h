// A thread's own bell for sleeping in poll(2) with streams, and the watchers that ring it.
//
// Ownership: one eventfd per thread that ever slept so, made at the first need, internal, closed
// with the thread. Thread safety: ring() from any thread; the rest from its own.
#pragma once

#include "core/os/owned_fd.h"
#include "core/stream/stream.h"

namespace rsock::poll {

/// What this thread's waits for readiness have taught; the streams in them differ from call to
/// call.
stream::SpinState& thread_spin() noexcept;

class ThreadBell {
 public:
  /// The calling thread's bell, or null when no descriptor is to be had.
  static ThreadBell* mine() noexcept;
  int fd() const noexcept { return fd_.get(); }
  void ring() noexcept;
  void drain() noexcept;

 private:
  os::OwnedFd fd_;
};

/// Links a sleeping thread to one stream. Lives on the sleeper's stack or heap.
class SleepWatcher final : public stream::Watcher {
 public:
  SleepWatcher() = default;
  SleepWatcher(const SleepWatcher&) = delete;
  SleepWatcher& operator=(const SleepWatcher&) = delete;
  ~SleepWatcher() { unlink(); }

  void link(stream::Stream& s, ThreadBell& bell) noexcept;
  void unlink() noexcept;
  /// Wakes every other watcher of the stream.
  void tell_others() noexcept;

  void on_maybe_ready(stream::Stream&) noexcept override { bell_->ring(); }
  void on_path_changed(stream::Stream&) noexcept override { bell_->ring(); }
  void on_closed(stream::Stream&) noexcept override { bell_->ring(); }

 private:
  stream::Stream* stream_ = nullptr;
  ThreadBell* bell_ = nullptr;
};

}  // namespace rsock::poll
