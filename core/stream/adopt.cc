// Adopted streams: closed by their program while something is owed, kept by the keeper until it is
// done, on a descriptor of the library's own.

#include <fcntl.h>

#include "core/base/deadline.h"
#include "core/os/os.h"
#include "core/stream/fd_table.h"
#include "core/stream/keeper.h"
#include "core/stream/keeper_loop.h"

namespace rsock::stream {

/// fd's file at the number of the reserve, or none.
static Result<os::OwnedFd> copy_to_reserve(KeeperInside& in, int fd) noexcept {
  // acq_rel pairs with who put it there: the number is the reserve's, and nobody else's.
  const int spare = in.reserve.exchange(-1, std::memory_order_acq_rel);
  if (spare < 0) return fail(EMFILE);
  const auto copy = os::dup3(fd, spare, O_CLOEXEC);
  if (copy) return os::OwnedFd(spare);
  in.reserve.store(spare, std::memory_order_release);
  return fail(value(copy.error()));
}

void Keeper::give_back(int fd) noexcept {
  KeeperInside& in = inside();
  os::OwnedFd last(fd);
  // What was put at the reserve's number goes, and the number is the reserve's again: at no moment
  // is it free for others to take.
  if (fd >= 0 && fd == in.reserve_number.load(std::memory_order_relaxed) &&
      os::dup3(in.state.wake.get(), fd, O_CLOEXEC)) {
    in.reserve.store(last.release(), std::memory_order_release);
  }
}

bool Keeper::hold_locked(Stream& s, int fd) noexcept {
  // The program's number is about to be free: it has no fewer than before.
  auto copy = os::dup_internal_anywhere(fd);
  if (!copy) copy = copy_to_reserve(inside(), fd);
  if (!copy) return false;
  move_watch_locked(s, copy->release());
  return true;
}

bool Keeper::adopt_locked(Stream& s, int fd) noexcept {
  if (!hold_locked(s, fd)) return false;
  watch_for_room(s);
  s.adopted.store(true, std::memory_order_release);
  inside().adopted.fetch_add(1, std::memory_order_release);
  leave_to_keeper();
  return true;
}

void Keeper::keep_number_locked(Stream& s, int fd) noexcept {
  FdTable::set(fd, FdKind::kInternal);
  if (s.fd.load(std::memory_order_relaxed) != fd) move_watch_locked(s, fd);
  watch_for_room(s);
  s.awaited = true;
  s.adopted.store(true, std::memory_order_release);
  inside().adopted.fetch_add(1, std::memory_order_release);
}

void Keeper::free_number_locked(Stream& s, int fd) noexcept {
  FdTable::clear(fd);
  s.awaited = false;
  s.adopted.store(false, std::memory_order_relaxed);
  inside().adopted.fetch_sub(1, std::memory_order_release);
}

void Keeper::leave_to_keeper() noexcept {
  inside().owing.store(1, std::memory_order_release);
  wake_keeper();
}

void Keeper::finish_adopted(int64_t limit_ns) noexcept {
  const Deadline deadline = Deadline::after_ns(limit_ns);
  while (inside().adopted.load(std::memory_order_acquire) > 0 && !deadline.passed()) {
    timespec nap{0, 500'000};
    (void)os::ppoll(nullptr, 0, &nap, nullptr, 0);
  }
}

}  // namespace rsock::stream
