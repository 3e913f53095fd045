// TCP_USER_TIMEOUT while lifted: a peer that takes nothing from a full ring for so long has lost
// the connection, as one whose window stays closed (tcp_probe_timer() in net/ipv4/tcp_timer.c).

#include "core/base/clock.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

constexpr uint64_t kNever = UINT64_MAX;

/// When time is up for s: kNever if it is not full any more.
uint64_t time_is_up_locked(Stream& s, uint64_t now) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  const uint64_t limit = uint64_t{s.user_timeout_ms.load(std::memory_order_relaxed)} * 1'000'000;
  if (limit == 0 || s.tx.state != TxState::kRing) return kNever;
  // Over a queue pair a slow reader looks like none: its credits come at half a ring.
  if (!s.channel->decides_alone()) return kNever;
  const size_t third = tx_bound_locked(s) / 3;
  if (tx_room_locked(s, third) >= third) return kNever;
  const uint64_t head = s.channel->tx_tail() - s.channel->tx_unread();
  if (s.full_since_ns == 0 || head != s.full_head) {
    s.full_head = head;
    s.full_since_ns = now;
  }
  return s.full_since_ns + limit;
}

}  // namespace

void note_full_locked(Stream& s) noexcept {
  s.tx_nospace.store(true, std::memory_order_relaxed);
  if (s.channel && s.channel->tx_window() < s.channel->capacity()) watch_lane(s);
  if (s.user_timeout_ms.load(std::memory_order_relaxed) == 0) return;
  // acq_rel pairs with the keeper's store: what it takes for room was there before.
  if (s.full_watched.exchange(true, std::memory_order_acq_rel)) return;
  inside().some_full.store(true, std::memory_order_release);
  call_keeper();
}

uint64_t run_full_timer(uint64_t now) noexcept {
  KeeperInside& in = inside();
  if (!in.some_full.exchange(false, std::memory_order_acq_rel)) return kNever;
  uint64_t next = kNever;
  for (size_t i = 0; i < in.attached.size(); ++i) {
    Stream& s = *in.attached[i].stream;
    if (s.channel_nonce != in.attached[i].nonce) continue;
    if (!s.full_watched.load(std::memory_order_acquire)) continue;
    uint64_t at = kNever;
    {
      MutexLock lock(s.tx.mutex);
      at = time_is_up_locked(s, now);
      if (at == kNever) {
        s.full_since_ns = 0;
        s.full_watched.store(false, std::memory_order_release);
      }
    }
    if (at <= now) {
      fail_stream(s, "the peer does not read (TCP_USER_TIMEOUT)", ETIMEDOUT);
    } else {
      next = std::min(next, at);
    }
  }
  if (next != kNever) in.some_full.store(true, std::memory_order_release);
  return next;
}

}  // namespace rsock::stream
