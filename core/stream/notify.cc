#include "core/stream/stream.h"

namespace rsock::stream {

void wake_waiters(Stream& s) noexcept {
  std::shared_ptr<Channel> channel;
  {
    // The rx lock alone keeps the channel from changing; held for a pointer copy.
    MutexLock lock(s.rx.mutex);
    channel = s.channel;
  }
  if (channel) channel->wake_local();
  channel = nullptr;  // it may be the last one, and watchers take their time
  MutexLock lock(s.watch_mutex);
  for (Watcher& w : s.watchers) w.on_maybe_ready(s);
}

void wake_watchers_except(Stream& s, const Watcher* self) noexcept {
  MutexLock lock(s.watch_mutex);
  for (Watcher& w : s.watchers) {
    if (&w != self) w.on_maybe_ready(s);
  }
}

void path_changed(Stream& s) noexcept {
  MutexLock lock(s.watch_mutex);
  for (auto it = s.watchers.begin(); it != s.watchers.end();) {
    Watcher& w = *it++;  // it may unlink itself
    w.on_path_changed(s);
  }
}

void link_watcher_locked(Stream& s, Watcher& w) noexcept {
  s.watchers.push_back(w);
  s.watching.fetch_add(1, std::memory_order_seq_cst);
}

void unlink_watcher_locked(Stream& s, Watcher& w) noexcept {
  s.watchers.erase(s.watchers.iterator_to(w));
  s.watching.fetch_sub(1, std::memory_order_seq_cst);
}

void drop_sleepers_in_child(Stream& s) noexcept {
  MutexLock lock(s.watch_mutex);
  for (auto it = s.watchers.begin(); it != s.watchers.end();) {
    Watcher& w = *it++;
    if (!w.survives_fork()) unlink_watcher_locked(s, w);
  }
}

void unlink_watchers(Stream& s) noexcept {
  MutexLock lock(s.watch_mutex);
  while (!s.watchers.empty()) {
    Watcher& w = s.watchers.front();
    unlink_watcher_locked(s, w);
    w.on_closed(s);
  }
}

void unlink_items(Stream& s) noexcept {
  MutexLock lock(s.watch_mutex);
  for (auto it = s.watchers.begin(); it != s.watchers.end();) {
    Watcher& w = *it++;
    if (!w.survives_fork()) continue;
    unlink_watcher_locked(s, w);
    w.on_closed(s);
  }
}

}  // namespace rsock::stream
