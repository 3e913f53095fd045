#include <boost/intrusive/list.hpp>
#include <new>

#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/holders.h"
#include "core/stream/lineage.h"
#include "core/stream/stream.h"

// Type-stable memory: chunks are never unmapped, so that a call which raced with close() finds a
// Stream, takes its lock and reads `closed`.

namespace rsock::stream {
namespace {

constexpr size_t kChunk = 64;

using List = boost::intrusive::list<Stream, boost::intrusive::constant_time_size<false>>;

Mutex g_mutex;
List& free_list() {
  static List* list = new (std::nothrow) List;  // never destroyed: calls come after our destructors
  return *list;
}
List& live_list() {
  static List* list = new (std::nothrow) List;
  return *list;
}
std::atomic<int> g_live{0};

bool grow() noexcept {
  auto* chunk = static_cast<Stream*>(
      ::operator new (kChunk * sizeof(Stream), std::align_val_t{64}, std::nothrow));
  if (chunk == nullptr) return false;
  for (size_t i = 0; i < kChunk; ++i) free_list().push_back(*new (&chunk[i]) Stream);
  return true;
}

/// A free stream that no thread is still inside of: a call can sit in the kernel on a descriptor
/// that was closed under it, and leaves the gate only later.
Stream* take_free_locked() noexcept RSOCK_REQUIRES(g_mutex) {
  for (int tries = 0; tries < 8 && !free_list().empty(); ++tries) {
    Stream& s = free_list().front();
    free_list().pop_front();
    if (s.tx.gate.idle() && s.rx.gate.idle()) return &s;
    free_list().push_back(s);
  }
  if (!grow()) return nullptr;
  Stream& s = free_list().back();
  free_list().pop_back();
  return &s;
}

void reset(Stream& s, int fd, bool nonblocking) noexcept {
  s.tx.offset.store(0, std::memory_order_relaxed);
  s.rx.offset.store(0, std::memory_order_relaxed);
  s.tx.state = TxState::kKernel;
  s.rx.state = RxState::kKernel;
  s.tx.ring_done = s.tx.shut = s.tx.fin_owed = s.tx.lied = s.tx.barred = false;
  s.rx.ring_done = s.rx.shut = false;
  s.zero_copies.reset();
  s.send_bound.store(SIZE_MAX, std::memory_order_relaxed);
  s.tx.full_at = 0;
  s.tx.replay_next = s.tx.off_tcp = s.rx.off_tcp = s.rx.kicked_ns = 0;
  for (auto* flag :
       {&s.rx.want_ready, &s.rx.await_replay, &s.closed, &s.has_channel, &s.tx_wanted,
        &s.lift_asked, &s.pinned, &s.strict_failed, &s.tcp_event, &s.peer_gone, &s.tx_nospace,
        &s.adopted, &s.rx.fin_seen, &s.detach_due, &s.set_down_due, &s.strange}) {
    flag->store(false, std::memory_order_relaxed);
  }
  s.fd.store(fd, std::memory_order_relaxed);
  s.doorbell_fd.store(-1, std::memory_order_relaxed);
  s.armed_undrained.store(0, std::memory_order_relaxed);
  s.fd_refs.store(1, std::memory_order_relaxed);
  s.holders = nullptr;
  s.holders_block = nullptr;
  s.cookie.store(0, std::memory_order_relaxed);
  s.note = 0;
  s.in_exec = s.given_away = s.tx.others_moved = s.rx.others_moved = false;
  s.kin = s.lent = 0;
  s.nonblocking.store(nonblocking, std::memory_order_relaxed);
  s.rcv_timeout_ns.store(0, std::memory_order_relaxed);
  s.snd_timeout_ns.store(0, std::memory_order_relaxed);
  s.low_water.store(1, std::memory_order_relaxed);
  s.user_timeout_ms.store(0, std::memory_order_relaxed);
  s.calls.store(0, std::memory_order_relaxed);
  s.not_lifted.store(nullptr, std::memory_order_relaxed);
  s.ever_attached = false;
  s.attempts = 0;
  s.channel_nonce = 0;
  s.ever_lifted = 0;
  s.set_downs = 0;
  s.path_failed = false;
  s.failed = false;
  s.awaited = false;
  s.inside.store(0, std::memory_order_relaxed);
  s.orphaned.store(false, std::memory_order_relaxed);
  s.path_failed_ns = 0;
  s.error.store(0, std::memory_order_relaxed);
  s.error_told.store(false, std::memory_order_relaxed);
  for (int i = 0; i < kPaths; ++i) {
    s.sent[i].store(0, std::memory_order_relaxed);
    s.received[i].store(0, std::memory_order_relaxed);
  }
  s.zero_copied.store(0, std::memory_order_relaxed);
  s.lane_calls = 0;
  s.tx.spin = s.rx.spin = SpinState{};
  s.connected_here = false;
}

}  // namespace

Stream* acquire_stream(int fd, bool nonblocking) noexcept {
  Stream* s;
  {
    MutexLock lock(g_mutex);
    s = take_free_locked();
    if (s == nullptr) return nullptr;
    live_list().push_back(*s);
  }
  reset(*s, fd, nonblocking);
  // release pairs with owned_by(): odd means in use, and everything above is in place.
  s->generation.fetch_add(1, std::memory_order_release);
  g_live.fetch_add(1, std::memory_order_relaxed);
  return s;
}

void release_stream(Stream& s, int fd) noexcept {
  add_to_totals(s);
  {
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    leave_lineages_locked(s);
    drop_holder(s, fd);  // sole_holder() looks under the same locks
  }
  s.generation.fetch_add(1, std::memory_order_release);
  g_live.fetch_sub(1, std::memory_order_relaxed);
  MutexLock lock(g_mutex);
  live_list().erase(live_list().iterator_to(s));
  // Back of the queue: a stale pointer then most likely still meets the closed stream it knew.
  free_list().push_back(s);
}

int live_streams() noexcept { return g_live.load(std::memory_order_relaxed); }

void for_each_stream(void (*fn)(Stream&, void*), void* arg) noexcept {
  MutexLock lock(g_mutex);
  for (Stream& s : live_list()) fn(s, arg);
}

SomeStreams find_streams(bool (*is)(const Stream&) noexcept) noexcept {
  SomeStreams some;
  if (live_streams() == 0) return some;
  MutexLock lock(g_mutex);
  for (Stream& s : live_list()) {
    if (some.count < SomeStreams::kMost && is(s)) some.streams[some.count++] = &s;
  }
  return some;
}

void for_each_stream_locked(void (*fn)(Stream&, void*), void* arg) noexcept RSOCK_NO_TSA {
  for (Stream& s : live_list()) fn(s, arg);
}

void lock_all_streams(void (*between)() noexcept) noexcept RSOCK_NO_TSA {
  g_mutex.lock();
  for (Stream& s : live_list()) s.watch_mutex.lock();
  if (between != nullptr) between();
  for (Stream& s : live_list()) {
    s.tx.mutex.lock();
    s.rx.mutex.lock();
  }
}

void unlock_all_streams(void (*between)() noexcept) noexcept RSOCK_NO_TSA {
  for (Stream& s : live_list()) {
    s.rx.mutex.unlock();
    s.tx.mutex.unlock();
  }
  if (between != nullptr) between();
  for (Stream& s : live_list()) s.watch_mutex.unlock();
  g_mutex.unlock();
}

void slab_after_fork_child() noexcept { g_mutex.reset_after_fork(); }

}  // namespace rsock::stream
