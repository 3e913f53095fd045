#include "core/transport/verbs/queue_pair.h"

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "core/base/inside.h"
#include "core/transport/endpoint.h"
#include "core/transport/verbs/rdma_library.h"

namespace rsock::transport::verbs {
namespace {

constexpr uint64_t kKeepNs = 5'000'000'000;

std::atomic<uint64_t> g_made{0};
std::atomic<uint64_t> g_reused{0};

const RdmaLibrary& library() noexcept { return *RdmaLibrary::get(); }

/// Where the connection of `id` leads; the same of all that are connected by hand.
wire::Endpoint peer_of(const rdma_cm_id* id) noexcept {
  if (id == nullptr) return {};
  return without_port(to_endpoint(&id->route.addr.dst_addr).value_or(wire::Endpoint{}));
}

}  // namespace

// --- states ------------------------------------------------------------------------------------

Result<void> make_ready(rdma_cm_id* id, ibv_qp* qp) noexcept {
  if (id->qp != nullptr) return {};  // librdmacm does it itself
  for (const ibv_qp_state state : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS}) {
    ibv_qp_attr attributes{};
    int mask = 0;
    attributes.qp_state = state;
    if (library().rdma_init_qp_attr(id, &attributes, &mask) != 0) {
      return fail(errno != 0 ? errno : EIO);
    }
    if (const int why = library().ibv_modify_qp(qp, &attributes, mask); why != 0) return fail(why);
  }
  return {};
}

bool move_to(ibv_qp* qp, ibv_qp_state state) noexcept {
  ibv_qp_attr attributes{};
  attributes.qp_state = state;
  return library().ibv_modify_qp(qp, &attributes, IBV_QP_STATE) == 0;
}

// --- counts ------------------------------------------------------------------------------------

QueuePairCounts queue_pair_counts() noexcept {
  // relaxed, here and below: totals, nothing hangs on their order
  return {g_made.load(std::memory_order_relaxed), g_reused.load(std::memory_order_relaxed)};
}

void count_queue_pair(bool reused) noexcept {
  (reused ? g_reused : g_made).fetch_add(1, std::memory_order_relaxed);
}

void forget_queue_pair_counts() noexcept {
  g_made.store(0, std::memory_order_relaxed);
  g_reused.store(0, std::memory_order_relaxed);
}

// --- spares ------------------------------------------------------------------------------------

bool SpareQueuePairs::put(QueuePair& pair, uint64_t now) noexcept {
  // Without an established connection no end of it would be told: the peer may be about to accept.
  if (pair.partner == 0 || !pair.connected || spares_.size() >= kMost) return false;
  if (pair.id != nullptr && library().rdma_disconnect(pair.id) != 0) return false;
  const wire::Endpoint peer = peer_of(pair.id);
  spares_.push_back(Spare{std::exchange(pair.qp, nullptr), std::exchange(pair.id, nullptr),
                          pair.memory.domain(), pair.partner, peer, pair.inline_bytes,
                          now + kKeepNs});
  return true;
}

ibv_qp* SpareQueuePairs::take(const Domain* domain, uint64_t partner, const rdma_cm_id* next,
                              uint32_t* inline_bytes) noexcept {
  const wire::Endpoint peer = peer_of(next);
  const auto s = std::find_if(spares_.begin(), spares_.end(), [&](const Spare& each) {
    return each.id == nullptr && each.domain.get() == domain && each.partner == partner &&
           each.peer == peer;
  });
  if (s == spares_.end()) return nullptr;
  ibv_qp* const qp = s->qp;
  *inline_bytes = s->inline_bytes;
  spares_.erase(s);
  return qp;
}

SpareQueuePairs::Spare* SpareQueuePairs::find(uint64_t key) noexcept {
  const auto s = std::find_if(spares_.begin(), spares_.end(), [=](const Spare& each) {
    return each.id != nullptr && reinterpret_cast<uint64_t>(each.id->context) == key;
  });
  return s != spares_.end() ? &*s : nullptr;
}

bool SpareQueuePairs::on_disconnected(uint64_t key) noexcept {
  const Spare* const s = find(key);
  if (s == nullptr) return false;
  // Two requests that crossed cancel each other, and each end waits to be asked for its answer
  // (cm_dreq_handler() in drivers/infiniband/core/cm.c). To an answer there is none: no harm.
  const InsideLibrary guard;
  (void)library().rdma_disconnect(s->id);
  return true;
}

bool SpareQueuePairs::on_time_wait_exit(uint64_t key) noexcept {
  Spare* const s = find(key);
  if (s == nullptr) return false;
  const InsideLibrary guard;
  (void)library().rdma_destroy_id(std::exchange(s->id, nullptr));
  return true;
}

void SpareQueuePairs::destroy(const Spare& spare) noexcept {
  (void)library().ibv_destroy_qp(spare.qp);
  if (spare.id != nullptr) (void)library().rdma_destroy_id(spare.id);
}

void SpareQueuePairs::drop_expired(uint64_t now) noexcept {
  std::erase_if(spares_, [&](const Spare& s) {
    if (s.until > now) return false;
    destroy(s);
    return true;
  });
}

void SpareQueuePairs::drop_all() noexcept {
  for (const Spare& s : spares_) destroy(s);
  spares_.clear();
}

void SpareQueuePairs::abandon() noexcept { spares_.clear(); }

}  // namespace rsock::transport::verbs
