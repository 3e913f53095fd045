#include "core/poll/instance.h"
#include "core/base/try_copy.h"

#include <poll.h>

#include <utility>

#include "core/os/os.h"
#include "core/stream/moves.h"

namespace rsock::poll {
void Instance::ring() noexcept {
  const uint64_t one = 1;
  if (kick) (void)os::write(kick.get(), &one, sizeof(one));
}

void Instance::make_ready_locked(Item& item, bool local) noexcept {
  if (local) item.local_news = true;
  if (item.linked_ready) return;
  unlink_locked(item);
  ready.push_back(item);
  item.linked_ready = true;
}

void Instance::unlink_locked(Item& item) noexcept {
  if (std::exchange(item.linked_ready, false)) ready.erase(ready.iterator_to(item));
  if (std::exchange(item.linked_drowsy, false)) drowsy.erase(drowsy.iterator_to(item));
}

/// Most of what a thread arms when it goes to sleep would ring for one that is awake: the first
/// ring woke it, and each of the others costs its sender a system call.
void Instance::rouse_locked() noexcept {
  while (!drowsy.empty()) {
    Item& item = drowsy.front();
    unlink_locked(item);
    if (++item.misses >= kMostMisses || sleepers.load(std::memory_order_seq_cst) > 0) continue;
    // model/sleep.pml, DISARM. The bit is one for all of this process that sleep on this stream's
    // doorbell.
    stream::Stream& s = *item.stream;
    if (s.watching.load(std::memory_order_seq_cst) != 1) continue;
    if (robbed_count_ == kMaxRobbed) continue;  // there has to be a place for who comes in between
    const std::shared_ptr<stream::Channel> channel = stream::channel_of(s);
    if (!channel || !channel->rx_disarm()) continue;
    make_ready_locked(item, false);
    if (s.watching.load(std::memory_order_seq_cst) == 1) continue;
    // One came in between, and may have armed before us: as if its ring had been taken away.
    channel->rx_arm(transport::Sleep::kDoorbell);
    robbed_[robbed_count_++] = &item;
  }
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
  if (!s.channel || s.rx.state != stream::RxState::kRing) return {item.seen_published, true};
  return {s.channel->rx_published() + s.received[0].load(std::memory_order_relaxed), false};
}

/// EPOLLET: is there something that the last report did not know? While the kernel carries a
/// direction the kernel's own edges are the news of it, and once, that it came to do so: but not if
/// only because the peer let go. Then the end is the news, in one edge with all that holds, and the
/// kernel may hear of it later than we do. In the ring: more bytes than then; room is news only to
/// who was told to wait for it (SOCK_NOSPACE), or after ADD and MOD.
bool Instance::is_edge_locked(Item& item, uint32_t events, const Arrivals& arrivals) noexcept {
  constexpr uint32_t kRoom = EPOLLOUT | EPOLLWRNORM | EPOLLWRBAND;
  stream::Stream& s = *item.stream;
  const bool fresh = std::exchange(item.fresh, false);
  const bool local = std::exchange(item.local_news, false);
  const uint32_t said = std::exchange(item.kernel_said, 0);
  const bool tx_by_kernel = !s.tx.gate.managed();
  const bool tx_moved = std::exchange(item.tx_by_kernel, tx_by_kernel) != tx_by_kernel &&
                        !(tx_by_kernel && s.peer_gone.load(std::memory_order_acquire));
  const bool rx_moved = std::exchange(item.rx_by_kernel, arrivals.by_kernel) != arrivals.by_kernel;
  const bool room =
      (events & kRoom) != 0 &&
      (s.tx_nospace.exchange(false, std::memory_order_relaxed) || tx_moved || (said & kRoom) != 0);
  const bool arrived = rx_moved || (arrivals.by_kernel ? (said & ~kRoom) != 0
                                                       : arrivals.count != item.seen_published);
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
  // The count is the stream's: an item may go and come between any two looks (epoll_ctl).
  std::atomic<uint32_t>& armed = item.stream->armed_undrained;
  if (armed.fetch_add(1, std::memory_order_relaxed) + 1 >= kDrainEvery &&
      robbed_count_ < kMaxRobbed) {
    armed.store(0, std::memory_order_relaxed);
    if (channel->drain_wait_fd()) robbed_[robbed_count_++] = &item;
  }
  auto interest = static_cast<short>(item.user.events & kInterest);
  // An edge for room comes to who was told to wait only, and a sender that is told so later arms
  // for it by itself (send_managed()). After ADD and MOD room is news in any case.
  if ((item.user.events & EPOLLET) != 0 && !item.fresh &&
      !item.stream->tx_nospace.load(std::memory_order_seq_cst)) {
    interest = static_cast<short>(interest & ~(POLLOUT | POLLWRNORM | POLLWRBAND));
  }
  stream::arm_for_poll(*channel, interest);
}

void Instance::modified_locked(Item& item) noexcept {
  item.fresh = true;
  make_ready_locked(item, true);
  // Linux looks at once, and wakes a thread if something holds.
  if (sleepers.load(std::memory_order_seq_cst) <= 0) return;
  drain_and_arm_locked(item);
  if (events_now(item) != 0) ring();
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
bool Instance::look_locked(Item& item, bool arm, epoll_event* out) noexcept {
  const bool edge = (item.user.events & EPOLLET) != 0;
  uint32_t events = 0;
  for (int round = 0; round < (arm ? 2 : 1) && events == 0; ++round) {
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
  if ((item.user.events & EPOLLET) == 0 || sleepers.load(std::memory_order_seq_cst) <= 0) {
    return false;
  }
  drain_and_arm_locked(item);
  const Arrivals now = arrivals(item);
  return (now.by_kernel || now.count == item.seen_published) &&
         !item.stream->tx_nospace.load(std::memory_order_relaxed);
}

/// What the kernel gave in this call, from just before the lift, has the program's own data: the
/// stream may be among it. A program that closes it at its first event must not meet it again in
/// the same answer; the next call looks.
static bool is_among(const Item& item, const epoll_event* events, int have) noexcept {
  return find_data(events, have, item.user.data.u64) < have;
}

/// A look costs some 50 ns, a ring of the doorbell some 3 us at its sender and 1 us here: as many
/// looks in vain as a ring would have cost. Not where other threads sleep on this instance: what is
/// left unarmed would have to be theirs to look at.
bool Instance::may_be_warm_locked(const Item& item, size_t others) const noexcept {
  constexpr size_t kMostWarm = 256;
  stream::Stream& s = *item.stream;
  return item.misses < kMostMisses && others <= kMostWarm &&
         sleepers.load(std::memory_order_seq_cst) <= 0 && s.rx.gate.managed() &&
         s.tx.gate.managed() && !s.tcp_event.load(std::memory_order_relaxed);
}

int Instance::collect_locked(epoll_event* events, int have, int max, bool arm) noexcept {
  const int n = look_at_all_locked(events, have, max, false);
  if (!arm || have + n != 0 || ready.empty()) return n;  // or a bad array
  return look_at_all_locked(events, have, max, true);
}

int Instance::look_at_all_locked(epoll_event* events, int have, int max, bool arm) noexcept {
  int n = have;
  const size_t all = ready.size();
  size_t left = all;
  while (left-- > 0 && n < max) {
    Item& item = ready.front();
    ready.pop_front();
    item.linked_ready = false;
    if (item.disabled) continue;
    if (is_among(item, events, have)) {
      make_ready_locked(item, false);
      continue;
    }
    const bool warm = may_be_warm_locked(item, all);
    epoll_event found{};
    if (!look_locked(item, arm || !warm, &found)) {
      if (warm && !arm) {
        ++item.misses;
        make_ready_locked(item, false);
      } else if (warm && !item.linked_ready) {
        drowsy.push_back(item);
        item.linked_drowsy = true;
      }
      continue;
    }
    if (!try_put(&events[n], found)) {
      // What stands before it counts, the rest stays news (ep_send_events() in fs/eventpoll.c).
      item.disabled = false;
      item.fresh = true;
      make_ready_locked(item, true);
      return n != have ? n - have : -EFAULT;
    }
    item.misses = 0;
    ++n;
    // Stays in line, at the end (fairness): level-triggered because it may still be ready,
    // edge-triggered because it is not armed and the next wait has to look whether anything came.
    if (!item.disabled && !rests_after_edge_locked(item)) make_ready_locked(item, false);
  }
  return n - have;
}

int Instance::sort_locked(epoll_event* events, int n) noexcept {
  int kept = 0;
  for (int i = 0; i < n; ++i) {
    const EventData data = EventData::parse(events[i].data.u64);
    if (data.tag == EventData::Tag::kProgram) {
      events[kept++] = events[i];
      continue;
    }
    if (data.tag == EventData::Tag::kKick) continue;
    Item& item = *data.item;
    if (item.instance != this) continue;  // late news of a registration that is gone
    if (!item.managed) {
      // Late news again, or, for EPOLLONESHOT, the kernel's word. One that was modified meanwhile
      // has been looked at anew by the kernel and is reported by that, if it still holds.
      if (data.tag != EventData::Tag::kOneshot || data.arming != item.arming) continue;
      item.disabled = true;
      events[kept++] = epoll_event{events[i].events, item.user.data};
      continue;
    }
    const bool ended = (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    // The end of the connection, or of the channel, seen before the keeper has seen it.
    if (ended) item.stream->tcp_event.store(true, std::memory_order_release);
    // OUT of a silent TCP connection is no news, unless the kernel still carries that direction.
    if (data.tag != EventData::Tag::kDoorbell) {
      const bool silent = stream::kernel_part(*item.stream, POLLOUT) == 0;
      item.kernel_said |= events[i].events & ~(silent ? static_cast<uint32_t>(EPOLLOUT) : 0u);
    }
    make_ready_locked(item, ended);
    if (data.tag == EventData::Tag::kDoorbell && sharing != 0) {
      for (Item& other : managed_items) {
        if (other.stream == item.stream && &other != &item) make_ready_locked(other, ended);
      }
    }
  }
  return kept;
}

bool Instance::must_nap_locked() noexcept {
  if (deaf == 0) return !has_kick_locked();
  for (Item& item : managed_items) {
    if (item.deaf) make_ready_locked(item, false);
  }
  return true;
}

}  // namespace rsock::poll
