// "This thread is running our code, or a library on our behalf": the interposer's re-entry guard.
//
// Purpose: libibverbs and librdmacm call socket, read, close and the rest through libc's names, so
// they come back to the interposer. While the flag is set, a descriptor that appears is none of the
// program's (it is not tracked) and an internal one may be closed. The keeper sets it for its whole
// life; others set it around calls into foreign libraries, and only there: a signal handler of the
// program may run in between, and what it opens in that moment stays on the kernel's path. Thread
// safety: thread-local. Initial-exec: no allocation and no lookup, so usable from any context.
#pragma once

namespace rsock {

namespace detail {
inline constinit thread_local int inside_depth __attribute__((tls_model("initial-exec"))) = 0;
}  // namespace detail

inline bool inside_library() noexcept { return detail::inside_depth != 0; }

class InsideLibrary {
 public:
  InsideLibrary() noexcept { ++detail::inside_depth; }
  ~InsideLibrary() { --detail::inside_depth; }
  InsideLibrary(const InsideLibrary&) = delete;
  InsideLibrary& operator=(const InsideLibrary&) = delete;
};

}  // namespace rsock
