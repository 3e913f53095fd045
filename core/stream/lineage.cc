#include "core/stream/lineage.h"

#include <fcntl.h>
#include <poll.h>

#include <new>
#include <utility>

#include "core/os/os.h"
#include "core/stream/keeper.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/moves.h"
#include "core/stream/notes.h"

namespace rsock::stream {
namespace {

constexpr uint32_t kGivenAway = 1u << 31;

/// One stream in one lineage. In memory that all of it share; but for `held` written before the
/// fork only.
struct Cell {
  std::atomic<uint32_t> held;  // processes of the lineage that have a copy; or | kGivenAway
  uint32_t generation;         // of the stream, when it was forked
  Stream* stream;              // the same address in all of them
  uint32_t outer;              // place + 1 in the lineage that the forking process is in; 0: none
  bool lent;                   // an epoll instance that the child shares has it
};

struct Shared {
  std::atomic<uint32_t> instance_given_away;
  Cell cells[];
};

struct Lineage final : KeeperSource {
  void on_event(uint32_t) noexcept override { over = true; }  // only a hang-up can come

  Shared* shared = nullptr;
  size_t bytes = 0;
  uint32_t room = 0;
  uint32_t used = 0;
  os::OwnedFd reads;   // the parent's
  os::OwnedFd writes;  // the child's
  Lineage* outer = nullptr;
  Lineage* next = nullptr;
  bool watched = false;  // in the keeper's epoll
  bool over = false;     // nobody of it is left
  bool taken = false;    // and what they held is taken off
};

constexpr size_t kLineageBytes = (sizeof(Lineage) + 4095) & ~size_t{4095};

// Under the keeper's mutex, but for g_pending and g_own: the forking thread's, and a child's first.
constinit Lineage* g_watched = nullptr;
constinit bool g_forked_since = false;  // some may be of no use any more
constinit Lineage* g_pending = nullptr;
/// What this process was born in. Written before it has a second thread.
constinit Lineage* g_own = nullptr;
/// The last fork made none: this process is in its parent's.
constinit bool g_born_in_none = false;

void destroy(Lineage* l) noexcept {
  Shared* const shared = l->shared;
  const size_t bytes = l->bytes;
  l->~Lineage();
  os::unmap(shared, bytes);
  os::unmap(l, kLineageBytes);
}

/// For the process itself and each of its ancestors: fn(cell of s in that lineage).
template <typename F>
void for_each_around(Lineage* l, uint32_t place, F fn) noexcept {
  for (; l != nullptr && place != 0; l = l->outer) {
    Cell& cell = l->shared->cells[place - 1];
    place = cell.outer;
    fn(cell);
  }
}

/// With every lock held. True: an epoll instance has it.
bool share_watchers(Stream& s) noexcept RSOCK_NO_TSA {
  bool any = false;
  for (Watcher& w : s.watchers) {
    if (!w.survives_fork()) continue;
    any = true;
    w.on_shared_locked();
  }
  return any;
}

/// The instances are this process's alone again. With every lock held, or with s.watch_mutex.
void unshare_watchers(Stream& s, bool locked) noexcept RSOCK_NO_TSA {
  bool known = true;
  for (Watcher& w : s.watchers) {
    if (w.survives_fork()) known = w.on_unshared(locked) && known;
  }
  if (!known) pin_locked(s, kLentReason);
}

void fill_one(Stream& s, void*) noexcept RSOCK_NO_TSA {
  // Whoever is born now is in all the lineages that this process is in.
  for_each_around(g_own, s.kin, [](Cell& c) { c.held.fetch_add(1, std::memory_order_relaxed); });
  const bool lent = share_watchers(s);
  Lineage* l = g_pending;
  if (l == nullptr || l->used == l->room || s.holders == nullptr) {
    if (lent) pin_locked(s, kLentReason);
    return;
  }
  Cell& cell = l->shared->cells[l->used++];
  cell.held.store(1, std::memory_order_relaxed);
  cell.generation = s.generation.load(std::memory_order_relaxed);
  cell.stream = &s;
  cell.outer = s.kin;
  cell.lent = lent;
  if (lent) ++s.lent;
}

void unfill_one(Stream& s, void*) noexcept RSOCK_NO_TSA {
  for_each_around(g_own, s.kin, [](Cell& c) { c.held.fetch_sub(1, std::memory_order_relaxed); });
}

/// Nobody of the lineage is left, so nobody else changes its counts.
void take_off(Lineage& l) noexcept {
  if (std::exchange(l.taken, true)) return;
  const bool instance_gone = l.shared->instance_given_away.load(std::memory_order_relaxed) == 0;
  for (uint32_t i = 0; i < l.used; ++i) {
    Cell& cell = l.shared->cells[i];
    // acquire pairs with the release of whoever counted down last: its use of the stream is over.
    const uint32_t held = cell.held.load(std::memory_order_acquire);
    const bool given_away = (held & kGivenAway) != 0;
    Stream& s = *cell.stream;
    MutexLock watch(s.watch_mutex);
    if (cell.lent && instance_gone && s.owned_by(cell.generation) && s.lent == 1) {
      unshare_watchers(s, false);
    }
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    if (!s.owned_by(cell.generation)) continue;
    // Where this process has closed its copy, the lineages around it take off what is held.
    if (!given_away && s.holders != nullptr) {
      s.holders->count.fetch_sub(held, std::memory_order_acq_rel);
      for_each_around(l.outer, cell.outer,
                      [held](Cell& c) { c.held.fetch_sub(held, std::memory_order_relaxed); });
    }
    if (cell.lent && instance_gone) --s.lent;
    s.calls.store(0, std::memory_order_relaxed);
    s.lift_asked.store(s.pinned.load(std::memory_order_relaxed), std::memory_order_release);
  }
}

/// Its hang-up would change nothing for this process.
bool is_of_no_use(const Lineage& l) noexcept {
  for (uint32_t i = 0; i < l.used; ++i) {
    const Cell& cell = l.shared->cells[i];
    const bool held = cell.held.load(std::memory_order_relaxed) != 0;
    if ((held || cell.lent) && cell.stream->owned_by(cell.generation)) return false;
  }
  return true;
}

/// Between two rounds of the keeper, or while it has no thread: no event may name what goes.
void clear_away() noexcept {
  const bool look = std::exchange(g_forked_since, false);
  for (Lineage** at = &g_watched; *at != nullptr;) {
    Lineage* const l = *at;
    if (l->over) take_off(*l);
    if (!l->taken && !(look && is_of_no_use(*l))) {
      at = &l->next;
      continue;
    }
    *at = l->next;
    if (l->watched) keeper_unwatch(l->reads.get());
    destroy(l);
  }
}

void watch_one(Lineage& l) noexcept {
  if (l.watched || !keeper().epoll) return;
  // EPOLLHUP is reported without being asked for (epoll_ctl(2)).
  l.watched = keeper_watch(l.reads.get(), 0, tagged(&l, KeeperTag::kSource));
}

bool open_pipe(Lineage& l) noexcept {
  const os::MakingInternal guard;
  int ends[2];
  if (!os::pipe2(ends, O_CLOEXEC)) return false;
  auto reads = os::raise(ends[0]);
  auto writes = os::raise(ends[1]);
  if (!reads || !writes) return false;
  l.reads = std::move(*reads);
  l.writes = std::move(*writes);
  return true;
}

int count_watched() noexcept {
  int n = 0;
  for (const Lineage* l = g_watched; l != nullptr; l = l->next) ++n;
  return n;
}

}  // namespace

void make_lineage(int streams) noexcept {
  if (streams <= 0) return;
  KeeperInside& in = inside();
  {
    MutexLock lock(in.mutex);
    // acquire pairs with the release in the keeper's last round: it has no event any more.
    if (in.life.load(std::memory_order_seq_cst) == KeeperLife::kNone) clear_away();
    const int watched = count_watched();
    // Its next round would do, but a process that only forks gives it none.
    if (watched >= kMostLineages / 4 && g_forked_since) Keeper::leave_to_keeper();
    if (watched >= kMostLineages) return;
  }
  constexpr uint32_t kMore = 16;  // streams that come until all are locked
  const uint32_t room = static_cast<uint32_t>(streams) + kMore;
  const size_t bytes = (sizeof(Shared) + room * sizeof(Cell) + 4095) & ~size_t{4095};
  const auto own = os::map_private_reserved(kLineageBytes);
  if (!own) return;
  const auto shared = os::map_anonymous_shared(bytes);
  if (!shared) return os::unmap(*own, kLineageBytes);
  auto* l = new (*own) Lineage;
  l->shared = static_cast<Shared*>(*shared);
  l->bytes = bytes;
  l->room = room;
  l->outer = g_own;
  if (!open_pipe(*l)) return destroy(l);
  g_pending = l;
}

void fill_lineage_locked() noexcept { for_each_stream_locked(fill_one, nullptr); }

void lineage_in_parent(bool failed) noexcept RSOCK_NO_TSA {
  if (failed) for_each_stream_locked(unfill_one, nullptr);
  Lineage* const l = std::exchange(g_pending, nullptr);
  if (l == nullptr) return;
  l->writes.reset();
  for (uint32_t i = 0; failed && i < l->used; ++i) {
    if (!l->shared->cells[i].lent) continue;
    Stream& s = *l->shared->cells[i].stream;
    if (--s.lent == 0) unshare_watchers(s, true);
  }
  if (failed) return destroy(l);
  l->next = g_watched;
  g_watched = l;
  g_forked_since = true;
  watch_one(*l);
}

void lineage_in_child() noexcept RSOCK_NO_TSA {
  // The parent's are for the parent to hear of.
  while (g_watched != nullptr) {
    Lineage* const l = g_watched;
    g_watched = l->next;
    destroy(l);
  }
  g_forked_since = false;
  Lineage* const l = std::exchange(g_pending, nullptr);
  g_born_in_none = l == nullptr;
  if (l == nullptr) return;
  l->reads.reset();
  for (uint32_t i = 0; i < l->used; ++i) l->shared->cells[i].stream->kin = i + 1;
  g_own = l;
}

void parent_is_gone() noexcept {
  if (g_born_in_none) return;  // what to take off is not known
  for (uint32_t i = 0; g_own != nullptr && i < g_own->used; ++i) {
    Cell& cell = g_own->shared->cells[i];
    for_each_around(g_own->outer, cell.outer,
                    [](Cell& c) { c.held.fetch_sub(1, std::memory_order_relaxed); });
    Stream& s = *cell.stream;
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    if (s.kin == i + 1 && s.holders != nullptr) {
      s.holders->count.fetch_sub(1, std::memory_order_acq_rel);
    }
  }
}

void leave_lineages_locked(Stream& s) noexcept {
  // release pairs with take_off() of whoever hears of the end.
  for_each_around(g_own, s.kin, [](Cell& c) { c.held.fetch_sub(1, std::memory_order_release); });
  s.kin = 0;
}

void give_away(Stream& s) noexcept {
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  s.given_away = true;
  if (s.in_exec) (void)write_holder(s.fd.load(std::memory_order_relaxed), fresh_id());
  // Whoever gets it is one holder more, of whose end nobody hears. (At exec one too many.)
  if (s.holders != nullptr) s.holders->count.fetch_add(1, std::memory_order_acq_rel);
  for_each_around(g_own, s.kin,
                  [](Cell& c) { c.held.fetch_or(kGivenAway, std::memory_order_relaxed); });
}

void give_instance_away() noexcept {
  for (Lineage* l = g_own; l != nullptr; l = l->outer) {
    l->shared->instance_given_away.store(1, std::memory_order_relaxed);
  }
}

void watch_lineages() noexcept {
  for (Lineage* l = g_watched; l != nullptr; l = l->next) watch_one(*l);
}

void look_at_lineages() noexcept {
  for (Lineage* l = g_watched; l != nullptr; l = l->next) {
    if (!l->taken && (os::poll_now(l->reads.get(), POLLIN) & POLLHUP) != 0) {
      l->over = true;
      take_off(*l);
    }
  }
}

void settle_lineages() noexcept {
  MutexLock lock(inside().mutex);
  look_at_lineages();
}

void tidy_lineages() noexcept {
  if (g_watched != nullptr) clear_away();
}

int watched_lineages() noexcept {
  MutexLock lock(inside().mutex);
  return count_watched();
}

}  // namespace rsock::stream
