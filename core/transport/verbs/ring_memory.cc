#include "core/transport/verbs/ring_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>

#include "core/os/os.h"
#include "core/transport/verbs/rdma_library.h"

namespace rsock::transport::verbs {
namespace {

constexpr size_t kHugePage = 2 << 20;

/// Anonymous memory; huge pages if the operator has set some aside. No wrapper in os.h: nobody else
/// maps like this.
void* map(size_t size, bool huge) noexcept {
  const long flags = MAP_PRIVATE | MAP_ANONYMOUS | (huge ? MAP_HUGETLB : 0);
  const long r =
      os::door()(SYS_mmap, 0, static_cast<long>(size), PROT_READ | PROT_WRITE, flags, -1, 0);
  return r < 0 && r > -4096 ? nullptr : reinterpret_cast<void*>(r);
}

void advise(void* at, size_t size, int advice) noexcept {
  (void)os::door()(SYS_madvise, reinterpret_cast<long>(at), static_cast<long>(size), advice, 0, 0,
                   0);
}

/// A wish, not a demand (MPOL_PREFERRED, set_mempolicy(2)): a full node is no reason to fail.
void prefer_node(void* at, size_t size, int node) noexcept {
  constexpr long kPreferred = 1;
  if (node < 0 || node >= 64) return;
  const unsigned long mask = 1ul << node;
  (void)os::door()(SYS_mbind, reinterpret_cast<long>(at), static_cast<long>(size), kPreferred,
                   reinterpret_cast<long>(&mask), 65, 0);
}

}  // namespace

Domain::~Domain() {
  if (os::getpid() == owner) (void)RdmaLibrary::get()->ibv_dealloc_pd(pd);
}

RingMemory& RingMemory::operator=(RingMemory&& other) noexcept {
  if (this == &other) return *this;
  release();
  domain_ = std::move(other.domain_);
  base_ = std::exchange(other.base_, nullptr);
  size_ = other.size_;
  mapped_ = other.mapped_;
  tx_ = std::exchange(other.tx_, nullptr);
  rx_ = std::exchange(other.rx_, nullptr);
  return *this;
}

Result<RingMemory> RingMemory::make(std::shared_ptr<Domain> domain, size_t ring_size,
                                    int numa_node) noexcept {
  ibv_pd* const pd = domain->pd;
  const RdmaLibrary& lib = *RdmaLibrary::get();
  RingMemory m;
  m.domain_ = std::move(domain);
  m.size_ = ring_size;
  m.mapped_ = 2 * ring_size;
  void* at = m.mapped_ % kHugePage == 0 ? map(m.mapped_, true) : nullptr;
  if (at == nullptr) {
    at = map(m.mapped_, false);
    if (at == nullptr) return fail(ENOMEM);
    advise(at, m.mapped_, MADV_HUGEPAGE);
  }
  m.base_ = static_cast<std::byte*>(at);
  advise(at, m.mapped_, MADV_DONTFORK);
  prefer_node(at, m.mapped_, numa_node);
  m.tx_ = lib.reg_mr(pd, m.tx_ring(), ring_size, 0);
  if (m.tx_ == nullptr) return fail(errno);
  m.rx_ = lib.reg_mr(pd, m.rx_ring(), ring_size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  if (m.rx_ == nullptr) return fail(errno);
  return m;
}

void RingMemory::abandon() noexcept {
  base_ = nullptr;
  tx_ = rx_ = nullptr;
}

void RingMemory::release() noexcept {
  if (base_ == nullptr) return;
  const RdmaLibrary& lib = *RdmaLibrary::get();
  if (tx_ != nullptr) (void)lib.ibv_dereg_mr(tx_);
  if (rx_ != nullptr) (void)lib.ibv_dereg_mr(rx_);
  os::unmap(base_, mapped_);
  abandon();
  domain_.reset();  // behind the registrations in it
}

}  // namespace rsock::transport::verbs
