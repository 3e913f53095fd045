#include "core/poll/waiter.h"

#include <sys/eventfd.h>

#include <new>
#include <utility>

#include "core/os/os.h"
#include "core/poll/instance.h"
#include "core/stream/stay.h"

namespace rsock::poll {

using std::memory_order_relaxed;

stream::SpinState& thread_spin() noexcept {
  static thread_local stream::SpinState state;
  return state;
}

// --- one watcher ---------------------------------------------------------------------------------

void SleepWatcher::on_maybe_ready(stream::Stream&) noexcept { owner_.ring(); }
void SleepWatcher::on_path_changed(stream::Stream&) noexcept { owner_.ring(); }
void SleepWatcher::on_closed(stream::Stream&) noexcept { owner_.ring(); }

void SleepWatcher::link(stream::Stream& s) noexcept {
  stream_ = &s;
  generation_ = s.generation.load(memory_order_relaxed);
  {
    MutexLock lock(s.watch_mutex);
    if (s.watching.load(memory_order_relaxed) != 0) evict_parked_locked(s, nullptr);
    stream::link_watcher_locked(s, *this);
  }
  // seq_cst: a look at the number follows (stay.h).
  s.inside.fetch_add(1, std::memory_order_seq_cst);
}

bool SleepWatcher::unlink() noexcept {
  if (stream_ == nullptr) return true;
  if (stream_->watch_mutex.held_by_me()) return false;
  stream::Stream& s = *std::exchange(stream_, nullptr);
  {
    MutexLock lock(s.watch_mutex);
    if (!is_linked()) return true;  // the stream is closed, or another one
    stream::unlink_watcher_locked(s, *this);
  }
  // One that was recycled while we linked ourselves begins to count anew.
  if (s.owned_by(generation_)) stream::leave_stream(s);
  return true;
}

// --- the thread's --------------------------------------------------------------------------------

/// A page of watchers.
struct Sleeper::Chunk {
  static constexpr size_t kBytes = 4096;
  static constexpr size_t kCount = (kBytes - 16) / sizeof(SleepWatcher);

  Chunk* next = nullptr;
  alignas(SleepWatcher) std::byte memory[kCount * sizeof(SleepWatcher)];

  SleepWatcher& watcher(size_t k) noexcept {
    return *std::launder(reinterpret_cast<SleepWatcher*>(memory + k * sizeof(SleepWatcher)));
  }
};

Sleeper& Sleeper::mine() noexcept {
  static thread_local Sleeper sleeper;
  return sleeper;
}

Sleeper::~Sleeper() {
  for (Chunk* chunk = std::exchange(chunks_, nullptr); chunk != nullptr;) {
    for (size_t k = 0; k < Chunk::kCount; ++k) (void)chunk->watcher(k).unlink();
    Chunk* next = chunk->next;
    os::unmap(chunk, Chunk::kBytes);
    chunk = next;
  }
}

SleepWatcher* Sleeper::at(size_t k) noexcept {
  Chunk** place = &chunks_;
  for (;; place = &(*place)->next, k -= Chunk::kCount) {
    if (*place == nullptr) {
      const auto memory = os::map_private_reserved(Chunk::kBytes);
      if (!memory) return nullptr;
      auto* chunk = new (*memory) Chunk;
      for (size_t i = 0; i < Chunk::kCount; ++i) {
        new (chunk->memory + i * sizeof(SleepWatcher)) SleepWatcher(*this);
      }
      *place = chunk;
    }
    if (k < Chunk::kCount) return &(*place)->watcher(k);
  }
}

SleepWatcher* Sleeper::link(stream::Stream& s) noexcept {
  for (size_t k = used_.load(memory_order_relaxed);; ++k) {
    SleepWatcher* watcher = at(k);
    if (watcher == nullptr) return nullptr;
    if (!watcher->unlink()) continue;
    used_.store(k + 1, memory_order_relaxed);
    watcher->link(s);
    return watcher;
  }
}

void Sleeper::begin() noexcept {
  // Left behind by siglongjmp, or of a call that a handler interrupts, in which we are now: that
  // one has to look at its streams again, and end() sees to it.
  if (used_.load(memory_order_relaxed) != 0) {
    disturbed_.store(true, memory_order_relaxed);
    unlink_used();
  }
  if (!bell_) {
    install_hooks();  // for the fork
    auto owned = os::make_internal([] { return os::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
    if (owned) bell_ = std::move(*owned);
  }
  uint64_t count;
  if (bell_) (void)os::read(bell_.get(), &count, sizeof(count));
}

void Sleeper::end() noexcept {
  unlink_used();
  if (disturbed_.exchange(false, memory_order_relaxed)) ring();
}

void Sleeper::unlink_used() noexcept {
  const size_t n = used_.load(memory_order_relaxed);
  for (size_t k = 0; k < n; ++k) (void)at(k)->unlink();
  used_.store(0, memory_order_relaxed);
}

void Sleeper::forget(stream::Stream& s) noexcept {
  const size_t n = used_.load(memory_order_relaxed);
  for (size_t k = 0; k < n; ++k) {
    if (at(k)->stream_ != &s) continue;
    (void)at(k)->unlink();
    disturbed_.store(true, memory_order_relaxed);
  }
}

void Sleeper::ring() noexcept {
  const uint64_t one = 1;
  if (bell_) (void)os::write(bell_.get(), &one, sizeof(one));
}

}  // namespace rsock::poll
