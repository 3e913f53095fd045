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
  for (Watcher& w : s.watchers) w.on_path_changed(s);
}

void drop_sleepers_in_child(Stream& s) noexcept {
  MutexLock lock(s.watch_mutex);
  for (auto it = s.watchers.begin(); it != s.watchers.end();) {
    Watcher& w = *it++;
    if (!w.survives_fork()) s.watchers.erase(s.watchers.iterator_to(w));
  }
}

void unlink_watchers(Stream& s) noexcept {
  MutexLock lock(s.watch_mutex);
  while (!s.watchers.empty()) {
    Watcher& w = s.watchers.front();
    s.watchers.pop_front();
    w.on_closed(s);
  }
}

void unlink_items(Stream& s) noexcept {
  MutexLock lock(s.watch_mutex);
  for (auto it = s.watchers.begin(); it != s.watchers.end();) {
    Watcher& w = *it++;
    if (!w.survives_fork()) continue;
    s.watchers.erase(s.watchers.iterator_to(w));
    w.on_closed(s);
  }
}

}  // namespace rsock::stream
