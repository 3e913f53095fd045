#include "core/poll/instance.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <utility>

#include "core/os/os.h"
#include "core/stream/moves.h"

namespace rsock::poll {
namespace {

constexpr uint32_t kInterest = EPOLLIN | EPOLLPRI | EPOLLOUT | EPOLLRDNORM | EPOLLRDBAND |
                               EPOLLWRNORM | EPOLLWRBAND | EPOLLRDHUP;

/// Changes a registration even where MOD is not allowed (EPOLLEXCLUSIVE: epoll_ctl(2)).
void register_as(int epfd, int fd, uint32_t events, uint64_t data) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  const auto r = os::epoll_ctl(epfd, EPOLL_CTL_MOD, fd, &event);
  if (r || r.error() != EINVAL) return;
  (void)os::epoll_ctl(epfd, EPOLL_CTL_DEL, fd, nullptr);
  (void)os::epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &event);
}

}  // namespace

void Item::on_maybe_ready(stream::Stream&) noexcept {
  Instance& in = *instance;
  {
    MutexLock lock(in.mutex);
    if (!managed) return;
    in.make_ready_locked(*this, true);
  }
  in.ring();
}

void Item::on_path_changed(stream::Stream& s) noexcept {
  Instance& in = *instance;
  MutexLock lock(in.mutex);
  const bool channel = s.doorbell_fd.load(std::memory_order_acquire) >= 0;
  if (channel && !managed) in.manage_locked(*this);
  if (!channel && managed) in.unmanage_locked(*this);
}

void Item::on_closed(stream::Stream&) noexcept {
  Instance& in = *instance;
  MutexLock lock(in.mutex);
  in.forget_locked(*this);
}

void Instance::forget_locked(Item& item) noexcept {
  if (item.managed) {
    if (item.doorbell >= 0) (void)os::epoll_ctl(epfd, EPOLL_CTL_DEL, item.doorbell, nullptr);
    managed_items.erase(managed_items.iterator_to(item));
    managed_count.fetch_sub(1, std::memory_order_release);
  }
  if (item.linked_ready) ready.erase(ready.iterator_to(item));
  release_item(item);
}

void Instance::ring() noexcept {
  const uint64_t one = 1;
  if (kick) (void)os::write(kick.get(), &one, sizeof(one));
}

void Instance::manage_locked(Item& item) noexcept {
  if (!kick) {
    if (const auto fd = os::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
      if (auto owned = os::raise(*fd)) {
        kick = std::move(*owned);
        epoll_event event{};
        event.events = EPOLLIN | EPOLLET;
        event.data.u64 = kick_data();
        (void)os::epoll_ctl(epfd, EPOLL_CTL_ADD, kick.get(), &event);
      }
    }
  }
  item.managed = true;
  item.seen_published = UINT64_MAX;  // the channel counts from its own beginning
  item.doorbell = item.stream->doorbell_fd.load(std::memory_order_acquire);
  managed_items.push_back(item);
  managed_count.fetch_add(1, std::memory_order_seq_cst);  // pairs with epoll_wait()
  const auto data = reinterpret_cast<uint64_t>(&item);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = data;
  // EEXIST: the same stream is in this instance under another number as well; its item will do.
  (void)os::epoll_ctl(epfd, EPOLL_CTL_ADD, item.doorbell, &event);
  // OUT is nearly always true on a silent TCP connection: the registration itself wakes a waiting
  // thread.
  register_as(epfd, item.fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, data);
  make_ready_locked(item, true);
}

void Instance::unmanage_locked(Item& item) noexcept {
  item.managed = false;
  managed_items.erase(managed_items.iterator_to(item));
  managed_count.fetch_sub(1, std::memory_order_release);
  if (item.doorbell >= 0) (void)os::epoll_ctl(epfd, EPOLL_CTL_DEL, item.doorbell, nullptr);
  item.doorbell = -1;
  if (item.linked_ready) {
    ready.erase(ready.iterator_to(item));
    item.linked_ready = false;
  }
  // A spent ONESHOT stays registered without events, as the kernel keeps it.
  register_as(epfd, item.fd, item.disabled ? (item.user.events & ~kInterest) : item.user.events,
              item.user.data.u64);
}

void Instance::make_ready_locked(Item& item, bool local) noexcept {
  if (local) item.local_news = true;
  if (item.linked_ready) return;
  ready.push_back(item);
  item.linked_ready = true;
}

uint32_t Instance::events_now(Item& item) noexcept {
  const auto interest = static_cast<short>(item.user.events & kInterest);
  return static_cast<uint32_t>(
             static_cast<unsigned short>(stream::ready_events(*item.stream, item.fd, interest))) &
         (item.user.events | EPOLLERR | EPOLLHUP);
}

/// EPOLLET: what had come when the look began. Taken before the events are computed: bytes that
/// arrive in between are then news for the next look rather than for none.
Instance::Arrivals Instance::arrivals(Item& item) noexcept {
  stream::Stream& s = *item.stream;
  MutexLock lock(s.rx.mutex);
  // Without a ring the kernel's edges are passed on as they come.
  if (!s.channel || s.rx.state != stream::RxState::kRing) return {item.seen_published, true};
  return {s.channel->rx_published() + s.received[0].load(std::memory_order_relaxed), false};
}

