// sendfile: the kernel while the gate is open, else the file's bytes straight into the ring.

#include <fcntl.h>

#include "core/base/cancel_off.h"
#include "core/base/try_copy.h"
#include "core/os/os.h"
#include "core/stream/bounce_buffer.h"
#include "core/stream/keeper.h"
#include "core/stream/send_steps.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {
namespace {

/// What the page cache has of a file, from an offset on. The kernel copies it to where it is to lie,
/// so there is one copy at this end. Nothing is read from a disk here: that may take its time, and
/// the direction is locked.
class CachedFile final : public transport::ByteSource {
 public:
  CachedFile(int fd, off_t at, bool by_reference) noexcept
      : fd_(fd), at_(at), by_reference_(by_reference) {}

  size_t gather(std::byte* to, size_t limit) noexcept override {
    if (done_) return 0;
    const auto got = os::pread_cached(fd_, to, limit, at_);
    const size_t n = got ? *got : 0;
    done_ = n < limit;  // the end, not in memory, a file that can't tell, an error: pread() knows
    at_ += static_cast<off_t>(n);
    return n;
  }
  bool done() const noexcept override { return done_; }
  bool at_end() noexcept override {
    char byte;
    if (done_) return true;
    const auto got = os::pread_cached(fd_, &byte, 1, at_);
    done_ = got ? *got == 0 : got.error() != EAGAIN;  // not in memory: there is more
    return done_;
  }
  int file() const noexcept override { return by_reference_ ? fd_ : -1; }
  off_t offset() const noexcept override { return at_; }
  void skip(size_t n) noexcept override { at_ += static_cast<off_t>(n); }

 private:
  const int fd_;
  off_t at_;
  const bool by_reference_;
  bool done_ = false;
};

/// So much at once is passed by reference, where the path can. A copy of less costs no more than
/// the mapping and the two system calls, and the receiver is faster with it.
constexpr size_t kByReference = 256 * 1024;

/// The path may want a lane of its own for files (Channel::tx_offer_lane()). Asked for by whoever sends
/// much; the message may be lost, so not once only.
void want_lane(Stream& s, int in_fd, off_t at, size_t total) noexcept {
  constexpr uint32_t kTries = 3;
  constexpr uint32_t kCallsBetween = 32;
  if (total < kByReference || g_file_locks.load(std::memory_order_relaxed)) return;
  MutexLock lock(s.tx.mutex);
  if (s.tx.state != TxState::kRing || s.lane_calls >= kTries * kCallsBetween) return;
  if (s.lane_calls++ % kCallsBetween != 0) return;
  // Not for a file system that can't tell what it has in memory: nothing of it would be passed.
  char byte;
  const auto cached = os::pread_cached(in_fd, &byte, 1, at);
  if (cached || cached.error() == EAGAIN) Keeper::offer_lane_locked(s);
}

/// Copies cached bytes of the file into the ring, while there is one: from byte *done of `total` on,
/// of which `at` is the place in the file. *error (-errno) where the call has to end; 0: the way
/// through a buffer goes on.
void send_cached(Stream& s, Stay& stay, int in_fd, off_t at, size_t total, size_t* done,
                 long* error) noexcept {
  if (!s.tx.gate.managed() || s.tx.mutex.held_by_me()) return;
  want_lane(s, in_fd, at, total - *done);
  CachedFile file(in_fd, at, total >= kByReference);
  bool fin = false;
  const Step step = send_managed(s, stay, {.file = &file}, total, done, 0, error, &fin);
  // The stream fails, or takes no more: send() says it as it has to be said.
  if (step != Step::kError || *error == -EPROTO || *error == -EPIPE) *error = 0;
}

/// Copies a piece of the file through a buffer into the stream: where it is not in memory, and
/// where the stream is the kernel's again.
long sendfile_piece(Stream& s, int fd, int in_fd, off_t* offset, size_t want, void* buffer) {
  if (want > BounceBuffer::kSize) want = BounceBuffer::kSize;
  const auto got = os::pread(in_fd, buffer, want, *offset);
  if (!got) return -value(got.error());
  if (*got == 0) return 0;
  iovec iov{buffer, *got};
  const long sent = send(s, fd, &iov, 1, 0, [&]() -> long {
    // The whole call is inside (stay.h): a number of ours stays until it leaves.
    const int number = FdTable::stream(fd) == &s ? fd : s.fd.load(std::memory_order_relaxed);
    const auto r = os::send(number, buffer, *got, 0);
    return r ? static_cast<long>(*r) : -value(r.error());
  });
  if (sent > 0) *offset += sent;
  return sent;
}

}  // namespace

long sendfile(Stream& s, int fd, int in_fd, off_t* offset, size_t count, KernelCall kernel) {
  if (const auto r = send_by_kernel(s, 0, kernel)) return *r;
  const CancelOff whole;  // no cancellation point, while send() is one
  off_t at = 0;
  if (offset != nullptr) {
    if (!try_get(&at, offset)) return -EFAULT;
  } else {
    const auto position = os::lseek(in_fd, 0, SEEK_CUR);
    if (!position) {  // not seekable: only the kernel can move it
      if (const int e = pin_to_tcp(fd, "sendfile from a pipe"); e != 0) return -e;
      return kernel();
    }
    at = *position;
  }
  if (at < 0) {  // an error, whose order among the others the kernel knows; nothing is sent
    const auto r = os::sendfile(fd, in_fd, at, count);
    return r ? static_cast<long>(*r) : -value(r.error());
  }
  constexpr size_t kMax = 0x7ffff000;  // sendfile(2): at most this many bytes a call
  if (count > kMax) count = kMax;
  const BounceBuffer buffer;
  if (buffer.data() == nullptr) return -ENOMEM;
  Stay stay(s);
  {
    MutexLock lock(s.tx.mutex);
    stay.note_locked();
  }
  size_t done = 0;
  long error = 0;
  while (done < count) {
    const size_t before = done;
    send_cached(s, stay, in_fd, at, count, &done, &error);
    at += static_cast<off_t>(done - before);
    if (error != 0 || done == count) break;
    const long r = sendfile_piece(s, fd, in_fd, &at, count - done, buffer.data());
    if (r <= 0) {
      error = r;
      break;
    }
    done += static_cast<size_t>(r);
  }
  if (offset != nullptr) {
    if (!try_put(offset, at)) return -EFAULT;  // the bytes are sent all the same
  } else {
    (void)os::lseek(in_fd, at, SEEK_SET);
  }
  return done != 0 || error == 0 ? static_cast<long>(done) : error;
}

}  // namespace rsock::stream
