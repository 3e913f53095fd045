// An internal descriptor: closed when its owner goes, CLOEXEC, above the program's numbers.
//
// Ownership: unique. Thread safety: as an int. Errors: see raise().
#pragma once

#include "core/base/result.h"

namespace rsock::os {

class OwnedFd {
 public:
  constexpr OwnedFd() = default;
  explicit constexpr OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(other.release()) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept;
  ~OwnedFd() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  int release() noexcept {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  /// Closes. Does nothing on an empty one.
  void reset() noexcept;

 private:
  int fd_ = -1;
};

/// Called for every internal descriptor that comes to be (true) or goes (false), so that the table
/// of descriptors can protect it from close loops of the program. May be null. Set once, before
/// threads.
using InternalFdHook = void (*)(int fd, bool opened) noexcept;
void set_internal_fd_hook(InternalFdHook hook) noexcept;

/// Takes a fresh low descriptor (as the kernel gave it), moves it high with FD_CLOEXEC and
/// registers it as internal: the program's select(2) limit of 1,024 and its expectations of the
/// next free number stay as they were. If nothing is free up there the low number is kept. Errors:
/// EMFILE. The argument is closed in any case.
Result<OwnedFd> raise(int fd) noexcept;

}  // namespace rsock::os
