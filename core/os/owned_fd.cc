#include "core/os/owned_fd.h"

#include <fcntl.h>

#include "core/os/os.h"

namespace rsock::os {
namespace {

constinit InternalFdHook g_hook = nullptr;

/// The lowest number that internal descriptors should have: the last quarter of what the soft limit
/// allows, but not so far up that the kernel grows its table for nothing.
int internal_floor() noexcept {
  const uint64_t limit = rlimit_nofile_soft();
  const uint64_t floor = limit - limit / 4;
  return static_cast<int>(floor > 60'000 ? 60'000 : floor);
}

}  // namespace

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

void OwnedFd::reset() noexcept {
  if (fd_ < 0) return;
  // Unregister first: another thread may get the number the instant it is free.
  if (g_hook != nullptr) g_hook(fd_, false);
  (void)close(fd_);
  fd_ = -1;
}

void set_internal_fd_hook(InternalFdHook hook) noexcept { g_hook = hook; }

Result<OwnedFd> raise(int fd) noexcept {
  const Result<int> high = fcntl(fd, F_DUPFD_CLOEXEC, internal_floor());
  if (high) {
    (void)close(fd);
    if (g_hook != nullptr) g_hook(*high, true);
    return OwnedFd(*high);
  }
  if (g_hook != nullptr) g_hook(fd, true);
  (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
  return OwnedFd(fd);
}

}  // namespace rsock::os
