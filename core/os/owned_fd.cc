#include "core/os/owned_fd.h"

#include <fcntl.h>

#include <utility>

#include "core/base/clock.h"
#include "core/base/raw_syscall.h"
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

Result<OwnedFd> dup_from(int fd, int floor) noexcept {
  const Result<int> copy = fcntl(fd, F_DUPFD_CLOEXEC, floor);
  // EINVAL: the limit fell below the floor meanwhile.
  if (!copy) return fail(copy.error() == EINVAL ? EMFILE : value(copy.error()));
  if (g_hook != nullptr) g_hook(*copy, true);
  return OwnedFd(*copy);
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

Result<OwnedFd> dup_internal(int fd) noexcept { return dup_from(fd, internal_floor()); }

Result<OwnedFd> dup_internal_anywhere(int fd) noexcept {
  auto high = dup_internal(fd);
  return high ? std::move(high) : dup_from(fd, 0);
}

Result<OwnedFd> raise(int fd) noexcept {
  auto high = dup_internal(fd);
  // EBADF: the number is the program's again, and perhaps in use already.
  if (high || !(high.error() == EBADF)) (void)close(fd);
  return high;
}

Result<OwnedFd> raise(Result<int> fd) noexcept {
  if (!fd) return fail(fd.error());
  return raise(*fd);
}

MakingInternal::MakingInternal() noexcept {
  detail::making_internal.fetch_add(1, std::memory_order_seq_cst);  // pairs with nothing: a hint
}

MakingInternal::~MakingInternal() {
  detail::making_internal.fetch_sub(1, std::memory_order_seq_cst);
}

void detail::wait_while_making() noexcept {
  // Bounded: the caller may be a signal handler on top of the very call that makes one.
  for (int i = 0; i < 1000 && making_internal.load(std::memory_order_relaxed) != 0; ++i) {
    if (i < 900) {
      cpu_relax();
    } else {
      raw_syscall(SYS_sched_yield);
    }
  }
}

void forget_making_internal() noexcept {
  detail::making_internal.store(0, std::memory_order_relaxed);
}

}  // namespace rsock::os
