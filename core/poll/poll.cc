// poll and ppoll over a set in which some descriptors are streams.
//
// A set without a stream that has a channel goes to the kernel as it is; streams on plain TCP are
// only counted through their gates, so that nobody lifts them while this thread can't see the
// channel. With a channel in the set: look at the streams, look at the kernel's part, spin, then
// arm and sleep in the kernel on doorbells and kernel descriptors together.

#include <cstring>
#include <memory>
#include <new>

#include "core/base/call_state.h"
#include "core/base/config.h"
#include "core/base/deadline.h"
#include "core/base/thread_signals.h"
#include "core/base/try_copy.h"
#include "core/os/os.h"
#include "core/poll/poll_set.h"
#include "core/poll/readiness_ops.h"
#include "core/poll/waiter.h"
#include "core/stream/moves.h"
#include "core/stream/spin.h"
#include "core/stream/stream.h"

namespace rsock::poll {
namespace {

using stream::Channel;
using stream::FdTable;
using stream::Stream;

constexpr size_t kSigsetBytes = 8;  // the kernel's sigset, not glibc's

/// An array on the stack for the usual small sets, on the heap for others.
template <typename T, size_t kInline>
class Array {
 public:
  bool allocate(size_t n) noexcept {
    if (n <= kInline) {
      data_ = inline_;
      return true;
    }
    heap_.reset(new (std::nothrow) T[n]());
    data_ = heap_.get();
    return data_ != nullptr;
  }
  T& operator[](size_t i) noexcept { return data_[i]; }
  T* get() noexcept { return data_; }

 private:
  T* data_ = nullptr;
  std::unique_ptr<T[]> heap_;
  T inline_[kInline] = {};
};
constexpr size_t kSmall = 16;

enum class Mode : uint8_t { kKernelOnly, kCounted, kChannels };

Mode classify(const pollfd* fds, nfds_t n) noexcept {
  Mode mode = Mode::kKernelOnly;
  for (nfds_t i = 0; i < n; ++i) {
    const uintptr_t word = FdTable::word(fds[i].fd);
    if (word == 0) continue;
    if (FdTable::kind_of(word) == stream::FdKind::kEpoll) note_watched(fds[i].fd);
    Stream* s = FdTable::stream(fds[i].fd);
    if (s == nullptr) continue;
    if (s->has_channel.load(std::memory_order_acquire)) mode = Mode::kChannels;
    if (mode == Mode::kKernelOnly) mode = Mode::kCounted;
  }
  return mode;
}

/// The kernel's poll with every stream of the set held on TCP. Gates are entered one by one; if one
/// is managed the set is no longer the kernel's alone.
long poll_counted(const pollfd* fds, nfds_t n, KernelCall kernel, bool* channels) {
  // The streams whose gate this call entered.
  Array<Stream*, kSmall> inside;
  if (!inside.allocate(n)) return -ENOMEM;
  struct Leave {
    Array<Stream*, kSmall>& list;
    size_t count = 0;
    ~Leave() {
      for (size_t i = 0; i < count; ++i) {
        Stream& s = *list[i];
        if (s.rx.gate.leave() && s.rx.want_ready.load(std::memory_order_acquire)) {
          stream::try_ready(s);
        }
      }
    }
  } leave{inside};
  for (nfds_t i = 0; i < n; ++i) {
    Stream* s = FdTable::stream(fds[i].fd);
    if (s == nullptr) continue;
    if (!s->rx.gate.enter()) {
      *channels = true;
      return 0;
    }
    inside[leave.count++] = s;
    // A channel attached between classify() and here: its doorbell has to be watched as well.
    if (s->has_channel.load(std::memory_order_acquire)) {
      *channels = true;
      return 0;
    }
  }
  return kernel();
}

/// One call's working state. The kernel's array: entry i for fds[i], then doorbells and the
/// thread's bell.
class PollCall {
 public:
  PollCall(pollfd* fds, nfds_t n, const HandlerWatch& since) noexcept
      : fds_(fds), n_(n), since_(since) {}

  bool allocate() noexcept {
    if (!tracked_.allocate(n_) || !streams_.allocate(n_) || !kernel_.allocate(2 * n_ + 1)) {
      return false;
    }
    for (nfds_t i = 0; i < n_; ++i) {
      Stream* s = FdTable::stream(fds_[i].fd);
      tracked_[i] = s;
      streams_[i] = s != nullptr && s->has_channel.load(std::memory_order_acquire) ? s : nullptr;
      if (streams_[i] != nullptr) ++channel_count_;
    }
    return true;
  }

  /// Looks at everything once without sleeping. Returns the number of ready entries.
  long look() noexcept {
    long ready = 0;
    for (nfds_t i = 0; i < n_; ++i) {
      fds_[i].revents = 0;
      if (streams_[i] == nullptr) continue;
      fds_[i].revents = stream::ready_events(*streams_[i], fds_[i].fd, fds_[i].events);
      if (fds_[i].revents != 0) ++ready;
    }
    return ready;
  }

