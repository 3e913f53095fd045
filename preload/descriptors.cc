// close, dup, fcntl, ioctl and their kin: where descriptors go, and what else they are called.

#include <sys/resource.h>

#include "core/base/cancel_off.h"
#include "core/base/raw_syscall.h"
#include "core/os/owned_fd.h"
#include "preload/entry.h"

using namespace rsock;
using namespace rsock::preload;

namespace rsock::preload {

bool let_go(int fd) noexcept {
  if (inside_library()) {  // libibverbs closes what it opened
    if (FdTable::kind(fd) == FdKind::kInternal) FdTable::clear(fd);
    return true;
  }
  if (FdTable::kind(fd) == FdKind::kInternal) return false;
  // In a child of vfork the number is free in the child only: the parent's table stays as it is.
  return !own_process() || stream::before_close(fd);
}

namespace {

/// A child of vfork is about to keep a stream over its exec: the parent's memory is here, and the
/// stream may still be lifted. One load and a branch anywhere else.
void keep_for_new_program(int fd) noexcept {
  if (FdTable::kind(fd) == FdKind::kStream && !own_process()) stream::leave_to_child(fd);
}

void note_file_lock() noexcept { stream::g_file_locks.store(true, std::memory_order_relaxed); }

void note_copy(int fd, int copy) noexcept {
  const FdKind kind = FdTable::kind(fd);
  if (copy >= 0 && kind != FdKind::kUnknown && kind != FdKind::kInternal && tracking()) {
    stream::on_dup(fd, copy);
    leave_to_stdio(copy);
  }
}

[[gnu::noinline]] int fcntl_of_ours(int fd, int command, long arg) {
  if (FdTable::kind(fd) == FdKind::kInternal && !inside_library()) return answer(-EBADF);
  // Also a copy with the flag: the table does not know of it, and what is done with it is not seen.
  if (command == F_DUPFD || command == F_DUPFD_CLOEXEC ||
      (command == F_SETFD && (arg & FD_CLOEXEC) == 0)) {
    keep_for_new_program(fd);
  }
  const int result = real.fcntl(fd, command, arg);
  if (command == F_DUPFD || command == F_DUPFD_CLOEXEC) note_copy(fd, result);
  Stream* s = FdTable::stream(fd);
  if (command == F_SETFL && result >= 0 && s != nullptr) {
    stream::on_set_flags(*s, static_cast<int>(arg));
  }
  return result;
}

bool is_open(int fd) noexcept { return raw_syscall(SYS_fcntl, fd, F_GETFD) >= 0; }

/// The number `target` is about to be replaced by a copy of fd. False: EBADF.
bool make_room(int fd, int target) noexcept {
  os::wait_for_low_numbers();
  if (FdTable::word(target) == 0) return true;
  // What is at target is lost only if the call will succeed.
  return is_open(fd) && let_go(target);
}

/// Lets go of everything of ours in [first, last]. With `pin`, other threads keep the descriptors.
void let_go_range(unsigned first, unsigned last, bool pin) noexcept {
  const int highest = FdTable::highest();
  if (highest < 0 || first > static_cast<unsigned>(highest)) return;
  if (last > static_cast<unsigned>(highest)) last = static_cast<unsigned>(highest);
  for (unsigned fd = first; fd <= last; ++fd) {
    if (FdTable::word(static_cast<int>(fd)) == 0) continue;
    if (pin) stream::pin_to_tcp(static_cast<int>(fd), "close_range with CLOSE_RANGE_UNSHARE");
    (void)let_go(static_cast<int>(fd));
  }
}

struct CloseRange {
  int flags;
  long result;  // of the first range that failed
};

void close_piece(unsigned first, unsigned last, void* arg) noexcept {
  auto* each = static_cast<CloseRange*>(arg);
  const long r = outcome(real.close_range(first, last, each->flags));
  if (r < 0 && each->result == 0) each->result = r;
}

void close_one_by_one(unsigned first, unsigned last, void*) noexcept {
  rlimit limit{};
  raw_syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, 0, reinterpret_cast<long>(&limit));
  for (uint64_t fd = first; fd <= last && fd < limit.rlim_cur; ++fd) {
    raw_syscall(SYS_close, static_cast<long>(fd));
  }
}

[[gnu::noinline]] int close_of_ours(int fd) {
  const CancelOff begun;
  if (!let_go(fd)) return answer(-EBADF);
  const int result = real.close(fd);
  stream::after_close();
  return result;
}

/// kcmp(2). A kernel without it: no, and the copy is out of our sight.
bool same_file(int fd, int other) noexcept {
  constexpr long kFile = 0;  // KCMP_FILE
  const long self = raw_syscall(SYS_getpid);
  return raw_syscall(SYS_kcmp, self, self, kFile, fd, other) == 0;
}

bool kernel_has_close_range() noexcept {
  return raw_syscall(SYS_close_range, ~0u, ~0u, 0) != -ENOSYS;  // no descriptor has that number
}

}  // namespace
}  // namespace rsock::preload

