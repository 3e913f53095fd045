// epoll_create, epoll_ctl and epoll_wait: the program's view of an Instance.

#include <vector>

#include "core/os/os.h"
#include "core/poll/instance.h"
#include "core/poll/readiness_ops.h"
#include "core/poll/waiter.h"
#include "core/stream/moves.h"
#include "core/stream/spin.h"

namespace rsock::poll {
namespace {

using stream::Deadline;
using stream::FdKind;
using stream::FdTable;
using stream::Stream;

constexpr size_t kSigsetBytes = 8;  // the kernel's sigset, not glibc's

Instance* instance_of(int epfd) noexcept {
  return static_cast<Instance*>(FdTable::object(epfd, FdKind::kEpoll));
}

/// The item of (instance, fd) among the stream's watchers. Watch lock held.
Item* find_item_locked(Stream& s, Instance& in, int fd) noexcept {
  for (stream::Watcher& w : s.watchers) {
    if (!w.survives_fork()) continue;
    auto& item = static_cast<Item&>(w);
    if (item.instance == &in && item.fd == fd) return &item;
  }
  return nullptr;
}

long add_stream(Instance& in, Stream& s, int fd, const epoll_event& event, KernelCall kernel) {
  Item* item = acquire_item();
  if (item == nullptr) return -ENOMEM;
  // The kernel's registration, the item and the stream's channel change together under these locks:
  // a channel that is attached meanwhile waits in path_changed().
  MutexLock watch(s.watch_mutex);
  MutexLock lock(in.mutex);
  const long r = kernel();
  if (r != 0) {
    release_item(*item);
    return r;
  }
  item->instance = &in;
  item->stream = &s;
  item->fd = fd;
  item->user = event;
  s.watchers.push_back(*item);
  if (s.doorbell_fd.load(std::memory_order_acquire) >= 0) {
    item->fresh = true;
    in.manage_locked(*item);
  }
  return 0;
}

long modify_stream(Instance& in, Stream& s, int fd, const epoll_event& event, KernelCall kernel) {
  MutexLock watch(s.watch_mutex);
  MutexLock lock(in.mutex);
  Item* item = find_item_locked(s, in, fd);
  // The kernel judges the request (EXCLUSIVE, unknown fd); its registration is then put right
  // again.
  const long r = kernel();
  if (r != 0 || item == nullptr) return r;
  item->user = event;
  item->disabled = false;
  if (item->managed) {
    in.unmanage_locked(*item);
    item->fresh = true;
    in.manage_locked(*item);
  }
  return 0;
}

long remove_stream(Instance& in, Stream& s, int fd, KernelCall kernel) {
  MutexLock watch(s.watch_mutex);
  MutexLock lock(in.mutex);
  Item* item = find_item_locked(s, in, fd);
  const long r = kernel();
  if (r != 0 || item == nullptr) return r;
  s.watchers.erase(s.watchers.iterator_to(*item));
  in.forget_locked(*item);
  return 0;
}

/// Our own events may be among those that the kernel gave. Returns how many are the program's, and
/// adds, if asked, what the items behind ours have to say (not twice in one call: a level-triggered
/// one would be reported again).
int translate(Instance& in, epoll_event* events, int n, int max, bool collect) noexcept {
  int kept = 0;
  {
    MutexLock lock(in.mutex);
    kept = in.sort_locked(events, n);
    if (collect && !in.ready.empty() && kept < max)
      kept += in.collect_locked(events + kept, max - kept);
  }
  in.tell_robbed();
  return kept;
}

/// Spins while recent waits ended soon: looks at the rings of a handful of streams without a system
/// call.
bool spin(Instance& in) noexcept {
  const int managed = in.managed_count.load(std::memory_order_acquire);
  if (managed == 0 || managed > 8) return false;
  stream::SpinBudget budget(thread_spin());
  while (budget.more()) {
    {
      MutexLock lock(in.mutex);
      bool found = false;
      for (Item& item : in.managed_items) {
        if (item.disabled) continue;
        Stream& s = *item.stream;
        MutexLock rx(s.rx.mutex);
        if (s.channel && s.channel->rx_available() != 0 &&
            ((item.user.events & EPOLLET) == 0 ||
             s.channel->rx_published() + s.received[0].load(std::memory_order_relaxed) !=
                 item.seen_published)) {
          in.make_ready_locked(item, false);
          found = true;
        }
      }
      if (found) {
        budget.hit();
        return true;
      }
    }
    for (int i = 0; i < 8; ++i) cpu_relax();
  }
  budget.missed();
  return false;
}

long wait_managed(Instance& in, int epfd, epoll_event* events, int max, const timespec* timeout,
                  const sigset_t* sigmask) noexcept {
  const Deadline deadline = Deadline::from_timeout(timeout);
  const bool immediate = timeout != nullptr && timeout->tv_sec == 0 && timeout->tv_nsec == 0;
  bool spun = false;
  for (;;) {
    int n = 0;
    bool asked_kernel = false;
    {
      MutexLock lock(in.mutex);
      // Our items must not starve the kernel's descriptors: after an answer that they filled alone
      // the kernel is asked first.
      if (in.kernel_first) {
        in.kernel_first = false;
        const auto got = os::epoll_wait(epfd, events, max, 0);
        if (got) n = in.sort_locked(events, *got);
        asked_kernel = true;
      }
      n += in.collect_locked(events + n, max - n);
      if (n == max) in.kernel_first = true;
    }
    in.tell_robbed();
    timespec storage{0, 0};
    const timespec* wait = &storage;
    if (n == 0 && !immediate) {
      if (!spun && (spun = true, spin(in))) continue;
      wait = deadline.as_timespec(&storage);
    }
    if (n == max || (n != 0 && asked_kernel)) return n;
    const auto got =
        os::epoll_pwait2(epfd, events + n, max - n, wait, n == 0 ? sigmask : nullptr, kSigsetBytes);
    if (!got) return n != 0 ? n : -value(got.error());
    n += translate(in, events + n, *got, max - n, n == 0);
    if (n != 0 || immediate) return n;
    if (*got == 0 && deadline.passed()) return 0;
  }
}

void on_epoll_dup(void* instance, int copy) noexcept {
  auto* in = static_cast<Instance*>(instance);
  in->fd_refs.fetch_add(1, std::memory_order_relaxed);
  FdTable::set(copy, FdKind::kEpoll, in);
}

/// The descriptors of the instance's streams.
struct Members {
  Instance* instance;
  std::vector<int> fds;
};

void collect_members(Stream& s, void* arg) noexcept {
  auto& members = *static_cast<Members*>(arg);
  MutexLock watch(s.watch_mutex);
  for (stream::Watcher& w : s.watchers) {
    if (w.survives_fork() && static_cast<Item&>(w).instance == members.instance) {
      members.fds.push_back(static_cast<Item&>(w).fd);
    }
  }
}

void unlink_from(Stream& s, void* arg) noexcept {
  Instance& in = *static_cast<Instance*>(arg);
  MutexLock watch(s.watch_mutex);
  MutexLock lock(in.mutex);
  for (auto it = s.watchers.begin(); it != s.watchers.end();) {
    stream::Watcher& w = *it++;
    if (!w.survives_fork()) continue;
    auto& item = static_cast<Item&>(w);
    if (item.instance != &in) continue;
    s.watchers.erase(s.watchers.iterator_to(w));
    in.forget_locked(item);
  }
}

void on_last_close(void* instance, int fd) noexcept {
  auto* in = static_cast<Instance*>(instance);
  if (in->fd_refs.fetch_sub(1, std::memory_order_acq_rel) > 1) {
    if (in->epfd != fd) return;
    for (int other = 0; other <= FdTable::highest(); ++other) {
      if (other != fd && FdTable::object(other, FdKind::kEpoll) == in) in->epfd = other;
    }
    return;
  }
  stream::for_each_stream(unlink_from, in);
  release_instance(*in);
}

}  // namespace

void Instance::become_nested() noexcept {
  nested.store(true, std::memory_order_release);
  Members members{this, {}};
  stream::for_each_stream(collect_members, &members);
  for (const int fd : members.fds) stream::pin_to_tcp(fd, "in a nested epoll instance");
}

void install_hooks() noexcept {
  stream::g_epoll_close = &on_last_close;
  stream::g_epoll_dup = &on_epoll_dup;
  stream::g_epoll_lock = &lock_instances;
  stream::g_epoll_unlock = &unlock_instances;
  stream::g_epoll_fork_child = []() noexcept {
    instances_after_fork_child();
    // The one thread that is here has its parent's bell, which both would empty.
    Sleeper::mine().forget_bell();
  };
}

void note_watched(int fd) noexcept {
  Instance* in = instance_of(fd);
  if (in != nullptr && !in->nested.load(std::memory_order_acquire)) in->become_nested();
}

void on_epoll_create(int epfd) noexcept {
  if (epfd < 0) return;
  install_hooks();
  if (Instance* in = acquire_instance(epfd)) FdTable::set(epfd, FdKind::kEpoll, in);
}

long epoll_ctl(int epfd, int op, int fd, epoll_event* event, KernelCall kernel) {
  Stream* s = FdTable::stream(fd);
  if (s == nullptr) {
    if (op == EPOLL_CTL_ADD) note_watched(fd);
    return kernel();
  }
  Instance* in = instance_of(epfd);
  if (in == nullptr) {
    // Inherited or received: what it does is out of our sight.
    stream::pin_to_tcp(fd, "in an epoll instance that came from elsewhere");
    return kernel();
  }
  if (in->nested.load(std::memory_order_acquire)) {
    stream::pin_to_tcp(fd, "in a nested epoll instance");
    return kernel();
  }
  switch (op) {
    case EPOLL_CTL_ADD:
      return event == nullptr ? kernel() : add_stream(*in, *s, fd, *event, kernel);
    case EPOLL_CTL_MOD:
      return event == nullptr ? kernel() : modify_stream(*in, *s, fd, *event, kernel);
    case EPOLL_CTL_DEL:
      return remove_stream(*in, *s, fd, kernel);
    default:
      return kernel();
  }
}

long epoll_wait(int epfd, epoll_event* events, int max_events, const timespec* timeout,
                const sigset_t* sigmask, KernelCall kernel) {
  Instance* in = instance_of(epfd);
  if (in == nullptr) return kernel();
  if (in->managed_count.load(std::memory_order_acquire) == 0 || max_events <= 0) {
    const long n = kernel();
    if (n <= 0) return n;
    bool ours = false;
    for (long i = 0; i < n; ++i) {
      if (item_from_data(events[i].data.u64) != nullptr || is_kick_data(events[i].data.u64))
        ours = true;
    }
    if (!ours) return n;
    // A stream was lifted while this thread was in the kernel.
    const int kept = translate(*in, events, static_cast<int>(n), max_events, true);
    if (kept != 0) return kept;
    // Only news of ours, none of it for the program: wait on. (The time already waited is small:
    // what woke us is the lift itself.)
  }
  return wait_managed(*in, epfd, events, max_events, timeout, sigmask);
}

}  // namespace rsock::poll
