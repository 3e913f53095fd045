#include "core/transport/verbs/direct_wait.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "core/base/deadline.h"
#include "core/base/thread_signals.h"
#include "core/os/os.h"
#include "core/transport/bell.h"
#include "core/transport/verbs/device.h"

namespace rsock::transport::verbs {
namespace {

using std::memory_order_relaxed;
using std::memory_order_seq_cst;

constexpr uint64_t kKick = 0;
constexpr uint64_t kEvent = 1;
/// So many events for others in one sleep: whoever they are for shall wait for them.
constexpr int kMostInVain = 4;
constinit const std::atomic<uint32_t> kServing{0};

}  // namespace

void DirectWait::set_up(int event_fd) noexcept {
  auto epoll = os::make_internal([] { return os::epoll_create(EPOLL_CLOEXEC); });
  auto kick = os::make_internal([] { return os::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!epoll || !kick || !os::epoll_add(epoll->get(), kick->get(), EPOLLIN, kKick) ||
      !os::epoll_add(epoll->get(), event_fd, EPOLLIN | EPOLLEXCLUSIVE, kEvent)) {
    return;
  }
  epoll_ = std::move(*epoll);
  kick_ = std::move(*kick);
}

void DirectWait::abandon() noexcept {
  epoll_.reset();
  kick_.reset();
}

Result<void> DirectWait::sleep(Device& device, const Bell& bell, uint32_t seen,
                               const timespec* timeout) noexcept {
  const Deadline deadline = Deadline::from_timeout(timeout);
  const Bell* nobody = nullptr;
  // seq_cst, here and below: strike() finds us here, or we find the bell struck.
  if (epoll_ && direct_.compare_exchange_strong(nobody, &bell, memory_order_seq_cst)) {
    const Result<bool> rung = sleep_directly(device, bell, seen, deadline);
    direct_.store(nullptr, memory_order_seq_cst);
    if (!rung) return fail(rung.error());
    if (*rung) return {};
  }
  // seq_cst pairs with strike(): it sees the count, or the kernel sees the bell struck.
  on_bells_.fetch_add(1, memory_order_seq_cst);
  timespec storage;
  const Result<void> slept = sleep_on(bell, seen, deadline.as_timespec(&storage));
  on_bells_.fetch_sub(1, memory_order_relaxed);
  return slept;
}

/// False: the bell has not rung, and the caller shall sleep on it.
Result<bool> DirectWait::sleep_directly(Device& device, const Bell& bell, uint32_t seen,
                                        const Deadline& deadline) noexcept {
  const HandlerWatch since;
  // Handlers run inside the wait, and only if it ends with EINTR: then it has taken no event. One
  // that ran in between, and did not come back or slept itself, would keep an event from all.
  const SignalsBlocked blocked;
  const auto* const mask = reinterpret_cast<const sigset_t*>(blocked.mask());
  int in_vain = 0;
  bool last_look = false;
  while (bell.load(memory_order_seq_cst) == seen) {
    if (in_vain == kMostInVain) return false;
    epoll_event found[2];
    timespec storage{0, 0};
    const timespec* const left = last_look ? &storage : deadline.as_timespec(&storage);
    const auto n = os::epoll_pwait2(epoll_.get(), found, 2, left, mask, sizeof(uint64_t));
    // A handler forked, and this is the child: nobody strikes its bell, the stream is TCP's now.
    if (!epoll_) return true;
    if (!n) {
      if (n.error() != EINTR) return false;
      // A futex without a time limit begins again under SA_RESTART, and after a stop (signal(7)).
      if (deadline.is_never() && !since.broken()) continue;
      return fail(EINTR);
    }
    if (*n == 0) {
      if (last_look) return fail(ETIMEDOUT);
      // Before Linux 6.0 a wait whose time is up may leave an event behind that nobody else was
      // woken for (ep_poll() in fs/eventpoll.c, until autoremove_wake_function went).
      last_look = true;
      continue;
    }
    for (int i = 0; i < *n; ++i) {
      if (found[i].data.u64 == kKick) {
        uint64_t kicks = 0;
        (void)os::read(kick_.get(), &kicks, sizeof(kicks));
      } else if ((found[i].events & (EPOLLERR | EPOLLHUP)) != 0) {
        // The device is gone, and would say so for ever. What comes now is struck.
        (void)os::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, device.event_fd(), nullptr);
      } else {
        // What it finds for this thread needs no kick: the bell is looked at afterwards.
        direct_.store(&kServing, memory_order_seq_cst);
        device.serve_event();
        direct_.store(&bell, memory_order_seq_cst);
        ++in_vain;
      }
    }
  }
  return true;
}

void DirectWait::strike(Bell& bell) noexcept {
  bell.fetch_add(1, memory_order_seq_cst);
  if (direct_.load(memory_order_seq_cst) == &bell) {
    const uint64_t one = 1;
    (void)os::write(kick_.get(), &one, sizeof(one));
  }
  if (on_bells_.load(memory_order_seq_cst) != 0) os::futex_wake(&bell, INT_MAX);
}

}  // namespace rsock::transport::verbs
