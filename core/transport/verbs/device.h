// One RDMA device as this process uses it: a protection domain, one completion queue, one shared
// receive queue.
//
// Purpose: everything that queue pairs of one device share, and the engine that turns completions
// into words that channels look at. Whoever waits for something polls the queue for all
// (progress()); the keeper does when nobody does. The rings and queue pairs of each partner process
// have a protection domain of their own.
//
// Neither queue can overrun, by construction.
//  - Receive queue: an entry is posted again only by whoever took its completion. An empty one is a
//  wait at the sender
//    (RNR, retried for ever), as a full ring is; it is no error. iWARP has no such wait and needs
//    `entries >= streams x window`, which open() demands of the device there.
//  - Completion queue: it holds kReceives + (most queue pairs) x (send queue depth) entries, and
//  each entry of either
//    kind is either posted or in the queue: never two places for one. A spare queue pair has none.
//
// Sleeping. `armed_` set: the next completion of that kind makes the completion channel readable
// (or has), and whoever takes the event will poll: a thread that sleeps for completions, or the
// keeper when none does (direct_wait.h). Whoever goes to sleep, or leaves bytes behind that a
// completion must push out, arms and polls once more. The taker clears it, polls, arms again and
// polls again: others may rely on it. While others poll without sleeping, the keeper only looks
// again after a nap, and does not arm: a busy process makes no system calls for this. While there
// is traffic arming is for arrivals (they are sent as solicited events) unless bytes are left
// behind, so that nobody is woken for each write of ours that completes, and the keeper looks every
// 20 ms for writes that failed. After a second of quiet it arms for everything and sleeps.
//
// Ownership: made by open(), kept for the life of the process or until the device is removed and
// the last channel gone (shared_ptr). Thread safety: any thread, unless stated. Lock order: queue
// lock, then a channel's post lock; both leaves below a stream's locks. A caller that holds a
// stream's lock only ever tries the queue lock.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/transport/verbs/direct_wait.h"
#include "core/transport/verbs/queue_pair.h"
#include "core/transport/verbs/ring_memory.h"

namespace rsock::transport::verbs {

class VerbsChannel;

inline constexpr uint32_t kReceives = 2048;
inline constexpr uint32_t kPollBatch = 32;  // completions of one look

/// Streams on a device whose shared receive queue must never be empty (iWARP: a SEND without an
/// entry there ends the connection): each peer may have its whole send queue on the way, of which
/// every second entry is a SEND, and its credits.
constexpr uint32_t streams_for_receives(uint32_t receives, uint32_t data_slots) noexcept {
  return receives / (data_slots / 2 + kCreditSlots);
}

class Device : public std::enable_shared_from_this<Device> {
 public:
  /// The device behind `context` (a connection manager id's): the one that is there, or a new one.
  /// Keeper only. Errors: what the verbs said; ENOMEM also when memlock is too low. `max_streams`
  /// bounds queue pairs for its life.
  static Result<std::shared_ptr<Device>> open(ibv_context* context, uint32_t max_streams) noexcept;
  /// Devices that are in use, for the keeper's loop. Keeper only.
  static const std::vector<std::shared_ptr<Device>>& all() noexcept;
  ~Device();

  /// A queue pair for `id`, whose context is ours, with rings of `ring_size`; both from a former
  /// stream of this partner's where there are some. It is in RESET (make_ready()), or in INIT if it
  /// is librdmacm's. Keeper only. Errors: ENOMEM (memlock, device limits), EMFILE, what the verbs
  /// said. EUSERS: as many as there may be. Both ends must say the same of `immediate`
  /// (config().rdma_immediate is part of nothing that is agreed: an operator sets it everywhere or
  /// nowhere).
  Result<QueuePair> make_queue_pair(rdma_cm_id* id, size_t ring_size, uint64_t partner,
                                    bool immediate = true) noexcept;
  /// Ends a queue pair that never became a channel's, or was one's: the keeper buries it soon. Any
  /// thread.
  void retire(QueuePair&& pair) noexcept;
  /// Keeper only: resets or destroys what was retired, and disconnects it; keeps memory and queue
  /// pairs for the same partner for 5 s. True: call again in a second.
  bool bury() noexcept;
  /// Queue pairs whose stream is over. Keeper only.
  SpareQueuePairs& spares() noexcept { return spares_; }
  /// Keeper only: closes devices that were removed and that no channel holds any more; the kernel
  /// waits for that. True: there are some left.
  static bool drop_removed() noexcept;

