#include <new>

#include "core/os/os.h"
#include "core/poll/instance.h"

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

Item* acquire_item() noexcept {
  MutexLock lock(g_mutex);
  if (!reserve_locked()) return nullptr;
  if (!g_free->empty()) {
    Item& item = g_free->front();
    g_free->pop_front();
    return &item;
  }
  if (g_used == kMaxItems) return nullptr;
  return new (g_base.load(std::memory_order_relaxed) + kStride * g_used++) Item;
}

void release_item(Item& item) noexcept {
  item.instance = nullptr;
  item.stream = nullptr;
  item.managed = item.disabled = item.fresh = item.local_news = item.linked_ready = false;
  item.doorbell = item.fd = -1;
  item.looks_unanswered = 0;
  item.seen_published = 0;
  MutexLock lock(g_mutex);
  g_free->push_back(item);
}

Item* item_from_data(uint64_t data) noexcept {
  const auto base = reinterpret_cast<uint64_t>(g_base.load(std::memory_order_acquire));
  if (base == 0 || data - base >= kMaxItems * kStride) return nullptr;
  return (data - base) % kStride == 0 ? reinterpret_cast<Item*>(data) : nullptr;
}

uint64_t kick_data() noexcept {
  // An address inside the range that is no item's.
  return reinterpret_cast<uint64_t>(g_base.load(std::memory_order_acquire)) + 1;
}
bool is_kick_data(uint64_t data) noexcept {
  return g_base.load(std::memory_order_acquire) != nullptr && data == kick_data();
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
  for (Registry* r = g_instances; r != nullptr; r = r->next) r->instance->mutex.reset_after_fork();
}

}  // namespace rsock::poll
