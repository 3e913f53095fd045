// The kernel's facts about the other end of a TCP connection on this host (D11).
//
// Asks NETLINK_SOCK_DIAG for exactly one socket: sock_diag(7). Thread safety: keeper only (keeps a
// socket). Errors: ENOENT: no such socket in this network namespace, so the peer is on another
// host; whatever else the kernel says (EPERM under some sandboxes) means that we can't know, and
// the stream stays on TCP.
#pragma once

#include <cstdint>

#include "core/base/result.h"
#include "core/wire/four_tuple.h"

namespace rsock::stream {

struct PeerFacts {
  uint32_t uid;     // owner of the socket's inode
  uint32_t inode;   // 0: no process holds it (yet or any more)
  uint64_t cookie;  // SO_COOKIE
};

/// The socket whose local end is tuple.local: pass the tuple as the peer sees it.
Result<PeerFacts> find_socket(const wire::FourTuple& tuple) noexcept;

}  // namespace rsock::stream