  // --- completions ---
  /// Takes what is in the queue and tells the channels. If another thread is at it, that one looks
  /// once more. True: found any.
  bool progress() noexcept;
  /// The caller goes away or to sleep: the next completion wakes the keeper.
  void need_events() noexcept { arm(Armed::kAll); }
  /// The same for who waits for bytes only: what the peer sends, and nothing that we sent.
  void need_arrivals() noexcept { arm(enough_for_arrivals()); }
  /// Until `bell` differs from `seen`, which no completion of this device can change unnoticed if
  /// the caller has asked for events. Errors as transport::sleep_on().
  Result<void> sleep(const std::atomic<uint32_t>& bell, uint32_t seen,
                     const timespec* timeout) noexcept {
    return wait_.sleep(*this, bell, seen, timeout);
  }
  void strike(std::atomic<uint32_t>& bell) noexcept { wait_.strike(bell); }
  /// The completion channel may be readable: for who waited for that in sleep(), with all signals
  /// blocked.
  void serve_event() noexcept;
  /// How a thread wakes the keeper, which then asks take_keeper_call(). Set before channels are.
  void on_keeper_call(void (*call)() noexcept) noexcept { call_keeper_ = call; }
  bool take_keeper_call() noexcept {
    return keeper_called_.exchange(false, std::memory_order_acq_rel);
  }
  /// One sleep word more, or less, is set: its thread may rely on an event.
  void count_sleeping(int more) noexcept { sleeping_.fetch_add(more, std::memory_order_seq_cst); }
  /// One channel more, or less, has bytes that only a completion of its own writes pushes out.
  void count_behind(int more) noexcept { behind_.fetch_add(more, std::memory_order_seq_cst); }
  /// The completion channel: the keeper's epoll has it, with EPOLLEXCLUSIVE. Readable: call
  /// on_event().
  int event_fd() const noexcept { return events_->fd; }
  /// Keeper only. Returns in how many ns it wants to be called again; 0: when event_fd() says so.
  uint64_t on_event() noexcept;
  /// Device events: removed, port down, queue pair error. Keeper only.
  int async_fd() const noexcept { return context_->async_fd; }
  void on_async_event() noexcept;
  /// The connection manager says so as well (RDMA_CM_EVENT_DEVICE_REMOVAL), sometimes first. Keeper
  /// only.
  void on_removal() noexcept;
  /// The device is gone: its channels were told, nothing new is made on it.
  bool removed() const noexcept { return removed_.load(std::memory_order_acquire); }
  ibv_context* context() const noexcept { return context_; }
  ibv_pd* pd() const noexcept { return pd_; }
  /// Streams on queue pairs, of at most how many. Keeper only.
  uint32_t pairs() const noexcept { return pairs_; }
  uint32_t max_streams() const noexcept { return max_streams_; }
  /// False in a forked child.
  bool is_ours() const noexcept;

  // --- channels ---
  void add(VerbsChannel& channel, uint32_t qp_number) noexcept;
  /// No completion reaches the channel after this returns.
  void remove(VerbsChannel& channel, uint32_t qp_number) noexcept;

  /// A forked child owns none of it: descriptors are closed, nothing is destroyed.
  static void after_fork_child() noexcept;

 private:
  explicit Device(ibv_context* context) noexcept;
  void fail_channels(const char* reason, uint32_t only) noexcept;
  bool set_up(uint32_t max_streams) noexcept;
  bool poll_locked() noexcept RSOCK_REQUIRES(queue_mutex_);
  void empty_queue_locked() noexcept RSOCK_REQUIRES(queue_mutex_);
  void dispatch_locked(const ibv_wc& wc) noexcept RSOCK_REQUIRES(queue_mutex_);
  bool post_receive_locked(uint64_t slot) noexcept RSOCK_REQUIRES(queue_mutex_);
  VerbsChannel* find_locked(uint32_t qp_number) noexcept RSOCK_REQUIRES(queue_mutex_);

