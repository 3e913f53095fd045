// sendfile, splice, stdio and aio: where a stream meets a file, or what libc does with descriptors
// by itself.

#include <cstdarg>
#include <cstring>

#include "preload/entry.h"

namespace rsock::preload {
namespace {

/// libc is to read or write this descriptor past us. Not 0: what we still have to send is not out,
/// a call that writes would get in front of that, and says this.
int leave_to_libc(int fd, const char* reason, bool writes = true) noexcept {
  return FdTable::word(fd) == 0 ? 0 : stream::pin_to_tcp(fd, reason, writes);
}

/// The same for who may write later and can't hear of it then.
int leave_to_libc(const aiocb* request, bool writes) noexcept {
  if (request == nullptr) return 0;
  const int e = leave_to_libc(request->aio_fildes, "aio", writes);
  return writes ? e : 0;
}

/// The `from` only receives.
int pin_ends(int from, int to, const char* reason) noexcept {
  (void)leave_to_libc(from, reason, false);
  return leave_to_libc(to, reason);
}

/// fopen's modes: "r" without "+" only reads.
bool writes(const char* mode) noexcept {
  return mode == nullptr || *mode != 'r' || strchr(mode, '+') != nullptr;
}

/// libc is about to close the number below a FILE. It can be one of ours: fdopen() lets go of its
/// own, but a stream may have come to 0, 1 or 2 by accept or dup2.
void let_go_below(FILE* file) noexcept {
  const int fd = file != nullptr ? fileno_unlocked(file) : -1;
  if (FdTable::word(fd) != 0) (void)let_go(fd);
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
  if (const int e = pin_ends(in, out, "splice"); e != 0) return answer(-e);
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
    const int e = stream::pin_to_tcp(fd, "fdopen", writes(mode));
    if (e != 0 && writes(mode)) return answer(-e), nullptr;
    if (!let_go(fd)) return answer(-EBADF), nullptr;
    stream::after_close();
  }
  return real.fdopen(fd, mode);
}

RSOCK_EXPORT int fclose(FILE* file) {
  const int before = errno;  // fileno sets it where there is no number below
  let_go_below(file);
  errno = before;
  const int result = real.fclose(file);
  stream::after_close();
  return result;
}

RSOCK_EXPORT FILE* freopen(const char* path, const char* mode, FILE* file) {
  const int before = errno;
  let_go_below(file);
  errno = before;
  FILE* const result = real.freopen(path, mode, file);
  stream::after_close();
  return result;
}

RSOCK_EXPORT int vdprintf(int fd, const char* format, va_list arguments) {
  if (const int e = leave_to_libc(fd, "dprintf"); e != 0) return static_cast<int>(answer(-e));
  return real.vdprintf(fd, format, arguments);
}

RSOCK_EXPORT int dprintf(int fd, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int result = ::vdprintf(fd, format, arguments);
  va_end(arguments);
  return result;
}

RSOCK_EXPORT int __vdprintf_chk(int fd, int flag, const char* format, va_list arguments) {
  if (const int e = leave_to_libc(fd, "dprintf"); e != 0) return static_cast<int>(answer(-e));
  return real.__vdprintf_chk(fd, flag, format, arguments);
}

RSOCK_EXPORT int __dprintf_chk(int fd, int flag, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int result = ::__vdprintf_chk(fd, flag, format, arguments);
  va_end(arguments);
  return result;
}

// struct aiocb64 is struct aiocb on 64-bit machines.

RSOCK_EXPORT int aio_read(aiocb* request) noexcept {
  (void)leave_to_libc(request, false);
  return real.aio_read(request);
}

RSOCK_EXPORT int aio_write(aiocb* request) noexcept {
  if (const int e = leave_to_libc(request, true); e != 0) return static_cast<int>(answer(-e));
  return real.aio_write(request);
}

RSOCK_EXPORT int lio_listio(int mode, aiocb* const list[], int count, sigevent* done) {
  for (int i = 0; i < count; ++i) {
    const bool writes = list[i] != nullptr && list[i]->aio_lio_opcode == LIO_WRITE;
    if (const int e = leave_to_libc(list[i], writes); e != 0) return static_cast<int>(answer(-e));
  }
  return real.lio_listio(mode, list, count, done);
}

RSOCK_SAME_BODY(sendfile64, sendfile);
RSOCK_SAME_BODY(freopen64, freopen);
extern "C"
    __attribute__((visibility("default"), alias("aio_read"))) decltype(::aio_read64) aio_read64;
extern "C"
    __attribute__((visibility("default"), alias("aio_write"))) decltype(::aio_write64) aio_write64;
extern "C" __attribute__((visibility("default"),
                          alias("lio_listio"))) decltype(::lio_listio64) lio_listio64;
