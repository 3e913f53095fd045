// syscall(): the calls of intercept.def by their numbers, through the same entries.
//
// Everything else jumps straight to libc's syscall with its arguments where they are.

#include <pthread.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "core/base/cancel_off.h"
#include "core/base/clock.h"
#include "core/base/raw_syscall.h"
#include "core/base/try_copy.h"
#include "core/poll/readiness_ops.h"
#include "preload/entry.h"
#include "preload/processes.h"

namespace rsock::preload {
namespace {

enum class Kind { makes_fd, fd_first, fd_set, process, exit, kernel };

template <typename T>
T from_word(long w) noexcept {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(w);
  } else {
    return static_cast<T>(w);
  }
}

/// Calls an entry with as many of the words as it takes.
template <typename R, typename... A, size_t... I>
long forward(R (*entry)(A...), const long* w, std::index_sequence<I...>) {
  if constexpr (std::is_void_v<R>) {
    entry(from_word<A>(w[I])...);
    return 0;
  } else {
    return static_cast<long>(entry(from_word<A>(w[I])...));
  }
}

template <typename R, typename... A>
long by_words(R (*entry)(A...), const long* w) {
  return forward(entry, w, std::index_sequence_for<A...>());
}

/// fcntl and ioctl.
template <typename R, typename A1, typename A2>
long by_words(R (*entry)(A1, A2, ...), const long* w) {
  return entry(from_word<A1>(w[0]), from_word<A2>(w[1]), w[2]);
}

/// prctl.
template <typename R, typename A1>
long by_words(R (*entry)(A1, ...), const long* w) {
  return entry(from_word<A1>(w[0]), w[1], w[2], w[3], w[4]);
}

/// Whether an entry could do anything but hand the call on.
constexpr bool concerns_us(Kind kind, long first) noexcept {
  return kind != Kind::kernel &&
         (kind != Kind::fd_first || FdTable::word(static_cast<int>(first)) != 0);
}

/// A signal mask comes as the kernel's own sigset_t, 8 bytes, which is the front of glibc's.
class Mask {
 public:
  Mask(const void* mask, size_t size) noexcept : given_(mask != nullptr), valid_(size == 8) {
    memset(&set_, 0, sizeof(set_));
    if (given_ && valid_) valid_ = try_copy(&set_, mask, 8);
  }
  bool valid() const noexcept { return !given_ || valid_; }
  const sigset_t* get() const noexcept { return given_ ? &set_ : nullptr; }