  /// What the partner's rings are registered in; made when it is not there. Null: the device has no
  /// more.
  std::shared_ptr<Domain> domain_of(uint64_t partner) noexcept;
  /// Parked, or new; in `pair`.
  Result<void> find_memory(QueuePair* pair, size_t ring_size) noexcept;
  /// New, of the device. False: errno says why.
  bool create(QueuePair* pair) noexcept;
  bool is_iwarp() const noexcept { return context_->device->transport_type == IBV_TRANSPORT_IWARP; }
  static void destroy(QueuePair& pair) noexcept;

  struct Known {
    uint64_t partner;
    std::weak_ptr<Domain> domain;
  };
  struct Parked {
    RingMemory memory;
    uint64_t partner;
    uint64_t until;
  };

  ibv_context* const context_;
  const int owner_;  // process
  int numa_node_ = -1;
  Packets packets_ = Packets::kMany;
  uint32_t data_slots_ = kDataSlots;
  ibv_pd* pd_ = nullptr;
  std::shared_ptr<Domain> common_;  // of pd_: where there are no immediates
  ibv_comp_channel* events_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_srq* srq_ = nullptr;
  ibv_mr* receive_mr_ = nullptr;
  struct Free {
    void operator()(uint64_t* p) const noexcept { std::free(p); }
  };
  // 8 bytes an entry, for SENDs without immediates. In pages of its own: after ibv_fork_init() a
  // forked child has none of them.
  std::unique_ptr<uint64_t[], Free> receives_;
  uint32_t receives_count_ = 0;
  Mutex queue_mutex_;
  struct Entry {
    uint32_t qp_number;
    VerbsChannel* channel;
  };
  std::vector<Entry> channels_ RSOCK_GUARDED_BY(queue_mutex_);
  Mutex retired_mutex_;
  std::vector<QueuePair> retired_ RSOCK_GUARDED_BY(retired_mutex_);
  enum class Armed : int { kNo, kArrivals, kAll };
  void arm(Armed wanted) noexcept;
  /// seq_cst: see on_event(). A keeper that watches comes by for failures by itself.
  Armed enough_for_arrivals() const noexcept {
    return watching_.load(std::memory_order_seq_cst) && behind_.load(std::memory_order_seq_cst) == 0
               ? Armed::kArrivals
               : Armed::kAll;
  }
  /// Somebody sleeps, or bytes are left behind.
  bool relied_on() const noexcept {
    return sleeping_.load(std::memory_order_seq_cst) != 0 ||
           behind_.load(std::memory_order_seq_cst) != 0;
  }
  /// For who has taken an event: others may rely on the next one. seq_cst, here and in arm(): who
  /// is counted too late for this finds the queue unarmed, and arms it.
  void arm_for_others() noexcept {
    // A keeper that does not watch sleeps without a limit, on the strength of this.
    if (!watching_.load(std::memory_order_seq_cst) || relied_on()) arm(enough_for_arrivals());
  }
  bool take_event_and_poll() noexcept;
  bool poll() noexcept;
  std::atomic<Armed> armed_{Armed::kNo};
  bool in_flight() noexcept;
  std::atomic<int> sleeping_{0};         // sleep words that are set
  std::atomic<int> behind_{0};           // channels that wait for completions of their own writes
  std::atomic<bool> watching_{false};    // the keeper looks every 20 ms
  uint64_t nap_ns_ = 0;                  // keeper only
  uint64_t active_ns_ = 0;               // keeper only: when there was traffic last
  std::atomic<bool> look_again_{false};  // somebody came while another one polled
  DirectWait wait_;
  void (*call_keeper_)() noexcept = nullptr;
  std::atomic<bool> keeper_called_{false};
  std::atomic<bool> removed_{false};
  std::atomic<uint64_t> found_by_others_{0};
  uint64_t found_seen_ = 0;  // keeper only
  uint32_t max_streams_ = 0;
  uint32_t queue_length_ = 0;   // of the completion queue
  uint32_t pairs_ = 0;          // keeper only
  std::vector<Parked> parked_;  // keeper only
  SpareQueuePairs spares_;      // keeper only
  std::vector<Known> domains_;  // keeper only
};

}  // namespace rsock::transport::verbs
