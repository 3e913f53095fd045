#include "core/transport/shm/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <new>

#include "core/os/os.h"

// Since Linux 6.3; older headers lack it.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace rsock::transport {
namespace {

constexpr uint32_t kVersion = 1;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// With one of these the file could not be written by both.
constexpr int kForbiddenSeals = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE;

std::atomic<int> g_live{0};

Result<os::OwnedFd> new_memfd() noexcept {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  // vm.memfd_noexec=2 refuses a memfd that may become executable; kernels before 6.3 refuse the
  // flag.
  return os::make_internal([] {
    Result<int> fd = os::memfd_create("rsock", kFlags | MFD_NOEXEC_SEAL);
    if (!fd && fd.error() == EINVAL) fd = os::memfd_create("rsock", kFlags);
    return fd;
  });
}

}  // namespace

int live_segments() noexcept { return g_live.load(std::memory_order_relaxed); }

ShmSegment::ShmSegment(void* base, size_t ring_size) noexcept
    : base_(static_cast<std::byte*>(base)), ring_size_(ring_size) {
  g_live.fetch_add(1, std::memory_order_relaxed);
}

ShmSegment::~ShmSegment() {
  if (base_ == nullptr) return;
  os::unmap(base_, segment_bytes(ring_size_));
  g_live.fetch_sub(1, std::memory_order_relaxed);
}

wire::Checked<CreatedSegment> create_segment(size_t ring_size) noexcept {
  if (!wire::valid_ring_size(ring_size)) return wire::refuse(EINVAL, "ring size out of range");
  Result<os::OwnedFd> fd = new_memfd();
  if (!fd) return wire::refuse(fd.error(), "no memfd");
  const size_t bytes = segment_bytes(ring_size);
  if (auto r = os::ftruncate(fd->get(), static_cast<off_t>(bytes)); !r) {
    return wire::refuse(r.error(), "memfd refused its size");
  }
  if (auto r = os::fcntl(fd->get(), F_ADD_SEALS, kSeals); !r) {
    return wire::refuse(r.error(), "memfd refused its seals");
  }
  const Result<void*> base = os::map_shared(fd->get(), bytes);
  if (!base) return wire::refuse(base.error(), "memfd could not be mapped");
  // A fresh file is zero, which is every word's first value.
  CreatedSegment created{ShmSegment(*base, ring_size), std::move(*fd)};
  created.segment.write_page();
  return created;
}

void ShmSegment::write_page() noexcept {
  auto* page = new (base_) wire::ControlPage;
  page->magic = wire::kControlMagic;
  page->version = kVersion;
  page->ring_size = static_cast<uint32_t>(ring_size_);
}

void ShmSegment::begin_again() noexcept {
  // The bells go on counting: a thread of the callee's that read one just before may only now go to
  // sleep on it, and must not find the old value again.
  uint32_t bells[2][2];
  for (int i = 0; i < 2; ++i) {
    bells[i][0] = page().direction[i].rx_bell.load(std::memory_order_relaxed);
    bells[i][1] = page().direction[i].tx_bell.load(std::memory_order_relaxed);
  }
  memset(base_, 0, wire::kControlPageSize);
  write_page();
  for (int i = 0; i < 2; ++i) {
    page().direction[i].rx_bell.store(bells[i][0] + 1, std::memory_order_relaxed);
    page().direction[i].tx_bell.store(bells[i][1] + 1, std::memory_order_relaxed);
  }
}

wire::Checked<ShmSegment> adopt_segment(int fd, uint64_t ring_size) noexcept {
  if (!wire::valid_ring_size(ring_size)) return wire::refuse(EPROTO, "ring size out of range");
  // Seals before size: the size is worth reading only when it is final.
  const Result<int> seals = os::fcntl(fd, F_GET_SEALS);
  if (!seals) return wire::refuse(seals.error(), "not a memfd");
  if ((*seals & kSeals) != kSeals) return wire::refuse(EPROTO, "memfd not sealed");
  if ((*seals & kForbiddenSeals) != 0) return wire::refuse(EPROTO, "memfd sealed against writing");
  const Result<off_t> size = os::file_size(fd);
  if (!size) return wire::refuse(size.error(), "memfd has no size");
  if (static_cast<uint64_t>(*size) != segment_bytes(ring_size)) {
    return wire::refuse(EPROTO, "memfd of the wrong size");
  }
  const Result<void*> base = os::map_shared(fd, segment_bytes(ring_size));
  if (!base) return wire::refuse(base.error(), "memfd could not be mapped");
  ShmSegment segment(*base, ring_size);
  const wire::ControlPage& page = segment.page();
  if (page.magic != wire::kControlMagic) return wire::refuse(EPROTO, "control page magic");
  if (page.version != kVersion) return wire::refuse(EPROTO, "control page version");
  if (page.ring_size != ring_size) return wire::refuse(EPROTO, "control page ring size");
  return segment;
}

}  // namespace rsock::transport
