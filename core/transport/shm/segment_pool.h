// Segments that wait for another stream between the same two processes (design.md, D4).
//
// Purpose: fresh memory costs. The kernel clears each page at its first touch, and both ends take a
// fault for it: some 3 us for 4 KiB, twice what TCP takes to carry as many bytes. A client that
// opens one connection after another to the same server pays once.
//
// Who: the caller of the rendezvous, which made the memfd. When its channel goes the segment is
// parked, and it is taken again once the callee has let go too: its end of the doorbell is at its
// end, and a channel closes that after its last look at the memory.
//
// Ownership: parked segments belong to the pool. Few, and for seconds only: tidy_segments().
//
// Thread safety: all from any thread. The lock is a leaf, but park and tidy may unmap under it.
//
// Trust: the callee could write into the memory all the time, as into any channel's; it learns
// nothing, since the next stream is its own as well. Another process, or another user's, never gets
// a parked segment: partners are compared by pid and uid of the rendezvous socket's owner.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include "core/os/owned_fd.h"
#include "core/transport/shm/shm_segment.h"

namespace rsock::transport {

/// The process at the other end, as SO_PEERCRED tells.
struct Partner {
  pid_t pid = 0;
  uid_t uid = 0;
  /// Processes of other pid namespaces are all 0 to us (net/core/sock.c, cred_to_ucred): nobody can
  /// say which.
  bool is_known() const noexcept { return pid != 0; }
  bool operator==(const Partner&) const = default;
};

/// What is needed to use a segment again. Without a memfd: never.
struct Reuse {
  os::OwnedFd memfd;
  Partner partner;
  pid_t maker = 0;  // our process when it was made: a forked child parks nothing
};

/// Tells the partner that we let go of the channel, and keeps the segment for the next.
void park_segment(ShmSegment segment, Reuse reuse, os::OwnedFd doorbell) noexcept;

/// A parked segment of that size which the same partner has let go of, its words as new.
std::optional<CreatedSegment> take_segment(size_t ring_size, const Partner& partner) noexcept;

/// Frees what has waited too long. True: something still waits; come again in a second.
bool tidy_segments(uint64_t now_ns) noexcept;

/// Over a fork: the parked ones are the parent's. The child only closes and unmaps its copies.
void lock_segments() noexcept;
void unlock_segments() noexcept;
void segments_after_fork_child() noexcept;

}  // namespace rsock::transport
