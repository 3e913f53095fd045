// A position in a program's iovec array, for copies that stop and go on.
//
// Purpose: send and recv hand us an array of pieces; a ring takes or gives less than all of it, in
// spans that end at the ring's edge. The cursor remembers where the last span ended.
// Ownership: borrows the array and the memory that it names.
// Thread safety: none; it lives on one stack.
// Invariant: i_ == n_, or at_ < iov_[i_].iov_len.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace rsock::ring {

class IovCursor {
 public:
  /// Begins `skip` bytes into iov[0..n). A skip beyond the end leaves nothing.
  IovCursor(const iovec* iov, size_t n, size_t skip) noexcept : iov_(iov), n_(n), at_(skip) {
    settle();
  }

  bool done() const noexcept { return i_ == n_; }

  /// Copies up to `limit` bytes from the pieces to `to`; less only when the pieces end.
  size_t gather(std::byte* to, size_t limit) noexcept {
    return walk(
        limit, [to](std::byte* piece, size_t n, size_t done) { std::memcpy(to + done, piece, n); });
  }

  /// Copies up to `limit` bytes from `from` into the pieces; less only when the pieces end.
  size_t scatter(const std::byte* from, size_t limit) noexcept {
    return walk(limit, [from](std::byte* piece, size_t n, size_t done) {
      std::memcpy(piece, from + done, n);
    });
  }

 private:
  template <typename Copy>
  size_t walk(size_t limit, Copy copy) noexcept {
    size_t done = 0;
    while (done < limit && i_ < n_) {
      const size_t n = std::min(iov_[i_].iov_len - at_, limit - done);
      copy(static_cast<std::byte*>(iov_[i_].iov_base) + at_, n, done);
      done += n;
      at_ += n;
      settle();
    }
    return done;
  }

  /// Restores the invariant: steps over pieces that are used up or empty.
  void settle() noexcept {
    while (i_ < n_ && at_ >= iov_[i_].iov_len) at_ -= iov_[i_++].iov_len;
  }

  const iovec* iov_;
  size_t n_;
  size_t i_ = 0;
  size_t at_;
};

}  // namespace rsock::ring
