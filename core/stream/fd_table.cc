#include "core/stream/fd_table.h"

#include "core/stream/socket_ops.h"

namespace rsock::stream {

constinit Hook<void(void*, int)> g_epoll_close;
constinit Hook<void(void*, int)> g_epoll_dup;
constinit Hook<void(Stream&, int)> g_epoll_adopt;
constinit Hook<void(Stream&, int)> g_epoll_name_gone;
constinit Hook<void(Stream&)> g_poll_forget;
constinit Hook<void()> g_epoll_lock;
constinit Hook<void()> g_epoll_unlock;
constinit Hook<void()> g_epoll_fork_child;

std::atomic<uintptr_t> FdTable::slots_[FdTable::kSize];
constinit std::atomic<int> FdTable::highest_{-1};

uintptr_t FdTable::set(int fd, FdKind kind, const void* object) noexcept {
  if (static_cast<unsigned>(fd) >= static_cast<unsigned>(kSize)) return 0;
  const uintptr_t w = kind == FdKind::kUnknown
                          ? 0
                          : (reinterpret_cast<uintptr_t>(object) | static_cast<uintptr_t>(kind));
  if (w != 0) {
    int seen = highest_.load(std::memory_order_relaxed);
    // Relaxed: a loop over live entries that misses a number set at the same moment is as if it had
    // run a moment earlier.
    while (seen < fd && !highest_.compare_exchange_weak(seen, fd, std::memory_order_relaxed)) {
    }
  }
  // release pairs with the acquire in word().
  return slots_[fd].exchange(w, std::memory_order_acq_rel);
}

}  // namespace rsock::stream