 private:
  bool given_;
  bool valid_;
  sigset_t set_;
};

/// The sixth argument of pselect6.
struct MaskArgument {
  const void* mask;
  size_t size;
};

/// A wait's time limit, into which the system call writes what is left (libc's functions pass a
/// copy). As the kernel does, without a word where it can't be written.
class TimeLeft {
 public:
  explicit TimeLeft(const timespec* limit) noexcept : limit_(limit), started_(monotonic_ns()) {}
  void write_back() const noexcept {
    if (limit_ == nullptr || !readable(limit_, sizeof(*limit_))) return;
    const uint64_t passed = monotonic_ns() - started_;
    const uint64_t given = static_cast<uint64_t>(limit_->tv_sec) * 1'000'000'000u +
                           static_cast<uint64_t>(limit_->tv_nsec);
    const uint64_t left = given > passed ? given - passed : 0;
    timespec value{static_cast<time_t>(left / 1'000'000'000u),
                   static_cast<long>(left % 1'000'000'000u)};
    (void)try_put(const_cast<timespec*>(limit_), value);
  }

 private:
  const timespec* limit_;
  uint64_t started_;
};

template <typename T>
T as(long w) noexcept {
  return from_word<T>(w);
}

/// Waits with a signal mask. False: the kernel's (a mask that it will refuse).
bool masked_wait(long number, const long* w, long& result) {
  const auto* outer = number == SYS_pselect6 ? as<const MaskArgument*>(w[5]) : nullptr;
  if (outer != nullptr && !readable(outer, sizeof(*outer))) return false;
  const bool sixth = number == SYS_epoll_pwait || number == SYS_epoll_pwait2;
  const Mask mask = number == SYS_pselect6
                        ? (outer != nullptr ? Mask(outer->mask, outer->size) : Mask(nullptr, 8))
                    : sixth ? Mask(as<const void*>(w[4]), static_cast<size_t>(w[5]))
                            : Mask(as<const void*>(w[3]), static_cast<size_t>(w[4]));
  if (!mask.valid()) return false;
  const auto* limit = as<const timespec*>(number == SYS_ppoll      ? w[2]
                                          : number == SYS_pselect6 ? w[4]
                                                                   : w[3]);
  if (number != SYS_epoll_pwait && limit != nullptr && !readable(limit, sizeof(*limit)))
    return false;
  const TimeLeft left(limit);
  if (number == SYS_ppoll) {
    result = ::ppoll(as<pollfd*>(w[0]), static_cast<nfds_t>(w[1]), limit, mask.get());
    left.write_back();
  } else if (number == SYS_pselect6) {
    result = ::pselect(static_cast<int>(w[0]), as<fd_set*>(w[1]), as<fd_set*>(w[2]),
                       as<fd_set*>(w[3]), limit, mask.get());
    left.write_back();
  } else if (number == SYS_epoll_pwait) {
    result = ::epoll_pwait(static_cast<int>(w[0]), as<epoll_event*>(w[1]), static_cast<int>(w[2]),
                           static_cast<int>(w[3]), mask.get());
  } else {
    result = ::epoll_pwait2(static_cast<int>(w[0]), as<epoll_event*>(w[1]), static_cast<int>(w[2]),
                            limit, mask.get());
  }
  return true;
}

/// libc's select reads and writes its time limit by itself, where the kernel may fail.
bool select_by_number(const long* w, long& result) {
  auto* limit = as<timeval*>(w[4]);
  timeval left{};
  if (limit != nullptr && !try_get(&left, limit)) return false;
  result = ::select(static_cast<int>(w[0]), as<fd_set*>(w[1]), as<fd_set*>(w[2]), as<fd_set*>(w[3]),
                    limit != nullptr ? &left : nullptr);
  if (limit != nullptr) (void)try_put(limit, left);
  return true;
}

/// preadv2 and pwritev2: the offset comes in two halves, of which a 64-bit kernel reads the first.
long vector_transfer(long number, const long* w) {
  auto* entry = number == SYS_preadv2 ? &::preadv2 : &::pwritev2;
  return entry(static_cast<int>(w[0]), as<const iovec*>(w[1]), static_cast<int>(w[2]), w[3],
               static_cast<int>(w[5]));
}

/// The call through our entry. False: none of ours.
bool serve(long number, const long* w, long& result) {
  if (number == SYS_select) return poll::may_matter() && select_by_number(w, result);
  switch (number) {
#define RSOCK_CALL(name, kind, nr, presence, effect) \
  case nr:                                           \
    result = by_words(&::name, w);                   \
    return true;
#include "preload/intercept.def"
    case SYS_preadv2:
    case SYS_pwritev2:
      result = vector_transfer(number, w);
      return true;
    case SYS_ppoll:
    case SYS_pselect6:
    case SYS_epoll_pwait:
    case SYS_epoll_pwait2:
      return masked_wait(number, w, result);
    default:
      result = process_by_number(number, w);
      return true;
  }
}

/// A function of its own, so that the usual call needs no stack.
[[gnu::noinline]] long served(long number, long a, long b, long c, long d, long e,
                              long f) noexcept {
  // libc's syscall() is no cancellation point, whatever it is asked for; the entries may be.
  const CancelOff guard;
  const long w[6] = {a, b, c, d, e, f};
  long result;
  return serve(number, w, result) ? result : real.syscall(number, a, b, c, d, e, f);
}

/// Whether the call is one that an entry would do more with than hand it on.
bool ours(long number, long first) noexcept {
  switch (number) {
#define RSOCK_CALL(name, kind, nr, presence, effect) \
  case nr:                                           \
    return concerns_us(Kind::kind, first);
#include "preload/intercept.def"
    case SYS_preadv2:
    case SYS_pwritev2:
      return FdTable::word(static_cast<int>(first)) != 0;
    case SYS_ppoll:
    case SYS_pselect6:
      return poll::may_matter();
    case SYS_epoll_pwait:
    case SYS_epoll_pwait2:
      return FdTable::kind(static_cast<int>(first)) == FdKind::kEpoll;
#ifdef SYS_fork
    case SYS_fork:
#endif
    case SYS_clone:
    case SYS_clone3:
      return started();
    case SYS_seccomp:
      return true;
    default:
      return false;
  }
}

}  // namespace
}  // namespace rsock::preload

using namespace rsock;
using namespace rsock::preload;

// libc declares it variadic and always reads six words: so does this, without saving registers, and
// what is not ours leaves by a jump.
RSOCK_EXPORT long rsock_syscall(long number, long a, long b, long c, long d, long e,
                                long f) noexcept asm("syscall");
RSOCK_EXPORT long rsock_syscall(long number, long a, long b, long c, long d, long e,
                                long f) noexcept {
  if (ours(number, a)) [[unlikely]]
    return served(number, a, b, c, d, e, f);
  return real.syscall(number, a, b, c, d, e, f);
}
