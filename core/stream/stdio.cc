// libc's FILEs at 0, 1 and 2 of a program that has inherited its stream there.
//
// A call of stdio is inside the kernel as far as the stream goes: it is counted at both gates, so
// nothing is lifted meanwhile, and before it a lifted stream is set down. What it moves is in the
// kernel's counts only (settle() in stream_lift.cc). A program that goes to and fro, call by call,
// stays on TCP.

#include "core/stream/hand_over.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {
namespace {

bool enter_both(Stream& s) noexcept {
  if (!s.tx.gate.enter()) return false;
  if (s.rx.gate.enter()) return true;
  if (s.tx.gate.leave() && s.tx_wanted.load(std::memory_order_acquire)) try_switch_tx(s);
  return false;
}

}  // namespace

Stream* begin_stdio(int fd) noexcept {
  for (int tries = 0;; ++tries) {
    Stream* const s = FdTable::stream(fd);
    if (s == nullptr) return nullptr;
    if (s->tx.mutex.held_by_me() || s->rx.mutex.held_by_me()) return nullptr;  // in a handler
    const bool lifted = s->has_channel.load(std::memory_order_acquire);
    if (!lifted && s->pinned.load(std::memory_order_acquire)) return nullptr;
    const uint32_t generation = s->generation.load(std::memory_order_acquire);
    if (enter_both(*s)) {
      MutexLock tx(s->tx.mutex);
      MutexLock rx(s->rx.mutex);
      s->tx.others_moved = s->rx.others_moved = true;
      return s;
    }
    if (tries == 2 || ++s->stdio_moves > kMostStdioMoves) {
      (void)pin_to_tcp(fd, kAtStdio);
      return nullptr;
    }
    const HandlerWatch since;
    (void)leave_to_kernel(*s, generation, kAtStdio, true, since);
  }
}

void end_stdio(Stream& s) noexcept {
  if (s.rx.gate.leave() && s.rx.want_ready.load(std::memory_order_acquire)) try_ready(s);
  if (s.tx.gate.leave() && s.tx_wanted.load(std::memory_order_acquire)) try_switch_tx(s);
}

void before_stdio_ends() noexcept {
  for (int number = 0; number <= 2; ++number) {
    if (FdTable::stream(number) == nullptr || g_stdio_is_idle == nullptr ||
        g_stdio_is_idle(number)) {
      continue;
    }
    (void)pin_to_tcp(number, kAtStdio);
  }
}

}  // namespace rsock::stream
