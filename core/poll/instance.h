// An epoll instance that stays the kernel's, with streams in it whose readiness the kernel can't
// see.
//
// Purpose. Each stream in an instance has an Item. While the stream is on plain TCP the kernel's
// registration is exactly the program's (EPOLLONESHOT: under our data, so that we know when it is
// spent). When a channel is attached the Item is *managed*: the TCP descriptor is registered
// edge-triggered under the Item's own address, the doorbell beside it, and what the program gets is
// computed by us; the program's events are not in the kernel then, not for a moment. Adding the
// doorbell wakes a thread that is inside epoll_wait already. Cost per wait is O(ready): only Items
// that something rang for are looked at.
//
// Ownership: instances and items live in memory that is never unmapped; an Item's address doubles
// as the event data by which we know our own events among the program's. It belongs to its instance
// and is linked in its stream's watcher list.
//
// Thread safety: everything under mutex (lock order: stream's watch_mutex, instance, tx, rx).
//
// Invariants.
//  1. An item in `ready` is to be looked at by the next wait. A managed, enabled item that is not
//  in `ready` is
//     armed: the next byte, room or local change rings for it.
//  2. A level-triggered item leaves `ready` only by a look that finds nothing after arming. One
//  that had news lately stays for some fruitless looks, not armed (*warm*): a busy thread finds the
//  next bytes itself, and their sender makes no system call to tell it. Whoever goes to sleep arms
//  all; those then lie in `drowsy`, and whoever wakes takes the arming back.
//  3. A managed item that the program deleted may stay, *parked*: disabled, and absent to the
//  program, until it is added again (some programs do both around each wait, and each would cost
//  the kernel five calls), waits elsewhere, or loses its channel.
//  4. An edge-triggered item is reported when something is new since its last report: more bytes
//  published
//     than then, room after a sender was told to wait, or a local change.
#pragma once

#include <sys/epoll.h>

#include <boost/intrusive/list.hpp>

#include "core/base/deadline.h"
#include "core/base/mutex.h"
#include "core/os/owned_fd.h"
#include "core/stream/stream.h"

namespace rsock::poll {

class Instance;

struct ReadyHook;
struct ItemHook;
using ReadyListHook =
    boost::intrusive::list_base_hook<boost::intrusive::tag<ReadyHook>,
                                     boost::intrusive::link_mode<boost::intrusive::safe_link>>;
using ItemListHook =
    boost::intrusive::list_base_hook<boost::intrusive::tag<ItemHook>,
                                     boost::intrusive::link_mode<boost::intrusive::safe_link>>;

class Item final : public stream::Watcher, public ReadyListHook, public ItemListHook {
 public:
  void on_maybe_ready(stream::Stream& s) noexcept override;
  void on_path_changed(stream::Stream& s) noexcept override;
  void on_closed(stream::Stream& s) noexcept override;
  void on_shared_locked() noexcept override;
  bool on_unshared(bool locked) noexcept override;
  bool survives_fork() const noexcept override { return true; }

  Instance* instance = nullptr;
  stream::Stream* stream = nullptr;
  int fd = -1;
  epoll_event user{};   // what the program registered
  uint16_t arming = 0;  // of EPOLLONESHOT on TCP; goes on when the item is another's
  bool managed = false;
  bool disabled = false;     // EPOLLONESHOT, reported; or
  bool parked = false;       // ... deleted by the program, and kept
  bool shared = false;       // another process has the registration too: on TCP it is the program's
  bool fresh = false;        // added or modified by the program: whatever holds is news
  bool local_news = false;   // an edge for EPOLLET that no word shows
  bool rx_by_kernel = true;  // EPOLLET: who carried the directions at the last report
  bool tx_by_kernel = true;
  uint32_t kernel_said = 0;  // EPOLLET: the TCP descriptor's edges since then
  bool linked_ready = false;   // in `ready` or, if
  bool linked_drowsy = false;  // ... not, in `drowsy`
  uint8_t misses = 0;          // looks that found nothing since the last report
  int doorbell = -1;
  // Who hears of the doorbell's rings: this item, another one of the same stream, or nobody.
  bool owns_doorbell = false;
  bool shares_doorbell = false;
  bool deaf = false;
  Item* next_unconnected = nullptr;
  uint64_t seen_published = 0;  // EPOLLET: what had been published at the last report
};

using ReadyList = boost::intrusive::list<Item, boost::intrusive::base_hook<ReadyListHook>,
                                         boost::intrusive::constant_time_size<false>>;
using ItemList = boost::intrusive::list<Item, boost::intrusive::base_hook<ItemListHook>,
                                        boost::intrusive::constant_time_size<true>>;

inline constexpr uint32_t kInterest = EPOLLIN | EPOLLPRI | EPOLLOUT | EPOLLRDNORM | EPOLLRDBAND |
                                      EPOLLWRNORM | EPOLLWRBAND | EPOLLRDHUP;
/// What the TCP descriptor of a managed item is registered for.
inline constexpr uint32_t kOurEvents = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

/// Event data by which we know our own registrations: the item's address, and in its low bits what
/// is registered.
struct EventData {
  enum class Tag : uint8_t {
    kTcp = 0,       // a managed item's TCP descriptor
    kKick = 1,      // Instance::kick
    kDoorbell = 2,  // a managed item's doorbell
    kOneshot = 4,   // EPOLLONESHOT on TCP; which arming, in the top 16 bits
    kProgram = 7,   // not ours
  };
  Tag tag = Tag::kProgram;
  uint16_t arming = 0;
  Item* item = nullptr;

