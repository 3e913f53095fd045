// What every entry is made of: look the descriptor up, then ours or libc's.
//
// Purpose: the border between libc's convention (-1 and errno) and the library's (a value or
// -errno). errno is set here and nowhere else in the library. Thread safety: as the functions they
// wrap. Entries may be left by pthread_cancel where libc's own function is a cancellation point;
// nothing here holds a lock. Invariant: a call on a descriptor that is not ours costs one load from
// FdTable and the jump through real.name; no thread-local, no lock, no errno.
#pragma once

#include <cerrno>

#include "core/base/call_state.h"
#include "core/base/inside.h"
#include "core/stream/fd_table.h"
#include "core/stream/socket_ops.h"
#include "preload/real.h"
#include "preload/startup.h"

/// A definition that the program sees. The compiler holds it against libc's own prototype.
#define RSOCK_EXPORT extern "C" __attribute__((visibility("default")))

/// One body under two names; `of` is defined in the same file.
#define RSOCK_SAME_BODY(name, of) \
  extern "C" __attribute__((visibility("default"), alias(#of))) decltype(::of) name

namespace rsock::preload {

using stream::FdKind;
using stream::FdTable;
using stream::Stream;

/// The library's result in libc's convention.
inline long answer(long result) noexcept {
  if (result >= 0) return result;
  errno = static_cast<int>(-result);
  return -1;
}

/// libc's result in the library's convention. errno is read right where the foreign call returned.
inline long outcome(long result) noexcept { return result >= 0 ? result : -errno; }

/// The program's own call, in the library's convention, for a KernelCall.
template <typename Call>
auto in_kernel(Call call) {
  return [call]() -> long { return outcome(call()); };
}

/// The same, and whether it happened: then the kernel has filled in the program's structures.
template <typename Call>
auto in_kernel(Call call, bool& happened) {
  return [call, &happened]() -> long {
    happened = true;
    return outcome(call());
  };
}

/// The stream that a word of the table means, or null. Entries test the whole word first: for a
/// descriptor that is not ours this is one branch, not taken.
inline Stream* stream_in(uintptr_t word) noexcept {
  return FdTable::kind_of(word) == FdKind::kStream
             ? reinterpret_cast<Stream*>(word & ~FdTable::kKindMask)
             : nullptr;
}

/// What a call has to see to first (CallState::attention). Returns what it owes afterwards. A
/// cancellation point acts here on a cancellation that is pending already.
uint32_t attend_before(bool point);
/// True: the call ended for a cancellation that is none; if it said so, it is to be made again.
bool attend_after(uint32_t owed, bool point);

// Relaxed: who cancels at this very moment finds the call asleep, or the next one.
inline bool anything_to_attend() noexcept {
  return call_state().attention.load(std::memory_order_relaxed) != 0;
}

template <bool kPoint, typename Work>
[[gnu::always_inline]] inline auto attended(Work&& work) {
  CallState& c = call_state();
  uint32_t owed = 0;
  if (anything_to_attend()) [[unlikely]]
    owed = attend_before(kPoint);
  auto result = work();
  while (owed != 0 || c.act) [[unlikely]] {
      if (!attend_after(owed, kPoint) || result != -1 || errno != ECANCELED) break;
      owed = anything_to_attend() ? attend_before(kPoint) : 0;
      result = work();
    }
  return result;
}

/// The path of a stream, in a function of its own: the entry itself then needs no stack and leaves
/// by a jump to libc's function where the descriptor is not ours. `work` captures by value.
/// Taken by reference: a copy of captures just stored in words is loaded in wider pieces, and
/// waits.
template <typename Work>
[[gnu::noinline]] auto aside(Work&& work) {
  return attended<false>(work);
}

/// The same for a call that is a cancellation point (pthreads(7)).
template <typename Work>
[[gnu::noinline]] auto at_point(Work&& work) {
  return attended<true>(work);
}

/// Before the number fd is closed or replaced; stream::after_close() follows. False: the call
/// answers EBADF and touches nothing. For numbers with an entry only: others need nothing.
bool let_go(int fd) noexcept;

/// stdio uses 0, 1 and 2 without a call that we would see (inetd's children, say): a stream that
/// gets such a number stays on TCP.
inline void leave_to_stdio(int fd) noexcept {
  if (fd >= 0 && fd <= 2 && FdTable::word(fd) != 0) {
    stream::leave_to_stdio(fd);
  }
}

}  // namespace rsock::preload
