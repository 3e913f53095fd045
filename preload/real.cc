#include "preload/real.h"

#include <cstdarg>
#include <cstring>

#include "core/base/raw_syscall.h"
#include "preload/next_symbol.h"

namespace rsock::preload {
namespace {

/// What an optional name does where this libc does not have it.
int absent() noexcept {
  errno = ENOSYS;
  return -1;
}

[[noreturn]] void missing(const char* name) noexcept {
  static constexpr char kText[] = "librsock: the C library has no function ";
  raw_syscall(SYS_write, 2, reinterpret_cast<long>(kText), sizeof(kText) - 1);
  raw_syscall(SYS_write, 2, reinterpret_cast<long>(name), static_cast<long>(strlen(name)));
  raw_syscall(SYS_write, 2, reinterpret_cast<long>("\n"), 1);
  raw_syscall(SYS_exit_group, 127);
  __builtin_unreachable();
}

enum Presence { required, optional };

template <typename Fn>
Fn look_up(const char* name, Presence presence) noexcept {
  void* found = next_symbol(name);
  if (found == nullptr) {
    if (presence == required) missing(name);
    found = reinterpret_cast<void*>(&absent);
  }
  return reinterpret_cast<Fn>(found);
}

/// The function that each pointer leads to until its name is known. Row: the name,
/// its presence and the pointer, as intercept.def gives them.
template <typename Row, typename Fn>
struct First;

template <typename Row, typename R, typename... A>
struct First<Row, R (*)(A...)> {
  static R call(A... args) {
    Row::resolve();
    return Row::pointer()(args...);
  }
};

template <typename Row, typename R, typename... A>
struct First<Row, R (*)(A...) noexcept> {
  static R call(A... args) noexcept { return First<Row, R (*)(A...)>::call(args...); }
};

// The variadic ones take words: their callers pass at most as many as are read here, and what is
// read beyond those is handed on unused.
template <typename Row, typename R, typename A1, typename A2>
struct First<Row, R (*)(A1, A2, ...)> {  // fcntl, ioctl
  static R call(A1 a, A2 b, ...) {
    va_list rest;
    va_start(rest, b);
    const long c = va_arg(rest, long);
    va_end(rest);
    Row::resolve();
    return Row::pointer()(a, b, c);
  }
};

template <typename Row, typename R, typename A1, typename A2>
struct First<Row, R (*)(A1, A2, ...) noexcept> {
  static R call(A1 a, A2 b, ...) noexcept {
    va_list rest;
    va_start(rest, b);
    const long c = va_arg(rest, long);
    va_end(rest);
    return First<Row, R (*)(A1, A2, ...)>::call(a, b, c);
  }
};

template <typename Row, typename R>
struct First<Row, R (*)(long, ...) noexcept> {  // syscall
  static R call(long number, ...) noexcept {
    long w[6];
    va_list rest;
    va_start(rest, number);
    for (long& each : w) each = va_arg(rest, long);
    va_end(rest);
    Row::resolve();
    return Row::pointer()(number, w[0], w[1], w[2], w[3], w[4], w[5]);
  }
};

template <typename Row, typename R>
struct First<Row, R (*)(int, ...) noexcept> {  // prctl
  static R call(int option, ...) noexcept {
    long w[4];
    va_list rest;
    va_start(rest, option);
    for (long& each : w) each = va_arg(rest, long);
    va_end(rest);
    Row::resolve();
    return Row::pointer()(option, w[0], w[1], w[2], w[3]);
  }
};

template <typename Row, typename R, typename Body>
struct First<Row, R (*)(Body, void*, int, void*, ...) noexcept> {  // clone
  static R call(Body body, void* stack, int flags, void* arg, ...) noexcept {
    void* w[3];
    va_list rest;
    va_start(rest, arg);
    for (void*& each : w) each = va_arg(rest, void*);
    va_end(rest);
    Row::resolve();
    return Row::pointer()(body, stack, flags, arg, w[0], w[1], w[2]);
  }
};

#define RSOCK_ROW(row, presence)                                                   \
  struct Row_##row {                                                               \
    using Fn = RSOCK_TYPE(row);                                                    \
    static RealCall<Fn>& pointer() noexcept { return real.row; }                   \
    static void resolve() noexcept { pointer().set(look_up<Fn>(#row, presence)); } \
  };
#define RSOCK_CALL(name, kind, number, presence, effect) RSOCK_ROW(name, presence)
#define RSOCK_LIBC(name, kind, presence, effect) RSOCK_ROW(name, presence)
#include "preload/intercept.def"
#undef RSOCK_ROW

}  // namespace

constinit RealCalls real = {
#define RSOCK_FIRST(name) RealCall<RSOCK_TYPE(name)>(&First<Row_##name, RSOCK_TYPE(name)>::call),
#define RSOCK_CALL(name, kind, number, presence, effect) RSOCK_FIRST(name)
#define RSOCK_LIBC(name, kind, presence, effect) RSOCK_FIRST(name)
#include "preload/intercept.def"
#undef RSOCK_FIRST
};

void* real_vfork() noexcept {
  using Fn = RSOCK_TYPE(vfork);
  // Its first-call function would return twice through its own frame.
  if (real.vfork.get() == &First<Row_vfork, Fn>::call) Row_vfork::resolve();
  return reinterpret_cast<void*>(real.vfork.get());
}

}  // namespace rsock::preload
