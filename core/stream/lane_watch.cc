// What a stream with a page lane (shm/page_lane.h) leaves to the clock.
//
// Files that were passed are kept until the peer has read them, and no longer: a deleted file's
// room on the disk, a file system that is to be unmounted and a lease wait for that. A sender that
// goes on lets go of them by the way; for one that does not the keeper looks.
//
// And the lane leaves less unread than the ring would. Two programs that send to each other more
// than they read may stand still for that, so a stream whose peer does not move gets all of the
// ring.

#include <algorithm>

#include "core/base/clock.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

constexpr uint64_t kNever = UINT64_MAX;
constexpr uint64_t kLookNs = 100'000'000;

bool is_full_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  if (s.tx.state != TxState::kRing || !s.tx_nospace.load(std::memory_order_relaxed)) return false;
  const size_t third = std::max<size_t>(tx_bound_locked(s) / 3, 1);
  return tx_room_locked(s, third) < third;
}

struct Seen {
  bool again;    // there may be something to do later
  bool widened;  // there is room that was none
};

Seen look_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  // acq_rel pairs with watch_lane(): what comes after this look is noted again.
  s.lane_watched.exchange(false, std::memory_order_acq_rel);
  if (!s.channel) return {};
  Seen seen{s.channel->tx_let_go_of_files(), false};
  if (s.channel->tx_window() < s.channel->capacity() && is_full_locked(s)) {
    const uint64_t head = s.channel->tx_tail() - s.channel->tx_unread();
    seen.widened = s.lane_head == head;
    if (seen.widened) s.channel->tx_widen();
    s.lane_head = head;
    seen.again = true;
  }
  if (seen.again) s.lane_watched.store(true, std::memory_order_release);
  return seen;
}

bool look(Stream& s) noexcept {
  if (!s.tx.mutex.try_lock()) return true;  // it is busy: not to be stopped for this
  const Seen seen = look_locked(s);
  s.tx.mutex.unlock();
  if (seen.widened) wake_waiters(s);
  return seen.again;
}

}  // namespace

void watch_lane(Stream& s) noexcept {
  if (s.lane_watched.exchange(true, std::memory_order_acq_rel)) return;
  // The keeper looks some time after it has heard of the first one.
  if (!inside().some_lanes.exchange(true, std::memory_order_acq_rel)) call_keeper();
}

uint64_t run_lane_timer(uint64_t now) noexcept {
  KeeperInside& in = inside();
  if (!in.some_lanes.load(std::memory_order_seq_cst)) return kNever;
  if (in.lanes_at == 0) in.lanes_at = now + kLookNs;
  if (now < in.lanes_at) return in.lanes_at;
  // seq_cst, before the looks: who marks a stream after them finds it false, and calls.
  in.some_lanes.exchange(false, std::memory_order_seq_cst);
  bool again = false;
  for (size_t i = 0; i < in.attached.size(); ++i) {
    Stream& s = *in.attached[i].stream;
    if (s.channel_nonce != in.attached[i].nonce) continue;
    if (s.lane_watched.load(std::memory_order_acquire) && look(s)) again = true;
  }
  if (again) in.some_lanes.store(true, std::memory_order_release);
  in.lanes_at = in.some_lanes.load(std::memory_order_acquire) ? now + kLookNs : 0;
  return in.lanes_at != 0 ? in.lanes_at : kNever;
}

}  // namespace rsock::stream
