// epoll_ctl: which streams are in which instance, from before they are streams.

#include <utility>
#include <vector>

#include "core/base/try_copy.h"
#include "core/os/os.h"
#include "core/poll/instance.h"
#include "core/poll/readiness_ops.h"
#include "core/stream/hand_over.h"
#include "core/stream/moves.h"

namespace rsock::poll {
namespace {

using stream::FdKind;
using stream::FdTable;
using stream::Stream;

constexpr const char* kNested = "in a nested epoll instance";
constexpr const char* kForeign = "in an epoll instance that came from elsewhere";

/// The item of (instance, fd) among the stream's watchers. Watch lock held.
Item* find_item_locked(Stream& s, Instance& in, int fd) noexcept RSOCK_REQUIRES(s.watch_mutex) {
  Item* found = nullptr;
  for_each_item_locked(s, [&](Item& item) {
    if (item.instance == &in && item.fd == fd) found = &item;
  });
  return found;
}

/// Closed meanwhile: the watchers of the stream have been told, a new one would be linked to
/// another's memory. The number leaves the table before that, so under the lock the table decides.
bool is_still_locked(Stream& s, int fd) noexcept RSOCK_REQUIRES(s.watch_mutex) {
  return FdTable::stream(fd) == &s;
}

/// EPOLLEXCLUSIVE goes with few others, and is never modified (do_epoll_ctl()).
bool acceptable(int op, uint32_t events, uint32_t before) noexcept {
  constexpr uint32_t kWithExclusive =
      EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP | EPOLLWAKEUP | EPOLLET | EPOLLEXCLUSIVE;
  if (op == EPOLL_CTL_MOD) return ((events | before) & EPOLLEXCLUSIVE) == 0;
  return (events & EPOLLEXCLUSIVE) == 0 || (events & ~kWithExclusive) == 0;
}

long ask(int epfd, int op, int fd, epoll_event event) noexcept {
  const auto r = os::epoll_ctl(epfd, op, fd, &event);
  return r ? 0 : -value(r.error());
}

/// Links a new item: the stream is in the kernel's instance under the number fd, or will be.
void link_locked(Instance& in, Stream& s, int fd, const epoll_event& event, Item& item) noexcept
    RSOCK_REQUIRES(s.watch_mutex, in.mutex) {
  item.instance = &in;
  item.stream = &s;
  item.fd = fd;
  item.user = event;
  stream::link_watcher_locked(s, item);
}

bool has_doorbell(const Stream& s) noexcept {
  return s.doorbell_fd.load(std::memory_order_acquire) >= 0;
}

/// The item of (instance, fd), if it was deleted and is kept, is the program's again.
bool unpark_locked(Instance& in, Stream& s, int fd, const epoll_event& event) noexcept
    RSOCK_REQUIRES(s.watch_mutex, in.mutex) {
  Item* item = find_item_locked(s, in, fd);
  if (item == nullptr || !item->parked || !is_still_locked(s, fd)) return false;
  item->parked = item->disabled = false;
  item->user = event;
  item->misses = 0;
  in.modified_locked(*item);
  return true;
}

long add_stream(Instance& in, Stream& s, int fd, const epoll_event& event) {
  MutexLock watch(s.watch_mutex);
  if (s.watching.load(std::memory_order_relaxed) != 0) {
    evict_parked_locked(s, &in);
    MutexLock lock(in.mutex);
    if (acceptable(EPOLL_CTL_ADD, event.events, 0) && unpark_locked(in, s, fd, event)) return 0;
  }
  Item* item = acquire_item();
  if (item == nullptr) return -ENOMEM;
  // The kernel's registration, the item and the stream's channel change together under these locks:
  // a channel that is attached meanwhile waits in path_changed().
  MutexLock lock(in.mutex);
  const bool lifted = has_doorbell(s);
  item->user = event;
  long r = 0;
  if (lifted) {
    // Never the program's events: a silent TCP connection is writable, and another thread would be
    // told so.
    r = acceptable(EPOLL_CTL_ADD, event.events, 0)
            ? ask(in.epfd, EPOLL_CTL_ADD, fd, {kOurEvents, {.u64 = EventData::of(*item)}})
            : -EINVAL;
  } else {
    r = ask(in.epfd, EPOLL_CTL_ADD, fd, in.plain_locked(*item));
  }
  if (r != 0 || !is_still_locked(s, fd)) {
    release_item(*item);
    return r;
  }
  link_locked(in, s, fd, event, *item);
  if (lifted) {
    item->fresh = true;
    in.manage_locked(*item, true);
  }
  return r;
}

long modify_stream(Instance& in, Stream& s, int fd, const epoll_event& event) {
  MutexLock watch(s.watch_mutex);
  MutexLock lock(in.mutex);
  Item* item = find_item_locked(s, in, fd);
  if (item == nullptr) {
    const long r = ask(in.epfd, EPOLL_CTL_MOD, fd, event);
    // Added in a way that nobody told us of.
    if (r == 0 && is_still_locked(s, fd) && (item = acquire_item()) != nullptr) {
      link_locked(in, s, fd, event, *item);
      if (has_doorbell(s)) in.manage_locked(*item, false);
    }
    return r;
  }
  if (!item->managed) {
    const epoll_event before = std::exchange(item->user, event);
    const long r = ask(in.epfd, EPOLL_CTL_MOD, fd, in.plain_locked(*item));
    if (r != 0) {
      item->user = before;
      --item->arming;
    } else {
      item->disabled = false;
    }
    return r;
  }
  if (item->parked) return -ENOENT;
  if (!acceptable(EPOLL_CTL_MOD, event.events, item->user.events)) return -EINVAL;
  item->user = event;
  item->disabled = false;
  in.modified_locked(*item);
  return 0;
}

long remove_stream(Instance& in, Stream& s, int fd, KernelCall kernel) {
  MutexLock watch(s.watch_mutex);
  MutexLock lock(in.mutex);
  Item* item = find_item_locked(s, in, fd);
  if (item != nullptr && item->parked) return -ENOENT;
  if (item != nullptr && in.park_locked(*item)) return 0;
  const long r = kernel();
  if (r != 0 || item == nullptr) return r;
  stream::unlink_watcher_locked(s, *item);
  in.forget_locked(*item, false);
  return r;
}

/// A registration that was made before the socket was connected finds its stream.
void adopt_one(Stream& s, int fd, Item& item) noexcept {
  Instance* in = item.instance;
  if (in == nullptr || in->nested.load(std::memory_order_acquire)) {
    stream::pin_to_tcp(fd, in == nullptr ? kForeign : kNested);
    return release_item(item);
  }
  MutexLock watch(s.watch_mutex);
  MutexLock lock(in->mutex);
  // The kernel forgets a registration with the socket, whatever closes it: is it there? Asked by
  // adding it once more, under data that epoll_wait leaves out.
  epoll_event probe{};
  probe.data.u64 = EventData::kick();
  const auto added = os::epoll_ctl(in->epfd, EPOLL_CTL_ADD, fd, &probe);
  if (added) (void)os::epoll_ctl(in->epfd, EPOLL_CTL_DEL, fd, nullptr);
  if (added || added.error() != EEXIST || !is_still_locked(s, fd) ||
      find_item_locked(s, *in, fd) != nullptr) {
    return release_item(item);
  }
  link_locked(*in, s, fd, item.user, item);
  if (has_doorbell(s)) in->manage_locked(item, false);
}

/// epoll_ctl of a socket that is not connected: a listener, or a stream in the making (Asio, Netty
/// and others add it first and connect it then).
long control_unconnected(Instance* in, int op, int fd, const epoll_event* event,
                         KernelCall kernel) {
  const long r = kernel();
  if (r != 0) return r;
  if (op == EPOLL_CTL_DEL) {
    forget_unconnected(in, fd);
  } else {
    remember_unconnected(in, fd, *event);
  }
  // connect() in another thread has made the stream meanwhile, and found nothing to adopt.
  if (Stream* s = FdTable::stream(fd)) adopt_stream(*s, fd);
  return r;
}

/// The descriptors of the instance's streams.
struct Members {
  Instance* instance;
  std::vector<int> fds;
};

void collect_members(Stream& s, void* arg) noexcept {
  auto& members = *static_cast<Members*>(arg);
  MutexLock watch(s.watch_mutex);
  for_each_item_locked(s, [&members](const Item& item) {
    if (item.instance == members.instance && !item.parked) members.fds.push_back(item.fd);
  });
}

/// In an epoll instance under that number, as the program sees it.
bool is_watched_as(Stream& s, int fd) noexcept {
  MutexLock watch(s.watch_mutex);
  bool found = false;
  for_each_item_locked(s, [&](Item& item) {
    if (item.fd != fd) return;
    MutexLock lock(item.instance->mutex);
    found = found || !item.parked;
  });
  return found;
}

}  // namespace

void adopt_stream(Stream& s, int fd) noexcept {
  for (Item* item = take_unconnected(fd); item != nullptr;) {
    Item* next = std::exchange(item->next_unconnected, nullptr);
    adopt_one(s, fd, *item);
    item = next;
  }
}

/// Linux keeps the registration, under a number that soon is another file's, for as long as the
/// connection is open. We could not change it any more: it becomes the program's own, and the
/// stream stays where it is the truth, with its unread bytes before anybody looks again.
void leave_to_kernel(Stream& s, int fd) noexcept {
  {
    // What is kept under the number goes with it: later it would be another file's.
    MutexLock watch(s.watch_mutex);
    forget_parked_locked(s, [fd](const Item& item) { return item.fd == fd; });
  }
  if (!is_watched_as(s, fd)) return;
  constexpr const char* kReason = "in epoll under a number that was closed";
  if (stream::pin(s, kReason)) {
    (void)stream::set_down_and_wait(
        s, kReason, {Deadline::after_ns(stream::kHandOverNs), Deadline::after_ns(0)});
  }
  MutexLock watch(s.watch_mutex);
  for_each_item_locked(s, [&](Item& item) RSOCK_NO_TSA {
    if (item.fd != fd) return;
    stream::unlink_watcher_locked(s, item);
    Instance& in = *item.instance;
    MutexLock lock(in.mutex);
    in.forget_locked(item, true);
  });
}

void Instance::become_nested() noexcept {
  nested.store(true, std::memory_order_release);
  Members members{this, {}};
  stream::for_each_stream(collect_members, &members);
  for (const int fd : members.fds) stream::pin_to_tcp(fd, kNested);
}

Instance* instance_of(int epfd) noexcept {
  return static_cast<Instance*>(FdTable::object(epfd, FdKind::kEpoll));
}

void note_watched(int fd) noexcept {
  Instance* in = instance_of(fd);
  if (in != nullptr && !in->nested.load(std::memory_order_acquire)) in->become_nested();
}

long epoll_ctl(int epfd, int op, int fd, epoll_event* event, KernelCall kernel) {
  Instance* in = instance_of(epfd);
  Stream* s = FdTable::stream(fd);
  if (s == nullptr) {
    if (op == EPOLL_CTL_ADD) note_watched(fd);
    return FdTable::kind(fd) == FdKind::kTcpSocket ? control_unconnected(in, op, fd, event, kernel)
                                                   : kernel();
  }
  if (in == nullptr) {
    // Inherited or received: what it does is out of our sight.
    stream::pin_to_tcp(fd, kForeign);
    return kernel();
  }
  if (in->nested.load(std::memory_order_acquire)) {
    stream::pin_to_tcp(fd, kNested);
    return kernel();
  }
  if (op == EPOLL_CTL_DEL) return remove_stream(*in, *s, fd, kernel);
  if (op != EPOLL_CTL_ADD && op != EPOLL_CTL_MOD) return kernel();
  epoll_event copy;
  if (!try_get(&copy, event)) return -EFAULT;
  const long r =
      op == EPOLL_CTL_ADD ? add_stream(*in, *s, fd, copy) : modify_stream(*in, *s, fd, copy);
  in->tell_robbed();
  return r;
}

}  // namespace rsock::poll
