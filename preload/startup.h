// Whether the library is awake, and whose process this is.
//
// Purpose: a program that never opens a TCP socket pays for loading us and nothing else; the first
// call that may matter climbs the rungs of startup.def. Thread safety: all from any thread and from
// signal handlers. A handler that interrupts its own thread on the rungs finds tracking() false:
// what it opens stays the kernel's.
#pragma once

namespace rsock::preload {

/// Whether what this call creates or changes is to be noted: started (starts if need be), not
/// switched off by RSOCK_PATH=tcp, not a call from inside the library, and in this process's own
/// memory.
bool tracking() noexcept;

/// From here on nothing is tracked, and nothing of ours makes a system call that the program did
/// not make: it is about to forbid itself most of them.
void stand_back() noexcept;
bool standing_back() noexcept;

/// Started already? Never starts.
bool started() noexcept;

/// False in a child of vfork (or of a clone with CLONE_VM): it uses the parent's memory, so our
/// tables are not its own to change. False, too, in a forked child that passed every hook by.
bool own_process() noexcept;

/// This thread is about to start a child that may use its memory. Until it is found to be alone
/// again own_process() asks the kernel.
void lend_memory() noexcept;

/// Around a fork of this thread. Nobody starts the library in between: what was done before the
/// fork is then undone after it, in both processes, and nothing else is. The answers: whether there
/// is something to do. end_fork_in_child() comes before anything else of ours there: the process
/// has a new id and one thread.
bool begin_fork() noexcept;
bool fork_was_begun() noexcept;
void end_fork() noexcept;
bool end_fork_in_child() noexcept;

/// The process ends: everything owed is handed over, once. Nothing where we never started.
void leave() noexcept;

}  // namespace rsock::preload
