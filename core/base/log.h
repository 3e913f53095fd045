// One line per event, to where the operator asked for it, from any context.
//
// Purpose: RSOCK_LOG, RSOCK_LOG_FILE (README). Lines look like
// `librsock[PID] warn: TEXT`. No allocation, no stdio, one write per line; async-signal-safe.
// stderr is used only if it is a terminal or RSOCK_LOG was given, and still the file that it was.
// The file is opened for each line (O_APPEND), so that a program that closes all descriptors, or
// changes root, can't hurt it or us. First decider logs: whoever turns a cause into a decision
// writes the line, nobody above repeats it.
#pragma once

#include "core/base/config.h"

namespace rsock {

/// write(2) whose SIGPIPE or SIGXFSZ (RLIMIT_FSIZE) never reaches the program: it did not ask for
/// the line. Value or -errno. Async-signal-safe.
long write_quietly(int fd, const void* data, size_t n) noexcept;

/// Notes which file descriptor 2 is now: lines go there only as long as it is the same one. A
/// daemon closes its stderr, and 2 is the next number for a file of its data. Before it was called:
/// whatever is there.
void note_stderr() noexcept;
bool log_enabled(LogLevel level) noexcept;
/// printf-style subset through vsnprintf on a 512-byte stack buffer; longer lines are cut.
void log_line(LogLevel level, const char* format, ...) noexcept
    __attribute__((format(printf, 2, 3)));

}  // namespace rsock

#define RSOCK_LOG(level, ...)                                   \
  do {                                                          \
    if (::rsock::log_enabled(::rsock::LogLevel::level)) {       \
      ::rsock::log_line(::rsock::LogLevel::level, __VA_ARGS__); \
    }                                                           \
  } while (0)
