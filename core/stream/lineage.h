// Whether what a fork made is still there: the forked child, and whoever it forked.
//
// Purpose: fork() counts one more holder for each live stream (holders.h), and who closes its copy
// counts down. A process that dies, or becomes another program, counts nothing: its parent would
// stay on TCP for good, as redis would after its first BGSAVE. So each fork leaves a pipe. Its
// writing end is the child's, inherited by the child's own children and closed by the kernel with
// the last of them, at exec as at death: where the reading end hangs up, nobody of that *lineage*
// has a copy any more, and what they did not count down is taken off.
//
// States of one lineage: made (before fork) -> watched (in the parent: the reading end is in the
// keeper's epoll) -> over (hung up; taken off). In the child it is *own*: what this process is in.
// A process is born once, so it is in its own lineage and, through that one's `outer`, in those of
// its ancestors; a copy that it closes is counted down in all of them.
//
// What a hang-up does not tell is whether a program that was exec'ed has a copy. Who leaves one to
// such a program leaves the lineages with it first, and notes tell of it (holders.h). Who gives one
// away unseen says it (give_away()), and that stream counts one more for ever: slow, never wrong.
// The same for the epoll instance that two processes share after a fork: its streams are *lent*
// (Stream::lent) until the lineage is over.
//
// Memory: one shared mapping (the counts) and one private one a lineage; no malloc, a child of
// _Fork has none. Descriptors: one in the parent until the lineage is over or none of its streams
// is here any more, one in the child. At most kMost are watched; a fork beyond that, or without
// memory or descriptors, is as it was without all this. Thread safety: as stated; the list is under
// the keeper's mutex.
#pragma once

#include "core/stream/stream.h"

namespace rsock::stream {

/// Lineages that one process watches at most.
inline constexpr int kMostLineages = 64;

// --- over a fork: the forking thread, in this order ---
/// Before any lock: memory and the pipe, for `streams` streams.
void make_lineage(int streams) noexcept;
/// Every stream is locked, and every one of them has its counter of holders.
void fill_lineage_locked() noexcept;
/// Still with every stream locked, and the keeper's mutex held.
void lineage_in_parent(bool failed) noexcept;
/// In the child, before anything is closed; streams still as the parent left them.
void lineage_in_child() noexcept;
/// In the child of daemon(3), whose parent _exits right after the fork, without a look back.
void parent_is_gone() noexcept;

// --- any thread ---
/// This process closes its copy: one less in the lineages that it is in. tx and rx locks held.
void leave_lineages_locked(Stream& s) noexcept;
/// No lock of s held. s is, or will be, in the hands of a process that no lineage knows.
void give_away(Stream& s) noexcept;
/// The same for an epoll instance, whichever: nobody knows which of them a stream is lent through.
void give_instance_away() noexcept;
/// Why a stream that is lent is not lifted.
inline constexpr Reason kLentReason = "in an epoll instance shared with a forked process";

/// Takes off at once what is over: who is left of the family is about to matter.
void settle_lineages() noexcept;

// --- the keeper, under its mutex ---
/// The thread began: what was forked before is watched from here on.
void watch_lineages() noexcept;
/// Looks at all of them now: something is to be lifted and is said to be shared.
void look_at_lineages() noexcept;
/// Between two rounds: takes off what hung up.
void tidy_lineages() noexcept;
/// For tests.
int watched_lineages() noexcept;

}  // namespace rsock::stream