  static EventData parse(uint64_t data) noexcept;
  static uint64_t of(const Item& item, Tag tag = Tag::kTcp) noexcept;
  static uint64_t kick() noexcept;
};

/// The first of events[0, n) with this data of the program's; n if there is none.
inline int find_data(const epoll_event* events, int n, uint64_t data) noexcept {
  int i = 0;
  while (i < n && events[i].data.u64 != data) ++i;
  return i;
}

class Instance {
 public:
  Mutex mutex;
  int epfd = -1;
  std::atomic<int> fd_refs{0};
  std::atomic<int> managed_count{0};
  /// Threads that wait in the kernel. Nothing that is left in `ready` is armed, so whoever leaves
  /// something there while others sleep rings for one of them, as ep_done_scan() does.
  std::atomic<int> sleepers{0};
  ReadyList ready;
  ReadyList drowsy;  // warm items that are armed because a thread went to sleep
  ItemList managed_items;
  bool kernel_first RSOCK_GUARDED_BY(mutex) =
      false;  // fairness: our items filled the last answer alone
  /// Watched by poll, select or another epoll instance, which see only what the kernel sees: its
  /// streams stay on TCP.
  std::atomic<bool> nested{false};
  os::OwnedFd kick;  // eventfd in the kernel's instance: wakes a waiter for a local change

  int sharing RSOCK_GUARDED_BY(mutex) = 0;  // items that hear of their doorbell by another item
  int deaf RSOCK_GUARDED_BY(mutex) = 0;     // items that do not hear of it

  // --- under mutex ---
  /// News of some streams do not wake a thread that waits in the kernel: it has to look now and
  /// then. Makes all items ready that need it.
  bool must_nap_locked() noexcept RSOCK_REQUIRES(mutex);
  /// in_kernel: the TCP descriptor has our registration already.
  void manage_locked(Item& item, bool in_kernel) noexcept RSOCK_REQUIRES(mutex);
  void unmanage_locked(Item& item) noexcept RSOCK_REQUIRES(mutex);
  /// The registration of an item on TCP, armed anew.
  epoll_event plain_locked(Item& item) noexcept RSOCK_REQUIRES(mutex);
  /// The program has modified a managed item.
  void modified_locked(Item& item) noexcept RSOCK_REQUIRES(mutex);
  /// The program deleted a managed item. False: this one can't be kept.
  bool park_locked(Item& item) noexcept RSOCK_REQUIRES(mutex);
  /// The item goes, wherever it is linked in this instance; the stream's list is the caller's.
  /// registered: the kernel's registration stays, until the file goes.
  void forget_locked(Item& item, bool registered) noexcept RSOCK_REQUIRES(mutex);
  void make_ready_locked(Item& item, bool local) noexcept RSOCK_REQUIRES(mutex);
  /// A thread of this instance has slept: what it armed for that is warm again.
  void rouse_locked() noexcept RSOCK_REQUIRES(mutex);
  /// Out of `ready` or `drowsy`.
  void unlink_locked(Item& item) noexcept RSOCK_REQUIRES(mutex);
  /// Looks at the ready items, fills events[have, max). Returns how many it added; -EFAULT: events
  /// is bad where the first would go. What stands in events[0, have) was given by the kernel in
  /// this call. `arm`: the caller sleeps next if there is nothing, so nothing may stay in `ready`
  /// then.
  int collect_locked(epoll_event* events, int have, int max, bool arm) noexcept
      RSOCK_REQUIRES(mutex);
  /// Something is ready, or was left unarmed, and a thread sleeps: ring() once the mutex is free.
  bool others_have_to_look_locked() const noexcept RSOCK_REQUIRES(mutex) {
    // seq_cst: see epoll_wait().
    return !ready.empty() && sleepers.load(std::memory_order_seq_cst) > 0;
  }
  /// Streams whose doorbell a look drained: other sleepers may have been robbed of their ring, and
  /// are told once the mutex is free.
  void tell_robbed() noexcept RSOCK_EXCLUDES(mutex);
  /// Sorts our own events out of the kernel's: they make items ready; the program's stay, packed.
  /// Returns how many stay.
  int sort_locked(epoll_event* events, int n) noexcept RSOCK_REQUIRES(mutex);
  void ring() noexcept;
  /// Sets nested, and its streams down.
  void become_nested() noexcept RSOCK_EXCLUDES(mutex);