/// EPOLLET: is there something that the last report did not know? Room alone is news only to who
/// was told to wait for it (SOCK_NOSPACE), or after ADD and MOD.
bool Instance::is_edge_locked(Item& item, uint32_t events, const Arrivals& arrivals) noexcept {
  constexpr uint32_t kRoom = EPOLLOUT | EPOLLWRNORM | EPOLLWRBAND;
  const bool fresh = std::exchange(item.fresh, false);
  const bool room =
      (events & kRoom) != 0 && item.stream->tx_nospace.exchange(false, std::memory_order_relaxed);
  const bool local = std::exchange(item.local_news, false);
  const bool arrived = arrivals.by_kernel || arrivals.count != item.seen_published;
  const bool edge = fresh || room || ((local || arrived) && (events & ~kRoom) != 0);
  if (edge) item.seen_published = arrivals.count;
  return edge;
}

/// The order is the proof (PROTOCOL.md, "Waiting"): drain, arm, and the caller checks once more.
/// The doorbell is registered edge-triggered, so it need not be empty; it is drained now and then,
/// before it is full and rings no more.
void Instance::drain_and_arm_locked(Item& item) noexcept {
  constexpr uint32_t kDrainEvery = 32;
  const std::shared_ptr<stream::Channel> channel = stream::channel_of(*item.stream);
  if (!channel) return;
  if (++item.looks_unanswered >= kDrainEvery && robbed_count_ < kMaxRobbed) {
    item.looks_unanswered = 0;
    if (channel->drain_wait_fd()) robbed_[robbed_count_++] = &item;
  }
  stream::arm_for_poll(*channel, static_cast<short>(item.user.events & kInterest));
}

void Instance::tell_robbed() noexcept {
  Item* robbed[kMaxRobbed];
  stream::Stream* streams[kMaxRobbed];
  size_t n = 0;
  {
    MutexLock lock(mutex);
    if (robbed_count_ == 0) return;
    for (size_t i = 0; i < robbed_count_; ++i) {
      robbed[n] = robbed_[i];
      streams[n] = robbed_[i]->stream;
      if (streams[n] != nullptr) ++n;
    }
    robbed_count_ = 0;
  }
  for (size_t i = 0; i < n; ++i) stream::wake_watchers_except(*streams[i], robbed[i]);
}

/// True: *out is to be reported. The item's place in `ready` is left right (invariants 1 to 3).
bool Instance::look_locked(Item& item, epoll_event* out) noexcept {
  const bool edge = (item.user.events & EPOLLET) != 0;
  uint32_t events = 0;
  for (int round = 0; round < 2 && events == 0; ++round) {
    if (round == 1) drain_and_arm_locked(item);
    const Arrivals before = edge ? arrivals(item) : Arrivals{};
    events = events_now(item);
    if (events != 0 && edge && !is_edge_locked(item, events, before)) events = 0;
  }
  if (events == 0) return false;
  *out = epoll_event{events, item.user.data};
  if ((item.user.events & EPOLLONESHOT) != 0) item.disabled = true;
  return true;
}

/// An edge-triggered item that was reported, while others sleep: armed at once, so that the next
/// bytes wake one of them, and none is woken to find nothing. A thread alone saves the peer's ring.
bool Instance::rests_after_edge_locked(Item& item) noexcept {
  if ((item.user.events & EPOLLET) == 0 || sleepers.load(std::memory_order_seq_cst) == 0) {
    return false;
  }
  drain_and_arm_locked(item);
  const Arrivals now = arrivals(item);
  return (now.by_kernel || now.count == item.seen_published) &&
         !item.stream->tx_nospace.load(std::memory_order_relaxed);
}

int Instance::collect_locked(epoll_event* events, int max) noexcept {
  int n = 0;
  size_t left = ready.size();
  while (left-- > 0 && n < max) {
    Item& item = ready.front();
    ready.pop_front();
    item.linked_ready = false;
    if (item.disabled) continue;
    if (!look_locked(item, &events[n])) continue;
    ++n;
    // Stays in line, at the end (fairness): level-triggered because it may still be ready,
    // edge-triggered because it is not armed and the next wait has to look whether anything came.
    if (!item.disabled && !rests_after_edge_locked(item)) make_ready_locked(item, false);
  }
  return n;
}

int Instance::sort_locked(epoll_event* events, int n) noexcept {
  int kept = 0;
  for (int i = 0; i < n; ++i) {
    const uint64_t data = events[i].data.u64;
    if (is_kick_data(data)) continue;
    Item* item = item_from_data(data);
    if (item == nullptr) {
      events[kept++] = events[i];
      continue;
    }
    if (item->instance != this || !item->managed)
      continue;  // late news of a registration that changed
    if ((events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
      // The end of the connection, or of the channel, seen before the keeper has seen it.
      item->stream->tcp_event.store(true, std::memory_order_release);
    }
    // OUT of a silent TCP connection is no news, unless the kernel still carries that direction.
    const bool ended = (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    const bool room =
        (events[i].events & EPOLLOUT) != 0 && stream::kernel_part(*item->stream, POLLOUT) != 0;
    make_ready_locked(*item, ended || room);
  }
  return kept;
}

}  // namespace rsock::poll
