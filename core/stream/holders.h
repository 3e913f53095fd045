// Who holds a stream, beside this process.
//
// A stream that two processes use lives on TCP (D9). Of two kinds of holders we know:
//
//   the family   fork() gives each live stream a counter in memory that both processes share; who
//                closes its copy counts down.
//   others       an exec'ed program, or who got it through a Unix socket, is out of that memory. It
//                and the family write on the file that they hold it (notes.h), and the last of a
//                family takes its note back. Where there is only one family nothing is written.
//
// A stream may be lifted by the one that is left. A process that dies or execs without our seeing
// it leaves the count high, or its note: then the stream stays on TCP, which is slow but never
// wrong. So does what a program gets of whom nobody will hear (Stream::given_away).
//
// exec: the process leaves its family and writes a note with its number, in this order: note of the
// exec, note of the family, count. The new program (inherit.cc) writes a note of its own, and takes
// that one back. Passing it on: own note and one for what is on its way; the receiver writes its
// own and takes that one back. At no moment is a holder without one.
//
// Thread safety: before_fork() hooks only, and the closing thread; the counters are atomic,
// Stream::holders and its neighbours change under the stream's tx and rx locks.
#pragma once

#include "core/stream/stream.h"

namespace rsock::stream {

/// In the parent, before fork: one more process will hold every live stream. Errors: none; without
/// memory the streams are pinned to TCP. `fresh_only`: only those that came since the first call of
/// this fork. No lock of a stream held.
void add_holder_to_all(bool fresh_only = false) noexcept;
/// fork failed: undo.
void remove_holder_from_all() noexcept;
/// This process lets go of s; fd still names its file. tx and rx locks held.
void drop_holder(Stream& s, int fd) noexcept;
/// True when no other process holds s. tx or rx lock held.
bool sole_holder(const Stream& s) noexcept;

/// Others will hold it: writes the note of this process, or its family. False: the kernel has none.
/// tx and rx locks held.
bool write_note_locked(Stream& s, int fd) noexcept;
/// Before exec, with nothing of s on a channel: the new program takes over what this process holds,
/// on the numbers that it inherits. Not where unknown ones hold it already.
void leave_by_exec(Stream& s, int fd) noexcept;
/// exec failed.
void come_back_from_exec(Stream& s) noexcept;
/// In a forked child: a note of the parent's exec is not its own.
void holder_in_child(Stream& s) noexcept;

}  // namespace rsock::stream
