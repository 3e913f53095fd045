// Invariants. RSOCK_CHECK is always on and ends the process with one line; RSOCK_DCHECK vanishes in
// release builds and may stand on the data path.
//
// Assert our own promises only: bytes a peer wrote and arguments of the program are validated and
// refused, never asserted.
#pragma once

namespace rsock {

/// Writes "librsock: FILE:LINE: check failed: TEXT" to stderr with a raw system call and aborts.
/// Async-signal-safe.
[[noreturn]] void check_failed(const char* file, int line, const char* text) noexcept;

}  // namespace rsock

#define RSOCK_CHECK(condition)                               \
  do {                                                       \
    if (__builtin_expect(!(condition), 0)) {                 \
      ::rsock::check_failed(__FILE__, __LINE__, #condition); \
    }                                                        \
  } while (0)

#ifdef NDEBUG
#define RSOCK_DCHECK(condition) \
  do {                          \
    (void)sizeof(condition);    \
  } while (0)
#else
#define RSOCK_DCHECK(condition) RSOCK_CHECK(condition)
#endif
