// What the kernel's instance holds for each item, and how that changes when a channel comes or
// goes.
//
// On TCP: the program's own registration, except that EPOLLONESHOT is under our data, because
// whether it is spent has to be known when a channel comes. With a channel: ours, edge-triggered,
// and the doorbell's. Once a forked process shares it: the program's own, and no channel comes.

#include <sys/eventfd.h>

#include <utility>

#include "core/os/os.h"
#include "core/poll/instance.h"

namespace rsock::poll {
namespace {

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

void Item::on_path_changed(stream::Stream& s) noexcept RSOCK_NO_TSA {
  Instance& in = *instance;
  MutexLock lock(in.mutex);
  const bool channel = s.doorbell_fd.load(std::memory_order_acquire) >= 0;
  if (channel && !managed) in.manage_locked(*this, false);
  if (channel || !managed) return;
  if (parked) {
    stream::unlink_watcher_locked(s, *this);
    return in.forget_locked(*this, true);
  }
  in.unmanage_locked(*this);
}

void Item::on_closed(stream::Stream& s) noexcept {
  Instance& in = *instance;
  MutexLock lock(in.mutex);
  // The keeper goes on with a copy of the descriptor, or close waits (SO_LINGER): the file lives
  // on, and so would what the kernel has of it here. The program would hear of a number that it has
  // closed.
  const bool goes_on = s.has_channel.load(std::memory_order_acquire);
  const int number = fd;
  in.forget_locked(*this, !goes_on);
  if (goes_on) (void)os::epoll_ctl(in.epfd, EPOLL_CTL_DEL, number, nullptr);
}

bool Instance::park_locked(Item& item) noexcept {
  // The others have rules of their own for a later ADD or MOD, or for who is woken.
  constexpr uint32_t kPlain = kInterest | EPOLLET | EPOLLERR | EPOLLHUP;
  if (!item.managed || (item.user.events & ~kPlain) != 0 || !item.owns_doorbell) return false;
  unlink_locked(item);
  item.disabled = item.parked = true;
  return true;
}

/// The kernel's registration is both processes' from now on, and each changes it by the program's
/// word only: one that closes its copy must leave it to the other, who does not know our data.
void Item::on_shared_locked() noexcept RSOCK_NO_TSA {
  if (std::exchange(shared, true) || managed || disabled) return;
  if ((user.events & EPOLLONESHOT) == 0) return;
  // A shot that was fired just before, and not sorted yet, is void: the kernel looks anew.
  ++arming;
  register_as(instance->epfd, fd, user.events, user.data.u64);
}

bool Item::on_unshared(bool locked) noexcept RSOCK_NO_TSA {
  if (!locked) instance->mutex.lock();
  shared = false;
  // Whether a shot was fired meanwhile the kernel alone knows.
  const bool known = (user.events & EPOLLONESHOT) == 0;
  if (!locked) instance->mutex.unlock();
  return known;
}

void Instance::forget_locked(Item& item, bool registered) noexcept {
  const bool ours = item.managed || (!item.shared && (item.user.events & EPOLLONESHOT) != 0);
  if (item.managed) leave_channel_locked(item);
  // The file may live on, under another name or in another process: what the kernel keeps then must
  // not carry our data. A ONESHOT that is spent stays so only without a registration.
  if (registered && ours) {
    if (item.disabled) {
      (void)os::epoll_ctl(epfd, EPOLL_CTL_DEL, item.fd, nullptr);
    } else {
      register_as(epfd, item.fd, item.user.events, item.user.data.u64);
    }
  }
  release_item(item);
}

bool Instance::has_kick_locked() noexcept {
  if (kick) return true;
  auto owned = os::make_internal([] { return os::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!owned) return false;
  if (!os::epoll_add(epfd, owned->get(), EPOLLIN | EPOLLET, EventData::kick())) return false;
  kick = std::move(*owned);
  return true;
}

/// The doorbell is in the kernel's instance once, for the first of the stream's items.
void Instance::add_doorbell_locked(Item& item) noexcept {
  const auto r = os::epoll_add(epfd, item.doorbell, EPOLLIN | EPOLLET,
                               EventData::of(item, EventData::Tag::kDoorbell));
  item.owns_doorbell = r.has_value();
  // The same stream is in this instance under another number as well.
  item.shares_doorbell = !r && r.error() == EEXIST;
  if (item.shares_doorbell) ++sharing;
  // Else no memory, or no more watches (epoll(7), max_user_watches).
  item.deaf = !item.owns_doorbell && !item.shares_doorbell;
  if (item.deaf) ++deaf;
}

void Instance::drop_doorbell_locked(Item& item) noexcept {
  if (item.doorbell >= 0 && item.owns_doorbell) {
    (void)os::epoll_ctl(epfd, EPOLL_CTL_DEL, item.doorbell, nullptr);
  }
  if (item.shares_doorbell) --sharing;
  if (item.deaf) --deaf;
  item.doorbell = -1;
  const bool heir_needed = item.owns_doorbell && sharing != 0;
  item.owns_doorbell = item.shares_doorbell = item.deaf = false;
  if (!heir_needed) return;
  for (Item& other : managed_items) {
    if (other.stream != item.stream || !other.shares_doorbell) continue;
    other.shares_doorbell = false;
    --sharing;
    return add_doorbell_locked(other);
  }
}

void Instance::manage_locked(Item& item, bool in_kernel) noexcept {
  (void)has_kick_locked();
  item.managed = true;
  item.rx_by_kernel = item.tx_by_kernel = true;
  item.kernel_said = 0;
  item.seen_published = UINT64_MAX;  // the channel counts from its own beginning
  item.doorbell = item.stream->doorbell_fd.load(std::memory_order_acquire);
  managed_items.push_back(item);
  managed_count.fetch_add(1, std::memory_order_seq_cst);  // pairs with epoll_wait()
  add_doorbell_locked(item);
  // OUT is nearly always true on a silent TCP connection: the registration itself wakes a waiting
  // thread.
  if (!in_kernel) register_as(epfd, item.fd, kOurEvents, EventData::of(item));
  make_ready_locked(item, true);
}

void Instance::leave_channel_locked(Item& item) noexcept {
  item.managed = false;
  managed_items.erase(managed_items.iterator_to(item));
  managed_count.fetch_sub(1, std::memory_order_release);
  drop_doorbell_locked(item);
  unlink_locked(item);
}

void Instance::unmanage_locked(Item& item) noexcept {
  leave_channel_locked(item);
  if (item.disabled) {
    // A spent ONESHOT: the kernel adds ERR and HUP to whatever is asked for, so it stays under our
    // data, where they are left out.
    register_as(epfd, item.fd, item.user.events & ~kInterest, EventData::of(item));
  } else {
    const epoll_event event = plain_locked(item);
    register_as(epfd, item.fd, event.events, event.data.u64);
  }
}

epoll_event Instance::plain_locked(Item& item) noexcept {
  epoll_event event = item.user;
  if ((event.events & EPOLLONESHOT) != 0 && !item.shared) {
    ++item.arming;
    event.data.u64 = EventData::of(item, EventData::Tag::kOneshot);
  }
  return event;
}

}  // namespace rsock::poll