  /// The kernel's part of the set, with a zero timeout. Adds to `ready`. With a mask, and nothing
  /// ready, a signal that it lets through ends the call: EINTR (do_poll() in fs/select.c).
  long look_at_kernel(long ready, const sigset_t* sigmask = nullptr) noexcept {
    if (ready != 0) sigmask = nullptr;
    if (channel_count_ == n_ && sigmask == nullptr) return ready;
    for (nfds_t i = 0; i < n_; ++i) {
      kernel_[i] = pollfd{streams_[i] == nullptr ? fds_[i].fd : -1, fds_[i].events, 0};
    }
    timespec now{0, 0};
    const auto r = os::ppoll(kernel_.get(), n_, &now, sigmask, kSigsetBytes);
    if (!r) return ready != 0 ? ready : -value(r.error());
    return merge(ready);
  }

  long merge(long ready) noexcept {
    for (nfds_t i = 0; i < n_; ++i) {
      if (streams_[i] != nullptr) continue;
      fds_[i].revents = kernel_[i].fd < 0 ? 0 : kernel_[i].revents;
      if (fds_[i].revents != 0) ++ready;
    }
    return ready;
  }

  /// A look that costs no lock and no system call: has any ring bytes? Only worth it for few
  /// streams.
  bool anything_cheap() noexcept {
    for (nfds_t i = 0; i < n_; ++i) {
      if (streams_[i] != nullptr &&
          stream::ready_events(*streams_[i], fds_[i].fd, fds_[i].events) != 0) {
        return true;
      }
    }
    return false;
  }

  bool spin() noexcept;
  long sleep(const Deadline& deadline, const sigset_t* sigmask) noexcept;

 private:
  long sleep_in_kernel(size_t n, const Deadline& deadline, bool deaf,
                       const sigset_t* sigmask) noexcept;

