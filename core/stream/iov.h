// Small helpers over iovec arrays, which come from the program and are not trusted to be small.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

#include "core/base/try_copy.h"

namespace rsock::stream {

/// Sum of the lengths, capped at Linux's MAX_RW_COUNT (INT_MAX rounded down to a page:
/// fs/read_write.c).
inline size_t iov_total(const iovec* iov, size_t n) noexcept {
  constexpr size_t kMax = 0x7ffff000;
  size_t total = 0;
  for (size_t i = 0; i < n; ++i) {
    if (iov[i].iov_len > kMax - total) return kMax;
    total += iov[i].iov_len;
  }
  return total;
}

inline constexpr size_t kMaxPieces = 1024;  // UIO_MAXIOV

/// A count and lengths that the kernel would take (import_iovec() in lib/iov_iter.c); otherwise it
/// refuses the call without moving a byte.
inline bool iov_acceptable(const iovec* iov, size_t n) noexcept {
  constexpr size_t kMaxTotal = ~size_t{0} >> 1;
  if (n > kMaxPieces || !readable(iov, n * sizeof(*iov))) return false;
  size_t total = 0;
  for (size_t i = 0; i < n; ++i) {
    if (iov[i].iov_len > kMaxTotal - total) return false;
    total += iov[i].iov_len;
  }
  return true;
}

/// Addresses of the kernel's half: Linux answers EFAULT at once (access_ok()), where any other bad
/// address is found by the copy, if there is something to copy.
inline bool iov_impossible(const iovec* iov, size_t n) noexcept {
  constexpr uintptr_t kUsers = uintptr_t{1} << 56;
  for (size_t i = 0; i < n; ++i) {
    if (iov[i].iov_len != 0 && reinterpret_cast<uintptr_t>(iov[i].iov_base) >= kUsers) return true;
  }
  return false;
}

/// Writes into out[0..max) the part of iov that begins `skip` bytes in and is `limit` long. Returns
/// the number of entries; it may cover less than limit when max is too small.
inline size_t iov_slice(const iovec* iov, size_t n, size_t skip, size_t limit, iovec* out,
                        size_t max) noexcept {
  size_t count = 0;
  for (size_t i = 0; i < n && limit > 0 && count < max; ++i) {
    if (skip >= iov[i].iov_len) {
      skip -= iov[i].iov_len;
      continue;
    }
    size_t len = iov[i].iov_len - skip;
    if (len > limit) len = limit;
    out[count++] = iovec{static_cast<char*>(iov[i].iov_base) + skip, len};
    limit -= len;
    skip = 0;
  }
  return count;
}

inline constexpr size_t kIovBatch = 64;

}  // namespace rsock::stream
