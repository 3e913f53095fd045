// Waiting until the kernel's stream alone carries everything: before fork, exec, a pinning call,
// exit.
//
// Purpose: somebody who does not know of the channel is about to use the connection. Two things may
// still be owed: what the peer's keeper has to put into TCP for us, and what we have to put there
// for the peer (our own replay). The first takes well under a millisecond unless that process is
// stopped. The second ends when the peer reads, which may be never. So every wait says how long it
// is willing, for each; what is left goes on with the keeper.
// Thread safety: any thread; no lock of a stream may be held.
#pragma once

#include "core/base/deadline.h"
#include "core/stream/moves.h"

namespace rsock::stream {

/// The peer's keeper gets so long, for all streams of one call together.
inline constexpr int64_t kHandOverNs = 1'000'000'000;
/// At exit and exec a replay gets so long without a byte of progress.
inline constexpr int64_t kStuckNs = 2'000'000'000;

struct Patience {
  Deadline theirs;  // for what the peer owes us
  Deadline ours;    // for our own replay
  const HandlerWatch* since = nullptr;  // a handler without SA_RESTART ends both

  /// One limit for both, to share between all the streams of a call.
  static Patience at_most(int64_t ns) noexcept {
    const Deadline d = Deadline::after_ns(ns);
    return Patience{d, d, nullptr};
  }
};

enum class HandOver : uint8_t {
  kDone,       // the kernel's stream is everything
  kBytesHere,  // nobody owes anything any more, but our ring holds bytes of a peer that has ended
  kTheirs,     // time is up: the peer has not given back what we froze
  kOurs,       // time is up: our replay is not out, so nobody may write to the kernel's stream
};

/// set_down(), then waits. With `patience` shared between streams, set all of them down first: the
/// peers' keepers then work side by side.
HandOver set_down_and_wait(Stream& s, Reason reason, const Patience& patience) noexcept;
/// Waits until what we send is the kernel's: for the answer to an end or a recall that was asked
/// for, for the last byte of a replay. 0: it is; -EAGAIN: time is up; -EINTR: any handled signal;
/// -EPROTO: it never will be; -EBADF: another thread closed the stream meanwhile. tx lock held on
/// entry and return, and let go of meanwhile.
long wait_until_kernel_sends_locked(Stream& s, Deadline deadline,
                                    const HandlerWatch& since) noexcept RSOCK_REQUIRES(s.tx.mutex);
/// The same, as long as bytes move, and for `stuck_ns` when none do. False: not done.
bool kernel_sends_in_the_end_locked(Stream& s, int64_t stuck_ns) noexcept
    RSOCK_REQUIRES(s.tx.mutex);
/// With kHandOverNs. False: not done.
bool set_down_and_wait(Stream& s, Reason reason) noexcept;

/// Before a call that needs the kernel's stream, and that no lift can come before: set down, and
/// waits as the call itself might. 0; EAGAIN or EINTR: bytes of ours are not out (pin_to_tcp()).
int leave_to_kernel(Stream& s, uint32_t generation, Reason reason, bool will_send,
                    const HandlerWatch& since) noexcept;

/// Replays of ours, of all descriptors, for a process that is about to end or to be another
/// program: nobody else could send those bytes, so it waits as long as some move, and for
/// `stuck_ns` when none do. (A kernel would go on sending after exit; it needs no process for it.)
void finish_own_replays(int64_t stuck_ns) noexcept;
/// Before the process ends: every stream whose words go by a line is ended; waits as
/// finish_own_replays().
void finish_remote_streams(int64_t stuck_ns) noexcept;
/// Their last words, behind those of the replays (a BYE in front of a REPLAYED is the end of a peer
/// that kept bytes): what was consumed is final.
void let_go_of_remote_streams() noexcept;

}  // namespace rsock::stream
