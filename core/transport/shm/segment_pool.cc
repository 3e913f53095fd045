#include "core/transport/shm/segment_pool.h"

#include <sys/socket.h>

#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/os/os.h"

namespace rsock::transport {
namespace {

constexpr size_t kPlaces = 8;
constexpr uint64_t kKeepNs = 5'000'000'000;

struct Parked {
  ShmSegment segment;
  Reuse reuse;
  os::OwnedFd doorbell;
  uint64_t since;
};

struct Pool {
  Mutex mutex;
  std::optional<Parked> places[kPlaces];
};

/// Emptied by hand, never destroyed: threads may still come when statics go.
union Forever {
  constexpr Forever() : pool{} {}
  ~Forever() {}
  Pool pool;
};
constinit Forever g_forever;

Pool& pool() noexcept { return g_forever.pool; }

/// Has the callee closed its end? What is left in the doorbell are rings that nobody waits for.
bool let_go(int doorbell) noexcept {
  char rings[256];
  for (int i = 0; i < 16; ++i) {
    const auto n = os::recv(doorbell, rings, sizeof(rings), MSG_DONTWAIT);
    if (n && *n == 0) return true;
    if (!n) return n.error() == ECONNRESET;  // closed with rings of ours unread
  }
  return false;
}

}  // namespace

void park_segment(ShmSegment segment, Reuse reuse, os::OwnedFd doorbell) noexcept {
  (void)os::shutdown(doorbell.get(), SHUT_WR);
  Pool& p = pool();
  MutexLock lock(p.mutex);
  std::optional<Parked>* place = &p.places[0];
  for (auto& candidate : p.places) {
    if (!candidate) {
      place = &candidate;
      break;
    }
    if (candidate->since < (*place)->since) place = &candidate;
  }
  place->reset();  // full: the oldest goes
  place->emplace(Parked{std::move(segment), std::move(reuse), std::move(doorbell), monotonic_ns()});
}

std::optional<CreatedSegment> take_segment(size_t ring_size, const Partner& partner) noexcept {
  if (!partner.is_known()) return std::nullopt;
  Pool& p = pool();
  MutexLock lock(p.mutex);
  for (auto& place : p.places) {
    if (!place || place->segment.ring_size() != ring_size || place->reuse.partner != partner ||
        !let_go(place->doorbell.get())) {
      continue;
    }
    CreatedSegment taken{std::move(place->segment), std::move(place->reuse.memfd)};
    place.reset();
    taken.segment.begin_again();
    return taken;
  }
  return std::nullopt;
}

bool tidy_segments(uint64_t now_ns) noexcept {
  Pool& p = pool();
  MutexLock lock(p.mutex);
  bool waiting = false;
  for (auto& place : p.places) {
    if (place && place->since + kKeepNs < now_ns) place.reset();
    waiting |= place.has_value();
  }
  return waiting;
}

void lock_segments() noexcept RSOCK_NO_TSA { pool().mutex.lock(); }

void unlock_segments() noexcept RSOCK_NO_TSA { pool().mutex.unlock(); }

void segments_after_fork_child() noexcept RSOCK_NO_TSA {
  Pool& p = pool();
  p.mutex.reset_after_fork();
  for (auto& place : p.places) place.reset();
}

}  // namespace rsock::transport
