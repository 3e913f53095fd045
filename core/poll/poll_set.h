// The shared middle of poll and select: waits for a set of descriptors in which streams and others
// are mixed.
#pragma once

#include <poll.h>
#include <signal.h>

#include "core/base/deadline.h"
#include "core/stream/socket_ops.h"

namespace rsock::poll {

/// Fills revents. Returns the number of ready entries, 0 when the deadline passed, or -errno. When
/// no stream of the set has a channel, `kernel` does the whole wait and *used_kernel is set: its
/// result is returned and revents are whatever it left there. sigmask null: unchanged.
long poll_set(pollfd* fds, size_t n, const Deadline& deadline, const sigset_t* sigmask,
              stream::KernelCall kernel, bool* used_kernel);

}  // namespace rsock::poll
