// Sleeping in the middle of a locked call: on a channel's bell, or in the kernel.
//
// For the bell the caller has read it, armed and looked once more (transport.h), all under the
// lock.
#pragma once

#include <poll.h>

#include <memory>
#include <utility>

#include "core/base/call_state.h"
#include "core/base/deadline.h"
#include "core/base/mutex.h"
#include "core/os/os.h"
#include "core/transport/transport.h"

namespace rsock::stream {

/// Channel::rx_sleep or tx_sleep.
using SleepOnBell = Result<void> (transport::Channel::*)(uint32_t seen, const timespec* timeout);

inline void strike_own_bells(void* channel) noexcept {
  static_cast<transport::Channel*>(channel)->wake_local();
}

/// Lets go of `mutex`, sleeps, takes it again. 0: look again; else -errno (-EAGAIN: time is up;
/// -ECANCELED: pthread_cancel, call_state.h). `timeout` is Deadline::for_futex()'s. A handler that
/// came since the call began ends it as it would have ended a wait in the kernel. The channel may
/// go meanwhile: our reference to it is dropped before the lock is taken.
inline long sleep_on_bell(Mutex& mutex, std::shared_ptr<transport::Channel> channel,
                          SleepOnBell sleep, uint32_t seen, const timespec* timeout,
                          const HandlerWatch& since) noexcept RSOCK_REQUIRES(mutex) {
  if (timeout != nullptr && timeout->tv_sec == 0 && timeout->tv_nsec == 0) return -EAGAIN;
  mutex.unlock();
  Result<void> slept;
  {
    const CancellableSleep place(&strike_own_bells, channel.get());
    const bool ended = Deadline::ended_by_handler(since, timeout);
    if (!place.cancelled()) {
      slept = ended ? Result<void>(fail(EINTR)) : ((*channel).*sleep)(seen, timeout);
    }
    if (place.cancelled()) slept = fail(ECANCELED);
  }
  channel.reset();
  mutex.lock();
  if (slept) return 0;
  return slept.error() == ETIMEDOUT ? -EAGAIN : -value(slept.error());
}

/// Until the kernel's socket may have `events`, in place of a system call that would wait for them
/// itself; it may be early. 0: look again; else -errno as above. No lock held. With `partial` bytes
/// were moved already, so any handler ends it (signal(7)).
inline long sleep_in_kernel(int fd, short events, const Deadline& deadline,
                            const HandlerWatch& since, bool partial) noexcept {
  // The number may be closed by another thread, and used again: look at the stream now and then.
  constexpr long kLongestNs = 100'000'000;
  timespec limit{0, kLongestNs};
  if (!deadline.is_never()) {
    const uint64_t left = deadline.remaining_ns();
    if (left == 0) return -EAGAIN;
    if (left < kLongestNs) limit.tv_nsec = static_cast<long>(left);
  }
  const CancellableSleep place(&wake_for_cancel, this_thread_number());
  if (place.cancelled()) return -ECANCELED;
  const bool any = partial || !deadline.is_never();
  if (any ? since.interrupted() : since.broken()) return -EINTR;
  pollfd one{fd, events, 0};
  const auto r = os::ppoll(&one, 1, &limit, nullptr, 0);
  if (place.cancelled()) return -ECANCELED;
  if (r || r.error() != EINTR) return 0;
  return any || since.broken() ? -EINTR : 0;
}

}  // namespace rsock::stream
