// Sending on a managed direction, for the calls that do: send and its kin, sendfile.
//
// Ownership, thread safety: borrows what it is given for the length of a call; takes s.tx.mutex.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

#include "core/stream/moves.h"
#include "core/stream/stay.h"
#include "core/stream/stream.h"

namespace rsock::stream {

/// What a call sends: pieces of the program's memory, or a file.
struct Payload {
  const iovec* iov = nullptr;
  size_t n = 0;
  transport::ByteSource* file = nullptr;
};

/// Result of the managed half: bytes so far are in *done.
enum class Step : uint8_t {
  kDone,    // all is in the ring; of a file, all that it had now
  kKernel,  // the direction is the kernel's; *fin: for good
  kError,
};

/// Sends from byte *done of `total` on until all is in the ring, waiting for room if the stream and
/// `flags` allow. *error: -errno, -EPROTO where the stream has to fail. Must not be called by a
/// thread that holds tx.mutex (a handler in the middle of its own send).
Step send_managed(Stream& s, Stay& stay, const Payload& from, size_t total, size_t* done, int flags,
                  long* error, bool* fin) noexcept;

/// So many bytes went into the ring.
inline void count_ring_locked(Stream& s, size_t took) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  count_managed(s.tx.offset, took);
  s.tx.off_tcp += took;
  count_managed(s.sent[static_cast<int>(s.channel->kind())], took);
}

}  // namespace rsock::stream
