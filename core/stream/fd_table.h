// What the library knows of each descriptor number, found with one load.
//
// Purpose: `fd -> entry` for every intercepted call. An fd that is not ours costs one table load
// and one branch. Entries are words: 0 (unknown to us, the kernel's alone), a small tag, or a
// pointer to a type-stable object (Stream, epoll Instance) with its kind in the low bits.
// Ownership: the table holds references on Streams by count (Stream::fd_refs); pointers stay
// readable for ever because the objects come from slabs that are never unmapped: a caller that
// raced with close() finds a stream that says "closed" under its lock. Thread safety: all members
// from any thread, also from signal handlers. A slot is cleared before the real close(): the number
// can be reused by another thread in the same instant. Invariant: numbers outside [0, kSize) read
// as 0 and are never ours.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace rsock::stream {

class Stream;

enum class FdKind : uintptr_t {
  kUnknown = 0,    // the kernel's alone
  kStream = 1,     // Stream*
  kEpoll = 2,      // poll::Instance*
  kTcpSocket = 3,  // a TCP socket, not connected (or listening)
  kInternal = 4,   // one of ours: hidden from close loops
};

class FdTable {
 public:
  static constexpr int kSize =
      1 << 20;  // fs.nr_open's default; BSS, touched pages only cost memory
  static constexpr uintptr_t kKindMask = 7;

  static uintptr_t word(int fd) noexcept {
    if (static_cast<unsigned>(fd) >= static_cast<unsigned>(kSize)) return 0;
    // acquire pairs with the release in set(): the object is whole before its pointer can be seen.
    return slots_[fd].load(std::memory_order_acquire);
  }
  static FdKind kind_of(uintptr_t word) noexcept { return static_cast<FdKind>(word & kKindMask); }
  static FdKind kind(int fd) noexcept { return kind_of(word(fd)); }

  /// The stream behind fd, or null.
  static Stream* stream(int fd) noexcept {
    const uintptr_t w = word(fd);
    return kind_of(w) == FdKind::kStream ? reinterpret_cast<Stream*>(w & ~kKindMask) : nullptr;
  }
  static void* object(int fd, FdKind kind) noexcept {
    const uintptr_t w = word(fd);
    return kind_of(w) == kind ? reinterpret_cast<void*>(w & ~kKindMask) : nullptr;
  }

  /// Stores and returns the former word. `object` is aligned to 8 or more, or null for tag kinds.
  static uintptr_t set(int fd, FdKind kind, const void* object = nullptr) noexcept;
  static uintptr_t clear(int fd) noexcept { return set(fd, FdKind::kUnknown); }

  /// Highest number ever set, for loops over live entries (fork, exit). -1 if none.
  static int highest() noexcept { return highest_.load(std::memory_order_relaxed); }

 private:
  static std::atomic<uintptr_t> slots_[kSize];  // BSS: clang refuses constinit on so many
  static constinit std::atomic<int> highest_;
};

}  // namespace rsock::stream
