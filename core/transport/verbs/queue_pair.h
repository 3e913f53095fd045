// A reliable queue pair, from its making to its next stream.
//
// Purpose: making one costs a system call that allocates and pins its queues, and ending one
// another; a stream that follows another to the same process takes what that one had. Where the
// connection manager is InfiniBand's (also RoCE's) a queue pair is ours, connected by hand
// (make_ready()), and after its stream it is reset and kept. On iWARP it is librdmacm's
// (rdma_create_qp), because there a connection and its queue pair end together; it is never used
// again.
//
// When a number may be used again. The peer's queue pair sends until its own stream is over, and
// packets may be under way when it is. So a queue pair waits, reset, with the id of its connection,
// for RDMA_CM_EVENT_TIMEWAIT_EXIT: the peer has answered the disconnection, which it does behind
// the reset of its own queue pair, and what was under way has had the time that the connection
// manager gives it (about a second). Packets that are later still have sequence numbers of the
// former connection; rdma_cm draws new ones for each id. A queue pair whose event does not come
// (the peer is silent, or its stream not over) is destroyed instead, as is one that nobody took
// within 5 s. Of connections that were never established no end is told: theirs are destroyed at
// once.
//
// Thread safety: none; keeper only.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/transport/verbs/ring_memory.h"
#include "core/wire/four_tuple.h"

namespace rsock::transport::verbs {

/// Slots of a send queue that data may use, and a few more for credits.
inline constexpr uint32_t kDataSlots = 60;
inline constexpr uint32_t kDataSlotsOfPackets = 252;  // where a write may have to be one packet
inline constexpr uint32_t kCreditSlots = 4;
inline constexpr uint32_t kWantedInline = 256;

/// How long a write may be: see kSoftRoce in device.cc.
enum class Packets : uint8_t {
  kMany,             // as long as we like
  kOneBetweenHosts,  // no longer than the path's MTU, unless the peer is on this very device
  kOne,              // never longer than the path's MTU
};

/// A connected (or connecting) reliable queue pair and both rings of one stream. Unique owner;
/// given back to the device that made it.
struct QueuePair {
  QueuePair() = default;
  QueuePair(QueuePair&& other) noexcept { *this = std::move(other); }
  QueuePair& operator=(QueuePair&& other) noexcept {
    id = std::exchange(other.id, nullptr);
    qp = std::exchange(other.qp, nullptr);
    inline_bytes = other.inline_bytes;
    has_immediate = other.has_immediate;
    packets = other.packets;
    connected = other.connected;
    data_slots = other.data_slots;
    partner = other.partner;
    memory = std::move(other.memory);
    return *this;
  }

  rdma_cm_id* id = nullptr;  // null in tests that connect by hand
  ibv_qp* qp = nullptr;
  uint32_t inline_bytes = 0;
  bool has_immediate = true;  // false: iWARP, or RSOCK_RDMA_IMMEDIATE=no: a SEND follows each WRITE
  Packets packets = Packets::kMany;
  bool connected = false;  // both ends are: there will be a disconnection, and its end
  uint32_t data_slots = kDataSlots;
  uint64_t partner = 0;  // the peer's keeper; 0: none, nothing is used again
  RingMemory memory;     // ours: what we send from, what the peer writes into
};

/// From RESET to RTS, with what `id` has agreed on. Nothing to do for a queue pair of librdmacm's.
/// Errors: what the verbs said.
Result<void> make_ready(rdma_cm_id* id, ibv_qp* qp) noexcept;
/// To `state` (RESET, ERR) from any other.
bool move_to(ibv_qp* qp, ibv_qp_state state) noexcept;

/// Queue pairs made, and taken again for another stream, by this process so far. Any thread.
struct QueuePairCounts {
  uint64_t made = 0;
  uint64_t reused = 0;
};
QueuePairCounts queue_pair_counts() noexcept;
void count_queue_pair(bool reused) noexcept;
void forget_queue_pair_counts() noexcept;  // in a forked child

/// Queue pairs that wait for a later stream of the same process at the same address: the first
/// because their protection domain is that process's, the second because rxe keeps a route in the
/// queue pair (rxe_find_route() in drivers/infiniband/sw/rxe/rxe_net.c). All are in RESET, nothing
/// of them is in a completion queue.
///
/// Invariant: a spare with an id is not taken. Ownership: queue pairs, ids, and a share of the
/// domain. They count for nobody's limit: the device drops them when it has no room for another.
class SpareQueuePairs {
 public:
  static constexpr size_t kMost = 32;

  /// Whether `pair`, reset, was taken; then its memory is left to the caller, its connection is
  /// being ended.
  bool put(QueuePair& pair, uint64_t now) noexcept;
  /// Null: none. In RESET, without an id.
  ibv_qp* take(const Domain* domain, uint64_t partner, const rdma_cm_id* next,
               uint32_t* inline_bytes) noexcept;
  /// What the connection manager says of the id with this key. False: none of ours.
  bool on_disconnected(uint64_t key) noexcept;
  bool on_time_wait_exit(uint64_t key) noexcept;
  void drop_expired(uint64_t now) noexcept;
  void drop_all() noexcept;
  /// In a forked child: forgets without a word to the device.
  void abandon() noexcept;
  bool empty() const noexcept { return spares_.empty(); }

 private:
  struct Spare {
    ibv_qp* qp;
    rdma_cm_id* id;  // of the former connection; null: may be taken
    std::shared_ptr<Domain> domain;
    uint64_t partner;
    wire::Endpoint peer;
    uint32_t inline_bytes;
    uint64_t until;
  };
  Spare* find(uint64_t key) noexcept;
  static void destroy(const Spare& spare) noexcept;

  std::vector<Spare> spares_;
};

}  // namespace rsock::transport::verbs