  pollfd* const fds_;
  const nfds_t n_;
  const HandlerWatch& since_;
  nfds_t channel_count_ = 0;
  Array<Stream*, kSmall> tracked_;  // every stream of the set
  Array<Stream*, kSmall> streams_;  // those that have a channel in this round
  Array<pollfd, 2 * kSmall + 1> kernel_;
};

bool PollCall::spin() noexcept {
  // Spinning looks at every stream: for a handful that is cheap, for many the kernel is the better
  // sleeper.
  if (channel_count_ == 0 || channel_count_ > 8) return false;
  stream::SpinBudget budget(thread_spin());
  while (budget.more()) {
    if (anything_cheap()) {
      budget.hit();
      return true;
    }
    cpu_relax();
  }
  budget.missed();
  return false;
}

long PollCall::sleep(const Deadline& deadline, const sigset_t* sigmask) noexcept {
  Sleeper& sleeper = Sleeper::mine();
  const Sleeper::Visit visit(sleeper);
  // Without a bell nobody can tell us that something changed in this process: short naps then.
  bool deaf = sleeper.fd() < 0;
  size_t used = n_;
  for (nfds_t i = 0; i < n_; ++i) {
    kernel_[i] = pollfd{fds_[i].fd, fds_[i].events, 0};
    if (tracked_[i] == nullptr) continue;
    Stream& s = *tracked_[i];
    // Streams on TCP, too: the keeper may lift one while this thread is in the kernel, and what
    // comes then comes by a doorbell that is not in the kernel's array. From here on a channel that
    // comes or goes strikes the bell; one that did so before this moment is seen by the look.
    const SleepWatcher* watcher = sleeper.link(s);
    if (watcher == nullptr) deaf = true;
    if (s.has_channel.load(std::memory_order_acquire) != (streams_[i] != nullptr) ||
        FdTable::stream(fds_[i].fd) != &s) {
      return 0;  // another round
    }
    if (streams_[i] == nullptr) continue;
    // Not kept alive over the sleep: when it goes, the bell rings.
    const std::shared_ptr<Channel> channel = stream::channel_of(s);
    if (!channel) continue;
    // Drain, then arm, then look: whatever is published after the look rings again. The rings that
    // were taken out may have been meant for another thread that sleeps on this stream for
    // something else.
    if (channel->drain_wait_fd()) stream::wake_watchers_except(s, watcher);
    stream::arm_for_poll(*channel, fds_[i].events);
    // A doorbell that has hung up says nothing any more, and says it for ever: until the kernel has
    // heard of the end, too, this thread would not sleep. (If it hangs up now, the bell rings.)
    if (!s.peer_gone.load(std::memory_order_acquire)) {
      kernel_[used++] = pollfd{channel->wait_fd(), POLLIN, 0};
    }
    // Parts that the kernel still owns are watched there as well.
    const short part = stream::kernel_part(s, fds_[i].events);
    kernel_[i] = pollfd{part != 0 ? fds_[i].fd : -1, part, 0};
  }
  if (!deaf) kernel_[used++] = pollfd{sleeper.fd(), POLLIN, 0};
  if (const long ready = look(); ready != 0) {
    return look_at_kernel(ready);
  }
  // The look may have moved a direction to the kernel: what comes now comes there.
  for (nfds_t i = 0; i < n_; ++i) {
    if (streams_[i] == nullptr) continue;
    const short part = stream::kernel_part(*streams_[i], fds_[i].events);
    if (part != (kernel_[i].fd >= 0 ? kernel_[i].events : 0)) return 0;  // another round
  }
  long r = sleep_in_kernel(used, deadline, deaf, sigmask);
  // More entries than RLIMIT_NOFILE: EINVAL (fs/select.c), where the program's own array was not.
  if (r == -EINVAL && used > n_) r = sleep_in_kernel(n_, deadline, true, sigmask);
  if (r < 0) return r;
  // Numbers are looked up anew after each sleep (do_pollfd() in fs/select.c).
  bool changed = false;
  for (nfds_t i = 0; i < n_; ++i) {
    if (tracked_[i] == nullptr || FdTable::stream(fds_[i].fd) == tracked_[i]) continue;
    changed = true;
    if (streams_[i] != nullptr) --channel_count_;
    streams_[i] = nullptr;
  }
  return changed ? look_at_kernel(look()) : merge(look());
}

long PollCall::sleep_in_kernel(size_t n, const Deadline& deadline, bool deaf,
                               const sigset_t* sigmask) noexcept {
  constexpr uint64_t kNapNs = 10'000'000;
  timespec storage;
  const timespec* timeout = deadline.as_timespec(&storage);
  if (deaf && (deadline.is_never() || deadline.remaining_ns() > kNapNs)) {
    storage = {0, kNapNs};
    timeout = &storage;
  }
  // A handler that came between our locks would have ended a wait in the kernel.
  if (since_.interrupted()) return -EINTR;
  const CancellableSleep place(
      [](void* sleeper) noexcept { static_cast<Sleeper*>(sleeper)->ring(); }, &Sleeper::mine());
  if (place.cancelled()) return -ECANCELED;
  const auto r = os::ppoll(kernel_.get(), n, const_cast<timespec*>(timeout), sigmask, kSigsetBytes);
  if (place.cancelled()) return -ECANCELED;
  return r ? *r : -value(r.error());
}

/// Linux waits on its own copy, and fails when it tells what it found.
long poll_unwritable(const pollfd* fds, nfds_t n, const Deadline& deadline,
                     const sigset_t* sigmask) {
  Array<pollfd, kSmall> copy;
  if (!copy.allocate(n)) return -ENOMEM;
  memcpy(copy.get(), fds, n * sizeof(*fds));
  const auto kernel = [&]() -> long {
    timespec storage;
    const auto r = os::ppoll(copy.get(), n, const_cast<timespec*>(deadline.as_timespec(&storage)),
                             sigmask, kSigsetBytes);
    return r ? *r : -value(r.error());
  };
  bool used_kernel = false;
  const long r = poll_set(copy.get(), n, deadline, sigmask, kernel, &used_kernel);
  return r < 0 ? r : -EFAULT;
}

}  // namespace

bool may_matter() noexcept { return stream::live_streams() != 0; }

long poll_set(pollfd* fds, size_t n, const Deadline& deadline, const sigset_t* sigmask,
              KernelCall kernel, bool* used_kernel) {
  *used_kernel = true;
  const Mode mode = classify(fds, n);
  if (mode == Mode::kKernelOnly) return kernel();
  if (mode == Mode::kCounted) {
    bool channels = false;
    const long r = poll_counted(fds, n, kernel, &channels);
    if (!channels) return r;
  }
  *used_kernel = false;
  if (!writable(fds, n * sizeof(*fds))) return poll_unwritable(fds, n, deadline, sigmask);
  const bool immediate = deadline.passed();
  const HandlerWatch since;
  for (;;) {
    // Made anew each round: channels come and go.
    PollCall call(fds, n, since);
    if (!call.allocate()) return -ENOMEM;
    long ready = call.look_at_kernel(call.look(), immediate ? sigmask : nullptr);
    if (ready != 0 || immediate) return ready;
    if (call.spin()) continue;
    ready = call.sleep(deadline, sigmask);
    if (ready != 0) return ready;
    if (deadline.passed()) return 0;
  }
}

long poll(pollfd* fds, nfds_t n, const timespec* timeout, const sigset_t* sigmask,
          KernelCall kernel) {
  if (!may_matter() || n == 0) return kernel();
  // Bad, or more than a process can have: the kernel says which.
  if (n > FdTable::kSize || !readable(fds, n * sizeof(*fds))) return kernel();
  bool used_kernel = false;
  return poll_set(fds, n, Deadline::from_timeout(timeout), sigmask, kernel, &used_kernel);
}

}  // namespace rsock::poll
