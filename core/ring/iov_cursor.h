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

#include "core/base/try_copy.h"

namespace rsock::ring {

class IovCursor {
 public:
  /// Begins `skip` bytes into iov[0..n). A skip beyond the end leaves nothing.
  IovCursor(const iovec* iov, size_t n, size_t skip) noexcept : iov_(iov), n_(n), at_(skip) {
    settle();
  }

  bool done() const noexcept { return i_ == n_; }
  /// The next `limit` bytes, or what there is, can be read now.
  bool readable_ahead(size_t limit) const noexcept {
    size_t at = at_;
    for (size_t i = i_; i < n_ && limit > 0; ++i, at = 0) {
      const size_t n = std::min(iov_[i].iov_len - at, limit);
      if (!readable(static_cast<const std::byte*>(iov_[i].iov_base) + at, n)) return false;
      limit -= n;
    }
    return true;
  }
  /// A piece lies at a bad address: the last copy failed as a whole, and every later one does.
  bool faulted() const noexcept { return faulted_; }

  /// The next `limit` bytes as at most `most` pieces, for the kernel. Returns their number.
  size_t pieces(iovec* out, size_t most, size_t limit) const noexcept {
    size_t k = 0;
    size_t at = at_;
    for (size_t i = i_; i < n_ && limit > 0 && k < most; ++i, at = 0) {
      const size_t n = std::min(iov_[i].iov_len - at, limit);
      if (n == 0) continue;
      out[k++] = iovec{static_cast<std::byte*>(iov_[i].iov_base) + at, n};
      limit -= n;
    }
    return k;
  }
  /// Past n bytes that the kernel has moved.
  void advance(size_t n) noexcept {
    at_ += n;
    settle();
  }

  /// Copies up to `limit` bytes from the pieces to `to`; less only when the pieces end. 0 at a bad
  /// address.
  size_t gather(std::byte* to, size_t limit) noexcept {
    return walk(limit, [to](std::byte* piece, size_t n, size_t done) {
      return try_copy(to + done, piece, n);
    });
  }

  /// Copies up to `limit` bytes from `from` into the pieces; less only when the pieces end. 0 at a
  /// bad address.
  size_t scatter(const std::byte* from, size_t limit) noexcept {
    return walk(limit, [from](std::byte* piece, size_t n, size_t done) {
      return try_copy(piece, from + done, n);
    });
  }

 private:
  template <typename Copy>
  size_t walk(size_t limit, Copy copy) noexcept {
    size_t done = 0;
    while (done < limit && i_ < n_) {
      const size_t n = std::min(iov_[i_].iov_len - at_, limit - done);
      if (!copy(static_cast<std::byte*>(iov_[i_].iov_base) + at_, n, done)) {
        faulted_ = true;
        i_ = n_;
        return 0;
      }
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
  bool faulted_ = false;
};

}  // namespace rsock::ring
