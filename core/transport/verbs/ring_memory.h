// The memory of one stream's two rings, registered with a device.
//
// One mapping, two registrations: the ring that we send from (nobody else may touch it) and the
// ring that the peer writes (remote write, its own key), both in the protection domain of that
// peer's process. Memory is used again only for the same process, else the registration ends with
// the queue pair (D6: also after a ring is reused). Huge pages if the kernel gives any, on the
// device's NUMA node if it says which. Never inherited by forked children (MADV_DONTFORK): pinned
// pages and copy-on-write do not go together before Linux 5.12, and a child has no use for it.
// Ownership: unique. Thread safety: none; made and ended by the keeper.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/base/result.h"

namespace rsock::transport::verbs {

/// A protection domain: keys of one mean nothing in another. One for each partner process, so that
/// a peer reaches its own streams' rings even if it guesses keys and addresses. Ended with the last
/// memory and queue pair in it.
struct Domain {
  Domain(ibv_pd* made, int process) noexcept : pd(made), owner(process) {}
  ~Domain();
  Domain(const Domain&) = delete;
  Domain& operator=(const Domain&) = delete;
  ibv_pd* const pd;
  const int owner;
};

class RingMemory {
 public:
  RingMemory() = default;
  RingMemory(RingMemory&& other) noexcept { *this = std::move(other); }
  RingMemory& operator=(RingMemory&& other) noexcept;
  ~RingMemory() { release(); }

  /// ring_size: valid_ring_size(). Errors: ENOMEM (memlock or memory), what ibv_reg_mr said.
  static Result<RingMemory> make(std::shared_ptr<Domain> domain, size_t ring_size,
                                 int numa_node) noexcept;

  ibv_pd* pd() const noexcept { return domain_->pd; }
  const std::shared_ptr<Domain>& domain() const noexcept { return domain_; }

  size_t ring_size() const noexcept { return size_; }
  std::byte* tx_ring() const noexcept { return base_; }
  std::byte* rx_ring() const noexcept { return base_ + size_; }
  uint32_t tx_key() const noexcept { return tx_->lkey; }
  uint64_t rx_address() const noexcept { return reinterpret_cast<uint64_t>(rx_ring()); }
  uint32_t rx_key() const noexcept { return rx_->rkey; }
  explicit operator bool() const noexcept { return base_ != nullptr; }
  /// Forgets without a word to the device: a forked child's copy.
  void abandon() noexcept;

 private:
  void release() noexcept;

  std::shared_ptr<Domain> domain_;
  std::byte* base_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;
  ibv_mr* tx_ = nullptr;
  ibv_mr* rx_ = nullptr;
};

}  // namespace rsock::transport::verbs
