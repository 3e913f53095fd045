#include "core/poll/waiter.h"

#include <sys/eventfd.h>

#include "core/os/os.h"

namespace rsock::poll {

stream::SpinState& thread_spin() noexcept {
  static thread_local stream::SpinState state;
  return state;
}

ThreadBell* ThreadBell::mine() noexcept {
  static thread_local ThreadBell bell;
  if (!bell.fd_) {
    const auto fd = os::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!fd) return nullptr;
    auto owned = os::raise(*fd);
    if (!owned) return nullptr;
    bell.fd_ = std::move(*owned);
  }
  return &bell;
}

void ThreadBell::ring() noexcept {
  const uint64_t one = 1;
  (void)os::write(fd_.get(), &one, sizeof(one));
}

void ThreadBell::drain() noexcept {
  uint64_t count;
  (void)os::read(fd_.get(), &count, sizeof(count));
}

void SleepWatcher::link(stream::Stream& s, ThreadBell& bell) noexcept {
  stream_ = &s;
  bell_ = &bell;
  MutexLock lock(s.watch_mutex);
  s.watchers.push_back(*this);
}

void SleepWatcher::tell_others() noexcept { stream::wake_watchers_except(*stream_, this); }

void SleepWatcher::unlink() noexcept {
  if (stream_ == nullptr) return;
  MutexLock lock(stream_->watch_mutex);
  if (is_linked()) stream_->watchers.erase(stream_->watchers.iterator_to(*this));
  stream_ = nullptr;
}

}  // namespace rsock::poll
