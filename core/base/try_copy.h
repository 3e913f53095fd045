// Copies to and from addresses of the program that may be bad: the answer is EFAULT, not a fault.
//
// Purpose: the kernel's copy of a bad buffer fails, and the call says so. Ours does the same: these
// functions return false where an instruction of theirs meets SIGSEGV or SIGBUS. Whoever handles
// these signals asks recover_copy() first (preload/handlers.cc); without such a handler, or where
// the thread blocks the signal, a bad address ends the process as any other fault does.
// How: a fault inside the short functions is known by its instruction. Larger copies are libc's
// memcpy, called with the stack pointer noted: a function that calls nothing and saves nothing, so
// there is nothing to undo.
// Cost: as memcpy; a few instructions more from 129 bytes on.
// Thread safety: any thread, also signal handlers.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
bool rsock_try_copy(void* to, const void* from, size_t n) noexcept;
bool rsock_try_read(const void* at) noexcept;
bool rsock_try_write(void* at) noexcept;
}

namespace rsock {

/// False: one of them is bad. Any part of `to` may have been written then.
inline bool try_copy(void* to, const void* from, size_t n) noexcept {
  return rsock_try_copy(to, from, n);
}

template <typename T>
bool try_get(T* to, const T* from) noexcept {
  return try_copy(to, from, sizeof(T));
}
template <typename T>
bool try_put(T* to, const T& value) noexcept {
  return try_copy(to, &value, sizeof(T));
}

/// Can every byte of [at, at + n) be read now? Written? (By an atomic "or" of nothing.)
bool readable(const void* at, size_t n) noexcept;
bool writable(void* at, size_t n) noexcept;

/// In a handler of SIGSEGV or SIGBUS, with its context. True: the fault was one of ours, and
/// returning from the handler makes the function return false.
bool recover_copy(void* context) noexcept;

}  // namespace rsock
