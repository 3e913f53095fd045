// A bell: the word that blocking calls sleep on, and how it is struck. Every backend's sleepers use
// this.
// Thread safety: any thread; the word may be another process's too.
#pragma once

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "core/os/os.h"

namespace rsock::transport {

/// Bumps it and wakes who sleeps on it.
inline void strike(std::atomic<uint32_t>& bell) noexcept {
  // release pairs with the acquire in rx_bell() and tx_bell(); the kernel compares the word under
  // its own lock, so a sleeper that read the old value either sleeps before the wake or gets
  // EAGAIN.
  bell.fetch_add(1, std::memory_order_release);
  os::futex_wake(&bell, INT_MAX);
}

/// Until it differs from `seen`. Errors: EINTR, ETIMEDOUT; timeout null: for ever.
inline Result<void> sleep_on(const std::atomic<uint32_t>& bell, uint32_t seen,
                             const timespec* timeout) noexcept {
  Result<void> r = os::futex_wait(&bell, seen, timeout);
  if (!r && r.error() == EAGAIN) return {};  // it has rung already
  return r;
}

}  // namespace rsock::transport
