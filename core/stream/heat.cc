#include "core/stream/heat.h"

#include <algorithm>
#include <vector>

#include "core/base/config.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

constexpr uint64_t kSecondNs = 1'000'000'000;
constexpr uint64_t kTickNs = kSecondNs;  // while somebody waits
/// A stream has to be so many times as busy as the one that goes for it: moving costs both.
constexpr uint64_t kHotter = 2;

/// What a stream moved between two looks, on whatever path.
struct Warmth {
  Stream* stream;
  uint32_t generation;
  uint64_t bytes = 0;    // at the last look
  uint64_t moved = 0;    // between the last two
  uint64_t last_ns = 0;  // when it last had moved
  bool seen = false;     // still there, at this look
};

struct Heat {
  std::vector<Warmth> lifted;
  std::vector<Warmth> waiting;
  uint64_t next = 0;  // 0: no look is planned
};

/// A pointer, so that a forked child can leave the parent's lists where they are.
constinit Heat* g_heat = nullptr;

Heat& heat() noexcept {
  if (g_heat == nullptr) g_heat = new Heat;
  return *g_heat;
}

uint64_t bytes_of(Stream& s) noexcept {
  return s.tx.offset.load(std::memory_order_relaxed) + s.rx.offset.load(std::memory_order_relaxed);
}

void look(Warmth& w, uint64_t now) noexcept {
  const uint64_t bytes = bytes_of(*w.stream);
  w.moved = bytes - w.bytes;
  w.bytes = bytes;
  if (w.moved != 0 || w.last_ns == 0) w.last_ns = now;
}

bool is_on_rdma(Stream& s) noexcept {
  if (!s.has_channel.load(std::memory_order_acquire)) return false;
  // Kicks are for those on shared memory. The keeper writes the name itself, and comes by here in
  // each of its rounds: a lock would send their spinning readers to sleep.
  if (s.peer_kick.size != 0) return false;
  MutexLock lock(s.rx.mutex);
  return s.channel && s.channel->kind() == PathKind::kRdma;
}

/// The list of those on queue pairs follows the keeper's list of attached streams.
void find_lifted(Heat& h, uint64_t now) noexcept {
  for (Warmth& w : h.lifted) w.seen = false;
  for (const Attached& a : inside().attached) {
    Stream& s = *a.stream;
    const uint32_t generation = s.generation.load(std::memory_order_acquire);
    if (generation % 2 == 0 || s.channel_nonce != a.nonce || !is_on_rdma(s)) continue;
    const auto at = std::find_if(h.lifted.begin(), h.lifted.end(), [&](const Warmth& w) {
      return w.stream == &s && w.generation == generation;
    });
    if (at != h.lifted.end()) {
      at->seen = true;
    } else {
      // New ones count from now on: they were lifted for what they moved before.
      h.lifted.push_back(Warmth{&s, generation, bytes_of(s), UINT64_MAX, now, true});
    }
  }
  std::erase_if(h.lifted, [](const Warmth& w) { return !w.seen; });
}

void set_down_idle(Heat& h, uint64_t now) noexcept {
  const uint64_t idle_ns = uint64_t{config().rdma_idle_s} * kSecondNs;
  if (idle_ns == 0) return;
  for (const Warmth& w : h.lifted) {
    if (now - w.last_ns >= idle_ns) set_down(*w.stream, "idle");
  }
}

void make_room(Heat& h) noexcept {
  if (h.waiting.empty()) return;
  const auto by_moved = [](const Warmth& a, const Warmth& b) { return a.moved < b.moved; };
  const auto hottest = std::max_element(h.waiting.begin(), h.waiting.end(), by_moved);
  const auto coldest = std::min_element(h.lifted.begin(), h.lifted.end(), by_moved);
  if (hottest->moved == 0) return;
  if (coldest != h.lifted.end() && coldest->moved <= hottest->moved / kHotter) {
    set_down(*coldest->stream, "a busier stream needed the queue pair");
  }
  // Also without: room may have come, here or at the peer.
  const Warmth again = *hottest;
  h.waiting.erase(hottest);
  start_attempt(*again.stream, again.generation);
}

uint64_t interval(const Heat& h) noexcept {
  if (!h.waiting.empty()) return kTickNs;
  return std::max<uint64_t>(kTickNs, uint64_t{config().rdma_idle_s} * kSecondNs / 4);
}

}  // namespace

void wait_for_room(Stream& s, uint32_t generation) noexcept {
  Heat& h = heat();
  s.not_lifted.store("too many streams on queue pairs", std::memory_order_relaxed);
  for (const Warmth& w : h.waiting) {
    if (w.stream == &s && w.generation == generation) return;
  }
  h.waiting.push_back(Warmth{&s, generation, bytes_of(s)});
  h.next = 0;
}

uint64_t run_heat_timer(uint64_t now) noexcept {
  const bool idle_counts = config().rdma_idle_s != 0 && !inside().attached.empty();
  if (g_heat == nullptr && !idle_counts) return UINT64_MAX;
  Heat& h = heat();
  if (h.next == 0) {
    find_lifted(h, now);
    if (h.waiting.empty() && h.lifted.empty()) return UINT64_MAX;
    h.next = now + interval(h);
    return h.next;
  }
  if (now < h.next) return h.next;
  // Before new ones are found: they have not had the time to move anything.
  for (Warmth& w : h.lifted) look(w, now);
  find_lifted(h, now);
  std::erase_if(h.waiting, [](const Warmth& w) {
    return !w.stream->owned_by(w.generation) || w.stream->closed.load(std::memory_order_acquire) ||
           w.stream->has_channel.load(std::memory_order_acquire);
  });
  for (Warmth& w : h.waiting) look(w, now);
  set_down_idle(h, now);
  make_room(h);
  h.next = h.waiting.empty() && h.lifted.empty() ? 0 : now + interval(h);
  return h.next != 0 ? h.next : UINT64_MAX;
}

uint64_t run_idle_timer(uint64_t now) noexcept {
  KeeperInside& in = inside();
  const uint64_t idle_ns = uint64_t{config().shm_idle_s} * kSecondNs;
  if (idle_ns == 0 || in.attached.empty()) return UINT64_MAX;
  const uint64_t next = now + std::max<uint64_t>(kTickNs, idle_ns / 4);
  if (in.idle_at == 0) in.idle_at = next;
  if (now < in.idle_at) return in.idle_at;
  bool any = false;
  for (size_t i = 0; i < in.attached.size(); ++i) {
    Attached& a = in.attached[i];
    Stream& s = *a.stream;
    if (s.channel_nonce != a.nonce || !s.has_channel.load(std::memory_order_acquire)) continue;
    if (s.peer_kick.size == 0) continue;  // on a queue pair
    any = true;
    const uint64_t bytes = bytes_of(s);
    if (a.last_ns == 0 || bytes != a.bytes) {
      a.bytes = bytes;
      a.last_ns = now;
    } else if (now - a.last_ns >= idle_ns) {
      a.last_ns = now;  // once: what remains to be done goes on by itself
      set_down(s, "idle");
    }
  }
  in.idle_at = any ? next : UINT64_MAX;
  return in.idle_at;
}

void forget_heat() noexcept { g_heat = nullptr; }  // not freed: malloc may be locked for ever

}  // namespace rsock::stream
