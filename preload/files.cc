// sendfile, splice and fdopen: where a stream meets a file.

#include "preload/entry.h"

namespace rsock::preload {
namespace {

/// False: what `to` still has to send is not out, and the call may not wait for it.
bool pin_ends(int from, int to, const char* reason) noexcept {
  if (FdTable::word(from) != 0) stream::pin_to_tcp(from, reason, false);
  return FdTable::word(to) == 0 || stream::pin_to_tcp(to, reason);
}

}  // namespace
}  // namespace rsock::preload

using namespace rsock;
using namespace rsock::preload;

RSOCK_EXPORT ssize_t sendfile(int out, int in, off_t* offset, size_t count) noexcept {
  // From a socket only into a pipe, and then it is a splice.
  if (FdTable::word(in) != 0) stream::pin_to_tcp(in, "sendfile from the stream");
  Stream* s = FdTable::stream(out);
  if (s == nullptr) return real.sendfile(out, in, offset, count);
  return aside([=] {
    auto kernel = in_kernel([=] { return real.sendfile(out, in, offset, count); });
    return answer(stream::sendfile(*s, out, in, offset, count, kernel));
  });
}

RSOCK_EXPORT ssize_t splice(int in, off64_t* in_offset, int out, off64_t* out_offset, size_t n,
                            unsigned flags) {
  if (!pin_ends(in, out, "splice")) return answer(-EAGAIN);
  return real.splice(in, in_offset, out, out_offset, n, flags);
}

// The kernel takes pipes only and moves nothing otherwise, so these need no stream set down.

RSOCK_EXPORT ssize_t tee(int in, int out, size_t n, unsigned flags) {
  return real.tee(in, out, n, flags);
}

RSOCK_EXPORT ssize_t vmsplice(int out, const iovec* iov, size_t count, unsigned flags) {
  return real.vmsplice(out, iov, count, flags);
}

RSOCK_EXPORT FILE* fdopen(int fd, const char* mode) noexcept {
  if (FdTable::word(fd) != 0) {
    // stdio reads, writes and closes inside libc, past us: the stream stays on TCP, and the table
    // forgets the number, which fclose() will free without a word.
    stream::pin_to_tcp(fd, "fdopen");
    if (!let_go(fd)) return answer(-EBADF), nullptr;
  }
  return real.fdopen(fd, mode);
}

RSOCK_SAME_BODY(sendfile64, sendfile);
