// How many processes hold a stream, after fork.
//
// A stream that two processes use lives on TCP (D9). fork() gives each live stream a counter in
// memory that both processes share; who closes its copy counts down, and a stream may be lifted
// again by the one that is left. A process that dies or execs without our seeing it leaves the
// count high: then the stream stays on TCP, which is slow but never wrong. Thread safety:
// before_fork() hooks only, and the closing thread; the counters are atomic, Stream::holders
// changes under the stream's tx and rx locks.
#pragma once

#include "core/stream/stream.h"

namespace rsock::stream {

/// In the parent, before fork: one more process will hold every live stream. Errors: none; without
/// memory the streams are pinned to TCP. `fresh_only`: only those that came since the first call of
/// this fork. No lock of a stream held.
void add_holder_to_all(bool fresh_only = false) noexcept;
/// fork failed: undo.
void remove_holder_from_all() noexcept;
/// This process lets go of s. tx and rx locks held.
void drop_holder(Stream& s) noexcept;
/// True when no other process holds s. tx or rx lock held.
bool sole_holder(const Stream& s) noexcept;

}  // namespace rsock::stream
