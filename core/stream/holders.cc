#include "core/stream/holders.h"

#include <new>
#include <utility>

#include "core/os/os.h"
#include "core/stream/lineage.h"
#include "core/stream/moves.h"
#include "core/stream/notes.h"

namespace rsock::stream {
namespace {

/// One mapping per fork that had live streams; unmapped in each process when its last stream of it
/// goes.
struct Block {
  Family* cells;
  size_t bytes;
  // Streams of THIS process that point into it, and who fills it: the first may close before the
  // last one has its cell.
  std::atomic<uint32_t> live;
};

void let_go(Block* block) noexcept {
  if (block->live.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  os::unmap(block->cells, block->bytes);
  delete block;
}

struct Filling {
  Block* block;
  size_t next;
  bool fresh_only;
};

// The callbacks run under the slab's lock and take the stream's: attach() looks at the holders
// under them, and release_stream() drops the counter under them, with the memory it lies in.

void count_unheld(Stream& s, void* arg) noexcept {
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  if (s.holders == nullptr) ++*static_cast<size_t*>(arg);
}

void add_one(Stream& s, void* arg) noexcept {
  auto* filling = static_cast<Filling*>(arg);
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  s.tx.others_moved = s.rx.others_moved = true;
  if (s.holders != nullptr) {
    if (!filling->fresh_only) s.holders->count.fetch_add(1, std::memory_order_acq_rel);
    return;
  }
  if (filling->block == nullptr || filling->next * sizeof(Family) >= filling->block->bytes) {
    s.given_away = true;
    pin_locked(s, "shared with a forked process");
    return;
  }
  Family& family = filling->block->cells[filling->next++];
  filling->block->live.fetch_add(1, std::memory_order_relaxed);
  family.note.store(std::exchange(s.note, 0), std::memory_order_relaxed);
  // Another thread is on its way into exec, and out of this family: the next program has to know.
  if (s.in_exec) {
    family.note.store(fresh_id(), std::memory_order_relaxed);
    (void)write_holder(s.fd.load(std::memory_order_relaxed),
                       family.note.load(std::memory_order_relaxed));
  }
  family.count.store(2, std::memory_order_release);
  s.holders = &family;
  s.holders_block = filling->block;
}

void remove_one(Stream& s, void*) noexcept {
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  if (s.holders != nullptr) s.holders->count.fetch_sub(1, std::memory_order_acq_rel);
}

/// 0: nobody beside the family ever held it.
uint32_t note_of(const Stream& s) noexcept {
  return s.holders == nullptr ? s.note : s.holders->note.load(std::memory_order_acquire);
}

}  // namespace

void add_holder_to_all(bool fresh_only) noexcept {
  size_t fresh = 0;
  for_each_stream(count_unheld, &fresh);
  if (fresh == 0 && fresh_only) return;
  Filling filling{nullptr, 0, fresh_only};
  if (fresh != 0) {
    const size_t bytes = (fresh * sizeof(Family) + 4095) & ~size_t{4095};
    if (const auto memory = os::map_anonymous_shared(bytes)) {
      filling.block = new (std::nothrow) Block{static_cast<Family*>(*memory), bytes, {1}};
      if (filling.block == nullptr) os::unmap(*memory, bytes);
    }
  }
  for_each_stream(add_one, &filling);
  if (filling.block != nullptr) let_go(filling.block);
}

void remove_holder_from_all() noexcept { for_each_stream(remove_one, nullptr); }

void drop_holder(Stream& s, int fd) noexcept {
  if (std::exchange(s.in_exec, false)) erase_carried(fd, Way::kExec, exec_key());
  uint32_t note = std::exchange(s.note, 0);
  if (s.holders != nullptr) {
    // release pairs with sole_holder() in the other process: our last use of the stream is over.
    // acquire: the last one finds the note of the family, whoever wrote it.
    const bool last = s.holders->count.fetch_sub(1, std::memory_order_acq_rel) == 1;
    if (last) note = s.holders->note.load(std::memory_order_acquire);
    auto* block = static_cast<Block*>(s.holders_block);
    s.holders = nullptr;
    s.holders_block = nullptr;
    let_go(block);
  }
  if (note != 0) erase_holder(fd, note);
}

bool sole_holder(const Stream& s) noexcept {
  if (s.holders != nullptr && s.holders->count.load(std::memory_order_acquire) > 1) return false;
  const uint32_t note = note_of(s);
  return note == 0 || !others_hold(s.fd.load(std::memory_order_relaxed), note);
}

bool write_note_locked(Stream& s, int fd) noexcept {
  s.tx.others_moved = s.rx.others_moved = true;
  uint32_t id = fresh_id();
  if (s.holders == nullptr) {
    if (s.note == 0) s.note = id;
    id = s.note;
  } else {
    uint32_t none = 0;
    // acq_rel pairs with drop_holder(): whoever counts down last takes it back.
    if (!s.holders->note.compare_exchange_strong(none, id, std::memory_order_acq_rel)) id = none;
  }
  return write_holder(fd, id);
}

/// False: the new program would not find it, nor those who have it as well.
static bool leave_notes_locked(Stream& s, int fd) noexcept RSOCK_REQUIRES(s.tx.mutex)
    RSOCK_REQUIRES(s.rx.mutex) {
  if (s.channel) return false;
  // A process of another pid namespace may have this number too, and be about to exec.
  if (read_carried(fd, Way::kExec, exec_key())) return false;
  const Carried carried{s.connected_here, s.tx.off_tcp, s.rx.off_tcp};
  if (!write_carried(fd, Way::kExec, exec_key(), carried)) return false;
  // A child that leaves others behind: they hear of what it does from now on by notes only.
  if (s.holders != nullptr && !write_note_locked(s, fd)) {
    erase_carried(fd, Way::kExec, exec_key());
    return false;
  }
  drop_holder(s, fd);
  leave_lineages_locked(s);
  s.in_exec = true;
  return true;
}

void leave_by_exec(Stream& s, int fd) noexcept {
  {
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    if (s.given_away || s.in_exec || leave_notes_locked(s, fd)) return;
  }
  give_away(s);
}

void come_back_from_exec(Stream& s) noexcept {
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  if (!s.in_exec) return;
  const int fd = s.fd.load(std::memory_order_relaxed);
  if (!write_note_locked(s, fd)) return;  // the other one stays
  s.in_exec = false;
  erase_carried(fd, Way::kExec, exec_key());
}

void holder_in_child(Stream& s) noexcept { s.in_exec = false; }

}  // namespace rsock::stream
