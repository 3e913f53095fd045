#include <algorithm>
#include <new>
#include <utility>

#include "core/os/os.h"
#include "core/poll/instance.h"
#include "core/stream/fd_table.h"

// Items come from one reserved range, so that "is this event ours?" is a comparison; instances from
// the heap, never freed: a stale pointer in the descriptor table must stay lockable.

namespace rsock::poll {
namespace {

constexpr size_t kMaxItems = 256 * 1024;
constexpr size_t kStride = (sizeof(Item) + 63) & ~size_t{63};

Mutex g_mutex;
std::atomic<char*> g_base{nullptr};
size_t g_used RSOCK_GUARDED_BY(g_mutex) = 0;
ItemList* g_free RSOCK_GUARDED_BY(g_mutex) = nullptr;

// Heads of the lists of unconnected sockets, by number; null until there is one.
std::atomic<std::atomic<Item*>*> g_unconnected{nullptr};
int g_highest_unconnected RSOCK_GUARDED_BY(g_mutex) = -1;  // that ever was

struct Registry {
  Instance* instance;
  Registry* next;
};
Registry* g_instances RSOCK_GUARDED_BY(g_mutex) = nullptr;
// Between lock_instances() and unlock_instances(); one fork at a time.
Registry* g_locked = nullptr;
bool g_fork_holds = false;

bool reserve_locked() noexcept RSOCK_REQUIRES(g_mutex) {
  if (g_base.load(std::memory_order_relaxed) != nullptr) return true;
  const auto memory = os::map_private_reserved(kMaxItems * kStride);
  if (!memory) return false;
  g_free = new (std::nothrow) ItemList;
  if (g_free == nullptr) return false;
  // release pairs with item_from_data().
  g_base.store(static_cast<char*>(*memory), std::memory_order_release);
  return true;
}

}  // namespace

namespace {

Item* acquire_locked() noexcept RSOCK_REQUIRES(g_mutex) {
  if (!reserve_locked()) return nullptr;
  if (!g_free->empty()) {
    Item& item = g_free->front();
    g_free->pop_front();
    return &item;
  }
  if (g_used == kMaxItems) return nullptr;
  return new (g_base.load(std::memory_order_relaxed) + kStride * g_used++) Item;
}

void release_locked(Item& item) noexcept RSOCK_REQUIRES(g_mutex) {
  item.instance = nullptr;
  item.stream = nullptr;
  item.misses = 0;
  item.managed = item.parked = item.disabled = item.fresh = item.local_news = false;
  item.linked_ready = item.linked_drowsy = item.shared = false;
  item.doorbell = item.fd = -1;
  item.owns_doorbell = item.shares_doorbell = item.deaf = false;
  item.rx_by_kernel = item.tx_by_kernel = true;
  item.kernel_said = 0;
  item.seen_published = 0;
  item.next_unconnected = nullptr;
  g_free->push_back(item);
}

/// Unlinks what `goes` says from the list of one number.
template <typename F>
void forget_locked(std::atomic<Item*>& head, F&& goes) noexcept RSOCK_REQUIRES(g_mutex) {
  Item* kept = nullptr;
  for (Item* item = head.load(std::memory_order_relaxed); item != nullptr;) {
    Item* next = item->next_unconnected;
    if (goes(*item)) {
      release_locked(*item);
    } else {
      item->next_unconnected = std::exchange(kept, item);
    }
    item = next;
  }
  head.store(kept, std::memory_order_release);
}

}  // namespace

Item* acquire_item() noexcept {
  MutexLock lock(g_mutex);
  return acquire_locked();
}

void release_item(Item& item) noexcept {
  MutexLock lock(g_mutex);
  release_locked(item);
}

void remember_unconnected(Instance* in, int fd, const epoll_event& event) noexcept {
  if (static_cast<unsigned>(fd) >= static_cast<unsigned>(stream::FdTable::kSize)) return;
  MutexLock lock(g_mutex);
  auto* heads = g_unconnected.load(std::memory_order_relaxed);
  if (heads == nullptr) {
    // Zeroed memory is null pointers; touched pages only cost something.
    const auto memory = os::map_private_reserved(stream::FdTable::kSize * sizeof(*heads));
    if (!memory) return;
    heads = static_cast<std::atomic<Item*>*>(*memory);
    // release pairs with take_unconnected().
    g_unconnected.store(heads, std::memory_order_release);
  }
  g_highest_unconnected = std::max(g_highest_unconnected, fd);
  Item* item = heads[fd].load(std::memory_order_relaxed);
  while (item != nullptr && item->instance != in) item = item->next_unconnected;
  if (item == nullptr) {
    if ((item = acquire_locked()) == nullptr) return;
    item->instance = in;
    item->next_unconnected = heads[fd].load(std::memory_order_relaxed);
    // release pairs with take_unconnected(), which looks without the lock first.
    heads[fd].store(item, std::memory_order_release);
  }
  item->user = event;
}

void forget_unconnected(Instance* in, int fd) noexcept {
  auto* heads = g_unconnected.load(std::memory_order_acquire);
  if (heads == nullptr ||
      static_cast<unsigned>(fd) >= static_cast<unsigned>(stream::FdTable::kSize)) {
    return;
  }
  MutexLock lock(g_mutex);
  forget_locked(heads[fd], [&](const Item& item) { return item.instance == in; });
}

void forget_unconnected(Instance& in) noexcept {
  auto* heads = g_unconnected.load(std::memory_order_acquire);
  if (heads == nullptr) return;
  MutexLock lock(g_mutex);
  for (int fd = 0; fd <= g_highest_unconnected; ++fd) {
    if (heads[fd].load(std::memory_order_relaxed) == nullptr) continue;
    forget_locked(heads[fd], [&](const Item& item) { return item.instance == &in; });
  }
}

Item* take_unconnected(int fd) noexcept {
  auto* heads = g_unconnected.load(std::memory_order_acquire);
  if (heads == nullptr ||
      static_cast<unsigned>(fd) >= static_cast<unsigned>(stream::FdTable::kSize) ||
      heads[fd].load(std::memory_order_acquire) == nullptr) {
    return nullptr;
  }
  MutexLock lock(g_mutex);
  return heads[fd].exchange(nullptr, std::memory_order_acq_rel);
}

namespace {
constexpr int kArmingShift = 48;  // above what an address uses
constexpr uint64_t kTagMask = 7;
}  // namespace

EventData EventData::parse(uint64_t data) noexcept {
  const auto base = reinterpret_cast<uint64_t>(g_base.load(std::memory_order_acquire));
  const uint64_t address = data & ((uint64_t{1} << kArmingShift) - 1) & ~kTagMask;
  const auto tag = static_cast<Tag>(data & kTagMask);
  if (base == 0 || address - base >= kMaxItems * kStride || (address - base) % kStride != 0)
    return {};
  const auto arming = static_cast<uint16_t>(data >> kArmingShift);
  const bool known =
      tag == Tag::kOneshot || (arming == 0 && (tag == Tag::kTcp || tag == Tag::kDoorbell ||
                                               (tag == Tag::kKick && address == base)));
  if (!known) return {};
  return {tag, arming, reinterpret_cast<Item*>(address)};
}

uint64_t EventData::of(const Item& item, Tag tag) noexcept {
  const uint64_t arming = tag == Tag::kOneshot ? item.arming : 0;
  return reinterpret_cast<uint64_t>(&item) | static_cast<uint64_t>(tag) | arming << kArmingShift;
}

uint64_t EventData::kick() noexcept {
  return reinterpret_cast<uint64_t>(g_base.load(std::memory_order_acquire)) |
         static_cast<uint64_t>(Tag::kKick);
}

Instance* acquire_instance(int epfd) noexcept {
  auto* instance = new (std::nothrow) Instance;
  auto* entry = new (std::nothrow) Registry;
  if (instance == nullptr || entry == nullptr) {
    delete instance;
    delete entry;
    return nullptr;
  }
  instance->epfd = epfd;
  instance->fd_refs.store(1, std::memory_order_relaxed);
  MutexLock lock(g_mutex);
  *entry = Registry{instance, g_instances};
  g_instances = entry;
  return instance;
}

void release_instance(Instance& instance) noexcept {
  // Kept: a program makes few of them, and a late event of another thread must find a lockable one.
  instance.kick.reset();
}

void lock_instances() noexcept RSOCK_NO_TSA {
  // The list only grows at its head, and acquire_instance() holds no instance: first those known,
  // then the list. g_mutex is a leaf below the instances.
  Registry* known = nullptr;
  {
    MutexLock lock(g_mutex);
    known = g_instances;
  }
  for (Registry* r = known; r != nullptr; r = r->next) r->instance->mutex.lock();
  g_locked = known;
  g_mutex.lock();
  g_fork_holds = true;
}

void unlock_instances() noexcept RSOCK_NO_TSA {
  if (!g_fork_holds) return;  // the first instance of all came to be during the fork
  g_fork_holds = false;
  g_mutex.unlock();
  for (Registry* r = g_locked; r != nullptr; r = r->next) r->instance->mutex.unlock();
}

void instances_after_fork_child() noexcept {
  g_mutex.reset_after_fork();
  g_fork_holds = false;
  MutexLock lock(g_mutex);
  for (Registry* r = g_instances; r != nullptr; r = r->next) {
    r->instance->mutex.reset_after_fork();
    // The parent's threads. This one, if a handler forks inside a wait, counts itself out once
    // more.
    r->instance->sleepers.store(0, std::memory_order_relaxed);
  }
}

}  // namespace rsock::poll
