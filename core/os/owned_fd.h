// An internal descriptor: closed when its owner goes, CLOEXEC, above the program's numbers.
//
// Ownership: unique. Thread safety: as an int. Errors: see raise().
#pragma once

#include <atomic>

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
/// next free number stay as they were. Errors: EMFILE, also when only low numbers are left, which
/// are the program's; EBADF when a close loop of the program was faster. The argument is closed in
/// any other case.
Result<OwnedFd> raise(int fd) noexcept;
Result<OwnedFd> raise(Result<int> fd) noexcept;

/// An internal copy of a descriptor of the program's. Errors as raise().
Result<OwnedFd> dup_internal(int fd) noexcept;
/// The same at any number, where losing what it stands for would be worse than a low number in use.
Result<OwnedFd> dup_internal_anywhere(int fd) noexcept;

/// Between the kernel's giving a low number and its being free again the program could close it or
/// put something there. Who makes one says so, and close, dup2 and their kin wait that long.
class MakingInternal {
 public:
  MakingInternal() noexcept;
  ~MakingInternal();
  MakingInternal(const MakingInternal&) = delete;
  MakingInternal& operator=(const MakingInternal&) = delete;
};

/// raise() of what `make` returns, with the low number guarded. make: Result<int>().
template <typename Make>
Result<OwnedFd> make_internal(Make make) noexcept {
  const MakingInternal guard;
  return raise(make());
}

namespace detail {
inline constinit std::atomic<int> making_internal{0};
void wait_while_making() noexcept;
}  // namespace detail

/// For the program's calls that free or replace a number: waits, for some microseconds at most,
/// until no low number is ours. A load in nearly every case. (A call that has passed here when the
/// kernel gives us its number still hits it: DESIGN.md, known limits.)
inline void wait_for_low_numbers() noexcept {
  // Relaxed: a hint; what matters is ordered by the kernel's table of descriptors.
  if (__builtin_expect(detail::making_internal.load(std::memory_order_relaxed) != 0, 0)) {
    detail::wait_while_making();
  }
}

/// In a forked child: whoever was making one is not here.
void forget_making_internal() noexcept;

}  // namespace rsock::os
