// The memory of one stream's two rings, registered with a device.
//
// One mapping, two registrations: the ring that we send from (nobody else may touch it) and the ring that the peer
// writes (remote write, its own key). A peer that had the key of one ring reaches that ring only; memory is used again
// only for the same partner process, else the registration ends with the queue pair (D6: also after a ring is reused).
// Huge pages if the kernel gives any, on the device's NUMA node if it says which. Never inherited by forked children
// (MADV_DONTFORK): pinned pages and copy-on-write do not go together before Linux 5.12, and a child has no use for it.
// Ownership: unique. Thread safety: none; made and ended by the keeper.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/base/result.h"

namespace rsock::transport::verbs {

class RingMemory {
 public:
  RingMemory() = default;
  RingMemory(RingMemory&& other) noexcept { *this = std::move(other); }
  RingMemory& operator=(RingMemory&& other) noexcept;
  ~RingMemory() { release(); }

  /// ring_size: valid_ring_size(). Errors: ENOMEM (memlock or memory), what ibv_reg_mr said.
  static Result<RingMemory> make(ibv_pd* pd, size_t ring_size, int numa_node) noexcept;

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

  std::byte* base_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;
  ibv_mr* tx_ = nullptr;
  ibv_mr* rx_ = nullptr;
};

}  // namespace rsock::transport::verbs