 private:
  static constexpr size_t kMaxRobbed = 8;
  static constexpr uint8_t kMostMisses = 100;
  Item* robbed_[kMaxRobbed] RSOCK_GUARDED_BY(mutex) = {};
  size_t robbed_count_ RSOCK_GUARDED_BY(mutex) = 0;

  bool has_kick_locked() noexcept RSOCK_REQUIRES(mutex);
  void add_doorbell_locked(Item& item) noexcept RSOCK_REQUIRES(mutex);
  void drop_doorbell_locked(Item& item) noexcept RSOCK_REQUIRES(mutex);
  void leave_channel_locked(Item& item) noexcept RSOCK_REQUIRES(mutex);
  void drain_and_arm_locked(Item& item) noexcept RSOCK_REQUIRES(mutex);
  bool look_locked(Item& item, bool arm, epoll_event* out) noexcept RSOCK_REQUIRES(mutex);
  bool may_be_warm_locked(const Item& item, size_t others) const noexcept RSOCK_REQUIRES(mutex);
  int look_at_all_locked(epoll_event* events, int have, int max, bool arm) noexcept
      RSOCK_REQUIRES(mutex);
  bool rests_after_edge_locked(Item& item) noexcept RSOCK_REQUIRES(mutex);
  struct Arrivals {
    uint64_t count = 0;      // bytes that had come, by whatever path
    bool by_kernel = false;  // TCP carries the direction
  };
  Arrivals arrivals(Item& item) noexcept;
  bool is_edge_locked(Item& item, uint32_t events, const Arrivals& arrivals) noexcept
      RSOCK_REQUIRES(mutex);
  uint32_t events_now(Item& item) noexcept;
};

// --- epoll_ctl.cc ---
Instance* instance_of(int epfd) noexcept;
/// The socket fd has become a stream: registrations that were made before find it.
void adopt_stream(stream::Stream& s, int fd) noexcept;
/// The number fd goes, the stream lives on under another one.
void leave_to_kernel(stream::Stream& s, int fd) noexcept;

/// fn(item) for each of s; it may unlink and forget that one.
template <typename F>
void for_each_item_locked(stream::Stream& s, F fn) noexcept RSOCK_REQUIRES(s.watch_mutex) {
  for (auto it = s.watchers.begin(); it != s.watchers.end();) {
    stream::Watcher& w = *it++;
    if (w.survives_fork()) fn(static_cast<Item&>(w));
  }
}

/// Parked items of s for which `goes(item)` holds, from every trace. No lock of an instance held.
template <typename Goes>
void forget_parked_locked(stream::Stream& s, Goes goes) noexcept RSOCK_REQUIRES(s.watch_mutex) {
  for_each_item_locked(s, [&](Item& item) RSOCK_NO_TSA {
    if (!goes(item)) return;
    Instance& in = *item.instance;
    MutexLock lock(in.mutex);
    if (!item.parked) return;
    stream::unlink_watcher_locked(s, item);
    in.forget_locked(item, true);
  });
}

/// A stream is about to be waited for elsewhere: items that are parked in other instances go, or
/// its doorbell would wake their waiters.
inline void evict_parked_locked(stream::Stream& s, const Instance* except) noexcept
    RSOCK_REQUIRES(s.watch_mutex) {
  forget_parked_locked(s, [except](const Item& item) { return item.instance != except; });
}

// --- epoll.cc ---
/// Hooks for the room below: set when the first instance or the first sleeper's bell comes to be.
void install_hooks() noexcept;

// --- item_slab.cc ---
Instance* acquire_instance(int epfd) noexcept;
void release_instance(Instance& instance) noexcept;
Item* acquire_item() noexcept;
void release_item(Item& item) noexcept;
/// Registrations of sockets that are no streams yet, by number. One that is closed stays until the
/// number is used again, so whoever takes them asks the kernel. `in` null: an instance that is not
/// ours.
void remember_unconnected(Instance* in, int fd, const epoll_event& event) noexcept;
void forget_unconnected(Instance* in, int fd) noexcept;
void forget_unconnected(Instance& in) noexcept;
/// All of one number, linked by next_unconnected; the caller's now.
Item* take_unconnected(int fd) noexcept;
/// Over a fork: see socket_ops.h.
void lock_instances() noexcept;
void unlock_instances() noexcept;
void instances_after_fork_child() noexcept;

}  // namespace rsock::poll
