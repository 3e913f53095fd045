// The bytes that a ring's writer, or a channel, would replay, copied out for comparison.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rsock::ring {

inline size_t copy_spans(const iovec* spans, size_t count, void* to) {
  size_t done = 0;
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<char*>(to) + done, spans[i].iov_base, spans[i].iov_len);
    done += spans[i].iov_len;
  }
  return done;
}

template <typename Writer>
size_t copy_unread(const Writer& writer, uint64_t from, void* to, size_t n) {
  iovec spans[2];
  return copy_spans(spans, writer.unread_spans(from, n, spans), to);
}

template <typename Channel>
size_t tx_copy_unread(Channel& channel, uint64_t from, void* to, size_t n) {
  iovec spans[2];
  return copy_spans(spans, channel.tx_unread_spans(from, n, spans), to);
}

}  // namespace rsock::ring