RSOCK_EXPORT int close(int fd) {
  os::wait_for_low_numbers();
  if (FdTable::word(fd) != 0) [[unlikely]]
    return at_point([=] { return close_of_ours(fd); });
  return real.close(fd);
}

RSOCK_EXPORT int close_range(unsigned first, unsigned last, int flags) noexcept {
  os::wait_for_low_numbers();
  const bool known = (flags & ~(CLOSE_RANGE_CLOEXEC | CLOSE_RANGE_UNSHARE)) == 0;
  // CLOSE_RANGE_CLOEXEC closes nothing now; our own descriptors have the flag already.
  const bool closes = known && (flags & CLOSE_RANGE_CLOEXEC) == 0 && first <= last;
  if (!closes || FdTable::highest() < 0 || !kernel_has_close_range()) {
    return real.close_range(first, last, flags);
  }
  let_go_range(first, last, (flags & CLOSE_RANGE_UNSHARE) != 0);
  CloseRange each{flags, 0};
  stream::for_each_program_range(first, last, close_piece, &each);
  stream::after_close();
  return static_cast<int>(answer(each.result));
}

RSOCK_EXPORT void closefrom(int first) noexcept {
  os::wait_for_low_numbers();
  if (FdTable::highest() < 0) return real.closefrom(first);
  const unsigned from = first < 0 ? 0 : static_cast<unsigned>(first);
  let_go_range(from, ~0u, false);
  CloseRange each{0, 0};
  auto* closer = kernel_has_close_range() ? close_piece : close_one_by_one;
  stream::for_each_program_range(from, ~0u, closer, &each);
  stream::after_close();
}

RSOCK_EXPORT int dup(int fd) noexcept {
  keep_for_new_program(fd);
  const int copy = real.dup(fd);
  if (FdTable::word(fd) != 0) note_copy(fd, copy);
  return copy;
}

RSOCK_EXPORT int dup2(int fd, int target) noexcept {
  if (fd == target) return real.dup2(fd, target);
  keep_for_new_program(fd);
  if (!make_room(fd, target)) return answer(-EBADF);
  const int copy = real.dup2(fd, target);
  if (FdTable::word(fd) != 0) note_copy(fd, copy);
  stream::after_close();
  return copy;
}

RSOCK_EXPORT int dup3(int fd, int target, int flags) noexcept {
  if (fd == target || (flags & ~O_CLOEXEC) != 0) return real.dup3(fd, target, flags);
  keep_for_new_program(fd);
  if (!make_room(fd, target)) return answer(-EBADF);
  const int copy = real.dup3(fd, target, flags);
  if (FdTable::word(fd) != 0) note_copy(fd, copy);
  stream::after_close();
  return copy;
}

// Somebody else's stream is out of reach of its owner then: core/DESIGN.md, limits.
RSOCK_EXPORT int pidfd_getfd(int pidfd, int target, unsigned flags) noexcept {
  const int copy = real.pidfd_getfd(pidfd, target, flags);
  if (copy >= 0 && FdTable::word(target) != 0 && same_file(target, copy)) note_copy(target, copy);
  return copy;
}

// libc declares the next two variadic. Every caller passes at most one word more, which arrives
// where a third named argument would (System V x86-64, AAPCS64); so no register has to be saved.

RSOCK_EXPORT int rsock_fcntl(int fd, int command, long arg) asm("fcntl");
RSOCK_EXPORT int rsock_fcntl(int fd, int command, long arg) {
  const uintptr_t w = FdTable::word(fd);
  if (w == 0) {
    if (command == F_OFD_SETLK || command == F_OFD_SETLKW || command == F_SETLEASE) {
      note_file_lock();
    }
    return real.fcntl(fd, command, arg);
  }
  return fcntl_of_ours(fd, command, arg);
}

RSOCK_EXPORT int flock(int fd, int operation) noexcept {
  note_file_lock();
  return real.flock(fd, operation);
}

RSOCK_EXPORT int rsock_ioctl(int fd, unsigned long request, void* arg) noexcept asm("ioctl");
RSOCK_EXPORT int rsock_ioctl(int fd, unsigned long request, void* arg) noexcept {
  Stream* s = FdTable::stream(fd);
  if (s == nullptr) return real.ioctl(fd, request, arg);
  return aside([=] {
    if (request == FIONCLEX) keep_for_new_program(fd);
    auto kernel = in_kernel([=] { return real.ioctl(fd, request, arg); });
    return static_cast<int>(answer(stream::ioctl(*s, fd, request, arg, kernel)));
  });
}

RSOCK_SAME_BODY(__close, close);
RSOCK_SAME_BODY(__dup2, dup2);
extern "C" __attribute__((visibility("default"), alias("fcntl"))) int rsock_fcntl64(
    int, int, long) asm("fcntl64");
extern "C" __attribute__((visibility("default"), alias("fcntl"))) int rsock_fcntl_(
    int, int, long) asm("__fcntl");
