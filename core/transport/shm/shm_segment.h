// The memory of a shared-memory channel: a sealed memfd, mapped.
//
// Purpose: page 0 is the ControlPage, ring[0] and ring[1] follow. The caller creates it and sends
// the descriptor; the callee adopts what it received.
// Ownership: a ShmSegment owns the mapping, not the descriptor. Both ends close that after the
// rendezvous: the mapping keeps the memory, and a stream holds one descriptor less.
// Thread safety: as a pointer.
// Trust: adopt_segment() believes nothing. The seals make the size final, so that no access of ours
// can meet SIGBUS because the peer cut the file.
// Invariant: base_ is null (moved from) or maps segment_bytes(ring_size_) bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/os/owned_fd.h"
#include "core/wire/control_page.h"
#include "core/wire/refusal.h"
#include "core/wire/rendezvous.h"

namespace rsock::transport {

constexpr size_t segment_bytes(size_t ring_size) { return wire::kControlPageSize + 2 * ring_size; }

class ShmSegment;
struct CreatedSegment;

/// Makes a segment and its sealed descriptor. Errors: the kernel's, EINVAL for a bad ring size.
wire::Checked<CreatedSegment> create_segment(size_t ring_size) noexcept;

/// Segments that this process has mapped now.
int live_segments() noexcept;

/// Maps a segment that a peer sent. `fd` stays the caller's. `ring_size` is what the peer's HELLO
/// claims; seals, file size and control page must agree with it.
wire::Checked<ShmSegment> adopt_segment(int fd, uint64_t ring_size) noexcept;

class ShmSegment {
 public:
  ShmSegment(ShmSegment&& other) noexcept
      : base_(other.base_),
        ring_size_(other.ring_size_),
        populated_{other.populated_[0], other.populated_[1]} {
    other.base_ = nullptr;
  }
  ShmSegment& operator=(ShmSegment&&) = delete;
  ~ShmSegment();

  wire::ControlPage& page() const noexcept { return *reinterpret_cast<wire::ControlPage*>(base_); }
  /// ring 0 carries what the caller sends, ring 1 what the callee sends.
  std::byte* ring(int index) const noexcept {
    return base_ + wire::kControlPageSize + static_cast<size_t>(index) * ring_size_;
  }
  /// Our own copy: the one in the page is the peer's to change.
  size_t ring_size() const noexcept { return ring_size_; }
  /// Bytes of a ring, from its beginning, that have memory and are mapped here. Kept by who uses
  /// the ring; it outlives one use.
  size_t& populated(int index) noexcept { return populated_[index]; }

  /// For another use by the same two processes: the control page as create_segment() made it. The
  /// rings keep their bytes, which both ends knew.
  void begin_again() noexcept;

 private:
  friend wire::Checked<CreatedSegment> create_segment(size_t) noexcept;
  friend wire::Checked<ShmSegment> adopt_segment(int, uint64_t) noexcept;
  ShmSegment(void* base, size_t ring_size) noexcept;
  void write_page() noexcept;

  std::byte* base_;
  size_t ring_size_;
  size_t populated_[2] = {};
};

struct CreatedSegment {
  ShmSegment segment;
  os::OwnedFd memfd;
};

}  // namespace rsock::transport
