// epoll_create and epoll_wait, and an instance's end: the program's view of an Instance.

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/call_state.h"
#include "core/base/thread_signals.h"
#include "core/base/try_copy.h"
#include "core/os/os.h"
#include "core/poll/instance.h"
#include "core/poll/readiness_ops.h"
#include "core/poll/waiter.h"
#include "core/stream/moves.h"
#include "core/stream/spin.h"

namespace rsock::poll {
namespace {

using stream::FdKind;
using stream::FdTable;
using stream::Stream;

constexpr long kNapNs = 10'000'000;
constexpr size_t kSigsetBytes = 8;  // the kernel's sigset, not glibc's

/// This thread is in the kernel's wait, or about to be: see Instance::sleepers.
class Asleep {
 public:
  explicit Asleep(Instance& in) noexcept : in_(in) {}
  ~Asleep() { end(); }
  Asleep(const Asleep&) = delete;
  Asleep& operator=(const Asleep&) = delete;

  void begin() noexcept {
    counted_ = true;
    // seq_cst: in epoll_wait() a look at managed_count follows.
    in_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  }
  void end() noexcept {
    if (std::exchange(counted_, false)) in_.sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  Instance& in_;
  bool counted_ = false;
};

/// Our own events may be among those that the kernel gave. Returns how many are the program's, and
/// adds, if asked, what the items behind ours have to say (not twice in one call: a level-triggered
/// one would be reported again). -EFAULT: none is, and `events` is bad.
int translate(Instance& in, epoll_event* events, int n, int max, bool collect) noexcept {
  int kept = 0;
  bool others = false;
  {
    MutexLock lock(in.mutex);
    in.rouse_locked();
    kept = in.sort_locked(events, n);
    if (collect && !in.ready.empty() && kept < max) {
      const int more = in.collect_locked(events, kept, max, false);
      if (more > 0 || kept == 0) kept += more;
    }
    others = in.others_have_to_look_locked();
  }
  in.tell_robbed();
  if (others) in.ring();
  return kept;
}

/// The kernel's answer stands behind ours in one call. A stream that was set down in between is in
/// both: the program would close it at the first and meet it again. Returns the count of both.
int merge(epoll_event* events, int ours, int kernels) noexcept {
  int n = ours;
  for (int i = ours; i < ours + kernels; ++i) {
    const int same = find_data(events, ours, events[i].data.u64);
    if (same < ours) {
      events[same].events |= events[i].events;
    } else {
      events[n++] = events[i];
    }
  }
  return n;
}

bool has_news(const Item& item) noexcept {
  if (item.disabled) return false;
  Stream& s = *item.stream;
  MutexLock rx(s.rx.mutex);
  return s.channel && s.channel->rx_available() != 0 &&
         ((item.user.events & EPOLLET) == 0 ||
          s.channel->rx_published() + s.received[0].load(std::memory_order_relaxed) !=
              item.seen_published);
}

/// A handful of streams is looked at, whatever they did last; of more, those that are not armed.
/// True: something came. `few`: see spin().
bool look_for_news(Instance& in, bool few) noexcept {
  MutexLock lock(in.mutex);
  bool found = false;
  if (few) {
    for (Item& item : in.managed_items) {
      if (!has_news(item)) continue;
      in.make_ready_locked(item, false);
      found = true;
    }
    return found;
  }
  for (const Item& item : in.ready) found = found || has_news(item);
  return found;
}

/// Spins while recent waits ended soon: looks at rings without a system call. What rings meanwhile
/// is heard afterwards, so with many streams only while the greater part of them needs no ring.
bool spin(Instance& in) noexcept {
  constexpr int kFew = 8;
  constexpr size_t kMost = 64;
  const int managed = in.managed_count.load(std::memory_order_acquire);
  const bool few = managed <= kFew;
  if (managed == 0) return false;
  if (!few) {
    MutexLock lock(in.mutex);
    const size_t warm = in.ready.size();
    if (warm > kMost || 2 * warm < static_cast<size_t>(managed)) return false;
  }
  stream::SpinBudget budget(thread_spin());
  while (budget.more()) {
    if (look_for_news(in, few)) {
      budget.hit();
      return true;
    }
    for (int i = 0; i < 8; ++i) cpu_relax();
  }
  budget.missed();
  return false;
}

/// What the kernel has for the program now. Registrations of ours may fill the whole answer: the
/// program's come behind them in the kernel's list. Ours are edges, gone once they were given.
int ask_kernel_locked(Instance& in, int epfd, epoll_event* events, int max) noexcept
    RSOCK_REQUIRES(in.mutex) {
  const size_t ours = 2 * in.managed_items.size() + 1;  // TCP and doorbell of each, and the kick
  for (size_t asked = 0; asked < ours; asked += static_cast<size_t>(max)) {
    const auto got = os::epoll_wait(epfd, events, max, 0);
    const int kept = got ? in.sort_locked(events, *got) : 0;
    if (kept != 0 || !got || *got < max) return kept;
  }
  return 0;
}

long wait_managed(Instance& in, int epfd, epoll_event* events, int max, const Deadline& deadline,
                  bool immediate, const sigset_t* sigmask) noexcept {
  bool spun = immediate;
  const HandlerWatch since;
  for (;;) {
    int n = 0;
    bool asked_kernel = false;
    bool others = false;
    bool nap = false;
    int more = 0;
    Asleep asleep(in);
    {
      MutexLock lock(in.mutex);
      nap = in.must_nap_locked();
      // Our items must not starve the kernel's descriptors: after an answer that they filled alone
      // the kernel is asked first.
      if (in.kernel_first) {
        in.kernel_first = false;
        n = ask_kernel_locked(in, epfd, events, max);
        asked_kernel = true;
      }
      more = in.collect_locked(events, n, max, spun && !immediate);
      const bool bad = more < 0 && n == 0;
      n += std::max(more, 0);
      if (n == max) in.kernel_first = true;
      // Under the lock in which nothing was ready: whoever leaves something behind sees us.
      if (n == 0 && spun && !immediate && !bad) asleep.begin();
      others = in.others_have_to_look_locked();
    }
    in.tell_robbed();
    if (others) in.ring();
    if (n == 0 && more < 0) return more;
    if (n == 0 && !spun) {
      spun = true;
      (void)spin(in);
      continue;
    }
    timespec storage{0, 0};
    const timespec* wait = n == 0 && !immediate ? deadline.as_timespec(&storage) : &storage;
    if (nap && (wait == nullptr || wait->tv_sec > 0 || wait->tv_nsec > kNapNs)) {
      storage = {0, kNapNs};
      wait = &storage;
    }
    if (n == max || (n != 0 && asked_kernel)) return n;
    // A handler that came between our locks would have ended a wait in the kernel.
    if (n == 0 && !immediate && since.interrupted()) return -EINTR;
    std::optional<CancellableSleep> place;
    if (n == 0 && !immediate) {
      place.emplace(&wake_for_cancel, this_thread_number());
      if (place->cancelled()) return -ECANCELED;
    }
    const auto got =
        os::epoll_pwait2(epfd, events + n, max - n, wait, n == 0 ? sigmask : nullptr, kSigsetBytes);
    asleep.end();
    // Events that are in hand are not thrown away.
    if (!got && place && place->cancelled()) return -ECANCELED;
    if (!got) return n != 0 ? n : -value(got.error());
    const int kernels = translate(in, events + n, *got, max - n, n == 0);
    if (kernels < 0) return n != 0 ? n : kernels;
    n = merge(events, n, kernels);
    if (n != 0 || immediate) return n;
    if (*got == 0 && deadline.passed()) return 0;
  }
}

/// The program's array is bad: an event is found, can't be told, and stays one (ep_send_events() in
/// fs/eventpoll.c). The array is not the kernel's to try, because our own events come there too.
long wait_without_place(Instance& in, int epfd, const Deadline& deadline, bool immediate,
                        const sigset_t* sigmask) noexcept {
  epoll_event found{};
  const long n = wait_managed(in, epfd, &found, 1, deadline, immediate, sigmask);
  if (n <= 0) return n;
  bool others = false;
  {
    MutexLock lock(in.mutex);
    for (Item& item : in.managed_items) {
      if (item.parked || item.user.data.u64 != found.data.u64) continue;
      item.disabled = false;
      item.fresh = true;
      in.make_ready_locked(item, true);
      break;
    }
    others = in.others_have_to_look_locked();
  }
  if (others) in.ring();
  return -EFAULT;
}

void on_epoll_dup(void* instance, int copy) noexcept {
  auto* in = static_cast<Instance*>(instance);
  in->fd_refs.fetch_add(1, std::memory_order_relaxed);
  FdTable::set(copy, FdKind::kEpoll, in);
}

void unlink_from(Stream& s, void* arg) noexcept {
  Instance& in = *static_cast<Instance*>(arg);
  MutexLock watch(s.watch_mutex);
  MutexLock lock(in.mutex);
  for_each_item_locked(s, [&](Item& item) RSOCK_NO_TSA {
    if (item.instance != &in) return;
    stream::unlink_watcher_locked(s, item);
    in.forget_locked(item, false);
  });
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
  forget_unconnected(*in);
  release_instance(*in);
}

}  // namespace

void install_hooks() noexcept {
  stream::g_epoll_close = &on_last_close;
  stream::g_epoll_dup = &on_epoll_dup;
  stream::g_epoll_adopt = &adopt_stream;
  stream::g_epoll_name_gone = &leave_to_kernel;
  stream::g_poll_forget = [](Stream& s) noexcept { Sleeper::mine().forget(s); };
  stream::g_epoll_lock = &lock_instances;
  stream::g_epoll_unlock = &unlock_instances;
  stream::g_epoll_fork_child = []() noexcept {
    instances_after_fork_child();
    // The one thread that is here has its parent's bell, which both would empty.
    Sleeper::mine().forget_bell();
  };
}

void on_epoll_create(int epfd) noexcept {
  if (epfd < 0) return;
  install_hooks();
  if (Instance* in = acquire_instance(epfd)) FdTable::set(epfd, FdKind::kEpoll, in);
}

long epoll_wait(int epfd, epoll_event* events, int max_events, const timespec* timeout,
                const sigset_t* sigmask, KernelCall kernel) {
  Instance* in = instance_of(epfd);
  if (in == nullptr || max_events <= 0) return kernel();
  const bool immediate = timeout != nullptr && timeout->tv_sec == 0 && timeout->tv_nsec == 0;
  // Before the kernel's wait: a lift may end that one late.
  const Deadline deadline = immediate ? Deadline::never() : Deadline::from_timeout(timeout);
  Asleep asleep(*in);
  if (!immediate) asleep.begin();
  // seq_cst pairs with manage_locked(): either we see the first item here, or who leaves something
  // behind sees a sleeper.
  if (in->managed_count.load(std::memory_order_seq_cst) == 0) {
    const long n = kernel();
    asleep.end();
    if (n <= 0) return n;
    bool ours = false;
    for (long i = 0; i < n; ++i) {
      if (EventData::parse(events[i].data.u64).tag != EventData::Tag::kProgram) ours = true;
    }
    if (!ours) return n;
    // A stream was lifted while this thread was in the kernel.
    const int kept = translate(*in, events, static_cast<int>(n), max_events, true);
    if (kept != 0) return kept;
    // Only news of ours, none of it for the program: wait on.
  }
  asleep.end();
  if (!writable(events, sizeof(*events))) {
    return wait_without_place(*in, epfd, deadline, immediate, sigmask);
  }
  return wait_managed(*in, epfd, events, max_events, deadline, immediate, sigmask);
}

}  // namespace rsock::poll
