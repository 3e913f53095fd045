// Where threads sleep for a device's completions: one of them at the completion channel itself, the
// others on their bells.
//
// Purpose: woken through the keeper, a sleeper costs two switches of threads and twice the system
// calls. So the first thread that goes to sleep waits for the event in person, serves the device
// for all, and goes on when its own bell has rung. After a few events that were for others it
// sleeps on its bell, and a busier thread has the place. While nobody has it, the keeper takes the
// events.
//
// Who gets an event: both wait in epoll instances that have the completion channel with
// EPOLLEXCLUSIVE, ours registered first. The kernel wakes the first instance that somebody waits in
// (ep_poll_callback() in fs/eventpoll.c), so an event goes to the direct sleeper if there is one at
// that very moment, else to the keeper, and nothing has to be handed over. A thread that was woken
// so must serve the event before anything else: the program's handlers run inside the wait or after
// it, never between.
//
// Ownership: one per device. Thread safety: any thread; set_up() and abandon() before and after all
// others. A thread that leaves sleep() by siglongjmp keeps the place: the keeper serves from then
// on.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

#include "core/base/deadline.h"
#include "core/base/result.h"
#include "core/os/owned_fd.h"

namespace rsock::transport::verbs {

class Device;

class DirectWait {
 public:
  /// Before the keeper's epoll has `event_fd`. Without descriptors everybody sleeps on the bell.
  void set_up(int event_fd) noexcept;
  /// Until `bell` differs from `seen`. Errors as transport::sleep_on().
  Result<void> sleep(Device& device, const std::atomic<uint32_t>& bell, uint32_t seen,
                     const timespec* timeout) noexcept;
  /// Bumps it and wakes who sleeps on it, wherever.
  void strike(std::atomic<uint32_t>& bell) noexcept;
  /// Waits in person are served by others from now on: the device is gone.
  void abandon() noexcept;

 private:
  using Bell = std::atomic<uint32_t>;
  Result<bool> sleep_directly(Device& device, const Bell& bell, uint32_t seen,
                              const Deadline& deadline) noexcept;

  os::OwnedFd epoll_;
  os::OwnedFd kick_;  // eventfd: for the direct sleeper, news that are no completion
  /// The direct sleeper's bell; null: nobody. While it serves the device: kServing.
  std::atomic<const Bell*> direct_{nullptr};
  std::atomic<uint32_t> on_bells_{0};  // threads that sleep on a bell
};

}  // namespace rsock::transport::verbs
