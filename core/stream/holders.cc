#include "core/stream/holders.h"

#include <new>

#include "core/os/os.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

/// One mapping per fork that had live streams; unmapped in each process when its last stream of it
/// goes.
struct Block {
  std::atomic<uint32_t>* cells;
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
  if (s.holders != nullptr) {
    if (!filling->fresh_only) s.holders->fetch_add(1, std::memory_order_acq_rel);
    return;
  }
  if (filling->block == nullptr ||
      filling->next * sizeof(std::atomic<uint32_t>) >= filling->block->bytes) {
    pin_locked(s, "shared with a forked process");
    return;
  }
  s.holders = &filling->block->cells[filling->next++];
  s.holders_block = filling->block;
  filling->block->live.fetch_add(1, std::memory_order_relaxed);
  s.holders->store(2, std::memory_order_release);
}

void remove_one(Stream& s, void*) noexcept {
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  if (s.holders != nullptr) s.holders->fetch_sub(1, std::memory_order_acq_rel);
}

}  // namespace

void add_holder_to_all(bool fresh_only) noexcept {
  size_t fresh = 0;
  for_each_stream(count_unheld, &fresh);
  if (fresh == 0 && fresh_only) return;
  Filling filling{nullptr, 0, fresh_only};
  if (fresh != 0) {
    const size_t bytes = (fresh * sizeof(std::atomic<uint32_t>) + 4095) & ~size_t{4095};
    if (const auto memory = os::map_anonymous_shared(bytes)) {
      filling.block =
          new (std::nothrow) Block{static_cast<std::atomic<uint32_t>*>(*memory), bytes, {1}};
      if (filling.block == nullptr) os::unmap(*memory, bytes);
    }
  }
  for_each_stream(add_one, &filling);
  if (filling.block != nullptr) let_go(filling.block);
}

void remove_holder_from_all() noexcept { for_each_stream(remove_one, nullptr); }

void drop_holder(Stream& s) noexcept {
  if (s.holders == nullptr) return;
  // release pairs with sole_holder() in the other process: our last use of the stream is over.
  s.holders->fetch_sub(1, std::memory_order_acq_rel);
  auto* block = static_cast<Block*>(s.holders_block);
  s.holders = nullptr;
  s.holders_block = nullptr;
  let_go(block);
}

bool sole_holder(const Stream& s) noexcept {
  return s.holders == nullptr || s.holders->load(std::memory_order_acquire) <= 1;
}

}  // namespace rsock::stream
