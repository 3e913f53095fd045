// From the program's buffers to stream::send and stream::recv.
//
// Purpose: one rule for every call of the family: arguments that the kernel would refuse without
// moving a byte are refused by the kernel itself, so that nobody has to know its reasons by heart.
// A null stream is a descriptor that we know and that carries no stream: the kernel's call.
// Thread safety: pure functions around thread-safe ones.
#pragma once

#include <climits>

#include "core/stream/iov.h"
#include "preload/entry.h"

namespace rsock::preload {

using stream::kMaxPieces;

inline long send_pieces(Stream* s, int fd, const iovec* iov, size_t count, int flags,
                        stream::KernelCall kernel) {
  // MSG_FASTOPEN on a connected socket fails with EISCONN, and only the kernel knows when.
  if (s == nullptr || (flags & MSG_FASTOPEN) != 0) return kernel();
  return stream::send(*s, fd, iov, count, flags, kernel);
}

inline long recv_pieces(Stream* s, int fd, const iovec* iov, size_t count, int flags,
                        stream::KernelCall kernel) {
  if (s == nullptr) return kernel();
  if ((flags & MSG_ERRQUEUE) != 0) {
    return stream::recv_error_queue(*s, fd, nullptr, flags, kernel);
  }
  return stream::recv(*s, fd, iov, count, flags, kernel);
}

/// readv and preadv2: of nothing they are over before they reach the socket (sock_read_iter() in
/// net/socket.c), while a recv of nothing waits for bytes like any other.
inline long read_pieces(Stream* s, int fd, const iovec* iov, size_t count, int flags,
                        stream::KernelCall kernel) {
  if (s == nullptr) return kernel();
  if (const auto r = stream::recv_by_kernel(*s, flags, kernel)) return *r;
  if (stream::iov_acceptable(iov, count) && stream::iov_total(iov, count) == 0) return kernel();
  return stream::recv(*s, fd, iov, count, flags, kernel);
}

inline ssize_t send_buffers(Stream* s, int fd, const iovec* iov, int count, int flags,
                            stream::KernelCall kernel) {
  return answer(send_pieces(s, fd, iov, static_cast<size_t>(count), flags, kernel));
}

inline ssize_t read_buffers(Stream* s, int fd, const iovec* iov, int count, int flags,
                            stream::KernelCall kernel) {
  return answer(read_pieces(s, fd, iov, static_cast<size_t>(count), flags, kernel));
}

/// A call with one buffer: the short way first, if there is nothing else to see to, then `work`.
template <typename Work>
[[gnu::noinline]] ssize_t send_at_point(uintptr_t word, const void* buf, size_t n, int flags,
                                        Work&& work) {
  Stream* s = stream_in(word);
  if (s != nullptr && !anything_to_attend()) [[likely]] {
    if (const size_t sent = stream::send_short(*s, buf, n, flags); sent != 0) [[likely]]
      return static_cast<ssize_t>(sent);
  }
  return at_point(work);
}
template <typename Work>
[[gnu::noinline]] ssize_t recv_at_point(uintptr_t word, void* buf, size_t n, int flags,
                                        Work&& work) {
  Stream* s = stream_in(word);
  if (s != nullptr && !anything_to_attend()) [[likely]] {
    if (const size_t got = stream::recv_short(*s, buf, n, flags); got != 0) [[likely]]
      return static_cast<ssize_t>(got);
  }
  return at_point(work);
}

inline ssize_t send_buffer(Stream* s, int fd, const void* buf, size_t n, int flags,
                           stream::KernelCall kernel) {
  const iovec piece{const_cast<void*>(buf), n};
  return answer(send_pieces(s, fd, &piece, 1, flags, kernel));
}

inline ssize_t recv_buffer(Stream* s, int fd, void* buf, size_t n, int flags,
                           stream::KernelCall kernel) {
  const iovec piece{buf, n};
  return answer(recv_pieces(s, fd, &piece, 1, flags, kernel));
}

/// preadv2 and pwritev2 on a stream: with offset -1 they are readv and writev, RWF_NOWAIT is
/// MSG_DONTWAIT (net/socket.c, sock_read_iter), and a real offset is refused. Of other flags only
/// the kernel knows, so the stream becomes its own for good; what we still have of it, either way,
/// comes before the call all the same.
inline bool plain_transfer(Stream* s, int fd, off_t offset, int flags) noexcept {
  if (s == nullptr || offset != -1) return false;
  if ((flags & ~RWF_NOWAIT) != 0) (void)stream::pin_to_tcp(fd, "preadv2 or pwritev2 with flags");
  return true;
}

inline int message_flags(int rwf) noexcept { return (rwf & RWF_NOWAIT) != 0 ? MSG_DONTWAIT : 0; }

}  // namespace rsock::preload
