#include "core/stream/stay.h"

#include <utility>

#include "core/base/call_state.h"
#include "core/stream/keeper.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {
namespace {

struct Place {
  Stream* stream = nullptr;
  uint32_t generation = 0;
  uintptr_t frame = 0;  // of the call
};
/// Calls of one thread that sleep at once: each beyond the first is a handler's.
constexpr int kPlaces = 4;
constinit thread_local Place t_places[kPlaces] __attribute__((tls_model("initial-exec"))) = {};

/// The calls of this thread on s: over, or about to find the number closed.
void give_back_own(Stream& s) noexcept {
  for (Place& place : t_places) {
    if (place.stream != &s) continue;
    if (s.owned_by(place.generation)) s.inside.fetch_sub(1, std::memory_order_seq_cst);
    place = Place{};
  }
}

void leave_place(Place& place) noexcept {
  const Place was = std::exchange(place, Place{});
  // Where no number was to be had the stream was closed all the same.
  if (was.stream->owned_by(was.generation)) leave_stream(*was.stream);
}

}  // namespace

void Stay::enter() noexcept {
  place_ = kUncounted;
  for (int i = 0; i < kPlaces && place_ == kUncounted; ++i) {
    if (t_places[i].stream != nullptr) continue;
    t_places[i] = Place{&s_, s_.generation.load(std::memory_order_relaxed),
                        reinterpret_cast<uintptr_t>(this)};
    s_.inside.fetch_add(1, std::memory_order_seq_cst);
    place_ = i;
  }
}

void Stay::leave() noexcept {
  const auto frame = reinterpret_cast<uintptr_t>(this);
  // Ours, unless it was given back meanwhile: this thread closed the number, or is in a forked
  // child. And those below, which a handler left by siglongjmp.
  for (Place& place : t_places) {
    if (place.stream != nullptr && place.frame <= frame) leave_place(place);
  }
}

void leave_stream(Stream& s) noexcept {
  // seq_cst pairs with leave_to_those_inside(): either we see that it is orphaned, or the closing
  // thread sees that nobody is inside. The exchange: one of the two closes.
  if (s.inside.fetch_sub(1, std::memory_order_seq_cst) != 1) return;
  if (!s.orphaned.load(std::memory_order_seq_cst)) return;
  if (s.orphaned.exchange(false, std::memory_order_seq_cst)) close_orphan(s);
}

bool leave_to_those_inside(Stream& s, int fd) noexcept {
  give_back_own(s);
  if (s.inside.load(std::memory_order_seq_cst) != 0) g_poll_forget(s);
  if (s.inside.load(std::memory_order_seq_cst) == 0) return false;
  {
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    if (s.inside.load(std::memory_order_seq_cst) == 0 || !Keeper::hold_locked(s, fd)) return false;
  }
  unlink_items(s);  // of epoll instances: they report no number that is closed
  s.orphaned.store(true, std::memory_order_seq_cst);
  if (s.inside.load(std::memory_order_seq_cst) == 0 &&
      s.orphaned.exchange(false, std::memory_order_seq_cst)) {
    close_orphan(s);
  }
  return true;
}

void forget_stays_in_child() noexcept {
  call_state().thread = 0;
  for (Place& place : t_places) place = Place{};
}

}  // namespace rsock::stream
