// A call that sleeps on a stream keeps it, as a system call keeps its file: close() frees the
// number at once, and the connection ends when the last one has left (fdget() in fs/file.c).
//
// How: `Stream::inside` counts the calls that have slept. Who closes the last number while it is
// not zero gives the stream a number of ours and is done; whoever leaves last closes that one.
// Calls that never slept need no count: they hold a lock of the stream, and a close takes both. A
// close by the sleeper itself (a handler of its thread, or the program after siglongjmp out of one)
// does not count its own sleep: on Linux that call is over, or begins again with the number.
//
// Thread safety: each thread has its own places; `inside` changes under a lock of the stream or
// before a look at FdTable (poll), and is looked at under both locks and after the number went.
// Invariants:
//  1. `orphaned` is set after the number of ours is in place, and taken back by exactly one thread:
//  that one closes.
//  2. A place that a handler left by siglongjmp is given back at the end of the next call of its
//  thread that sleeps and whose frame lies above.
#pragma once

#include "core/stream/stream.h"

namespace rsock::stream {

/// One call, on its stack.
class Stay {
 public:
  explicit Stay(Stream& s) noexcept : s_(s) {}
  ~Stay() {
    if (place_ != kNone) leave();
  }
  Stay(const Stay&) = delete;
  Stay& operator=(const Stay&) = delete;

  /// Before the lock is let go of for a sleep. A lock of the stream is held.
  void note_locked() noexcept {
    if (place_ == kNone) enter();
  }
  /// It has slept: its number may be another file's, or nobody's.
  bool noted() const noexcept { return place_ != kNone; }

 private:
  static constexpr int kNone = -1;
  static constexpr int kUncounted = -2;  // no place left: as if it had not slept
  void enter() noexcept;
  void leave() noexcept;

  Stream& s_;
  int place_ = kNone;
};

/// One that was counted by hand has left (poll). No lock held.
void leave_stream(Stream& s) noexcept;
/// The last number of s, which is fd, goes. True: calls of other threads are inside, and the stream
/// stays for them.
bool leave_to_those_inside(Stream& s, int fd) noexcept;
/// In a forked child: the calls are the parent's.
void forget_stays_in_child() noexcept;

// --- stream_close.cc ---
/// The last call has left a stream without a number of the program.
void close_orphan(Stream& s) noexcept;

}  // namespace rsock::stream
