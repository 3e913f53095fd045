// Sleeping on a channel's bell in the middle of a locked call.
//
// The caller has read the bell, armed and looked once more (transport.h), all under the lock.
#pragma once

#include <memory>
#include <utility>

#include "core/base/deadline.h"
#include "core/base/mutex.h"
#include "core/transport/transport.h"

namespace rsock::stream {

/// Channel::rx_sleep or tx_sleep.
using SleepOnBell = Result<void> (transport::Channel::*)(uint32_t seen, const timespec* timeout);

/// Lets go of `mutex`, sleeps, takes it again. 0: look again; else -errno (-EAGAIN: time is up).
/// `timeout` is Deadline::for_futex()'s. A handler that came since the call began ends it as it
/// would have ended a wait in the kernel. The channel may go meanwhile: our reference to it is
/// dropped before the lock is taken.
inline long sleep_on_bell(Mutex& mutex, std::shared_ptr<transport::Channel> channel,
                          SleepOnBell sleep, uint32_t seen, const timespec* timeout,
                          const HandlerWatch& since) noexcept RSOCK_REQUIRES(mutex) {
  if (timeout != nullptr && timeout->tv_sec == 0 && timeout->tv_nsec == 0) return -EAGAIN;
  mutex.unlock();
  const bool ended = Deadline::ended_by_handler(since, timeout);
  const Result<void> slept = ended ? Result<void>(fail(EINTR)) : ((*channel).*sleep)(seen, timeout);
  channel.reset();
  mutex.lock();
  if (slept) return 0;
  return slept.error() == ETIMEDOUT ? -EAGAIN : -value(slept.error());
}

}  // namespace rsock::stream
