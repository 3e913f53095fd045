// The page lane: file pages that travel by reference, beside the ring of a shared-memory channel.
//
// Purpose: sendfile. Copying a file into the ring costs the sender more than TCP's sendfile does,
// which copies nothing. A Unix socket takes pages by reference as well: the sender's sendfile puts
// them there, the receiver reads them into the buffer of its recv, one copy in all. The bytes own
// their place in the ring all the same: counts, credits, readiness and turns are the ring's, and a
// *span* in the control page says which of them lie in the lane. PROTOCOL.md, "Page lanes", has the
// rules, and why it is a socket that one end connects and the other accepts.
//
// Ownership: each end its own socket.
// Thread safety: PageSender under the stream's tx lock, PageReceiver under its rx lock.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

#include "core/os/owned_fd.h"
#include "core/wire/control_page.h"
#include "core/wire/rendezvous.h"

namespace rsock::transport {

class PageSender {
 public:
  /// What is passed by reference at least: below, a system call at each end costs more than copies.
  static constexpr size_t kLeast = 64 * 1024;

  PageSender(wire::DirectionWords& words, wire::PageSpan* spans) noexcept
      : words_(words), spans_(spans) {}
  ~PageSender();
  PageSender(const PageSender&) = delete;
  PageSender& operator=(const PageSender&) = delete;

  /// Waits for the peer under that name. False: not to be had.
  bool offer(const wire::SocketName& name) noexcept;
  /// The peer has come; `doorbell` tells who it has to be.
  bool usable(int doorbell) noexcept {
    // Relaxed: accept() and the kernel order what matters.
    return out_ || (listener_ && words_.lane.load(std::memory_order_relaxed) == 1 &&
                    accept_peer(doorbell));
  }
  /// Bytes that fit, about.
  size_t capacity() const noexcept { return capacity_; }

  /// Passes up to `limit` bytes of the file from `offset` on as bytes [tail, tail + n) of the
  /// direction, whose head is `head`. Returns n; 0: copy instead. The caller publishes n bytes.
  size_t pass(int file, off_t offset, size_t limit, uint64_t tail, uint64_t head) noexcept;
  /// Lets go of files whose bytes the peer has consumed.
  void let_go_below(uint64_t head) noexcept;
  bool holds() const noexcept { return first_ != count_; }

  /// Puts passed bytes from `from` on to their places in the ring, from the files. False: a file
  /// has lost them meanwhile. Once for the direction: afterwards the ring has them.
  bool restore(uint64_t from, std::byte* ring, size_t ring_size) noexcept;

 private:
  struct Held {
    uint64_t begin;
    uint64_t end;
    std::byte* map;  // page that `begin` lies in
    size_t map_size;
    size_t skip;
  };

  bool accept_peer(int doorbell) noexcept;
  /// What was accepted, fit for use; or nothing.
  os::OwnedFd make_lane(os::OwnedFd out, int doorbell) noexcept;

  wire::DirectionWords& words_;
  wire::PageSpan* const spans_;
  os::OwnedFd listener_;  // until the peer has come
  os::OwnedFd out_;
  size_t capacity_ = 0;
  bool refused_ = false;
  Held held_[wire::kPageSpans];  // number k in slot k % kPageSpans, for first_ <= k < count_
  uint64_t first_ = 0;
  uint64_t count_ = 0;
};

class PageReceiver {
 public:
  PageReceiver(const wire::DirectionWords& words, const wire::PageSpan* spans) noexcept
      : words_(words), spans_(spans) {}
  ~PageReceiver();
  PageReceiver(const PageReceiver&) = delete;
  PageReceiver& operator=(const PageReceiver&) = delete;

  /// Connects to the sender, who has to be whom `doorbell` leads to. False: not to be had.
  bool join(const wire::SocketName& name, int doorbell) noexcept;

  /// Spans that were published are not consumed yet. For every receive: one load, of the tail's
  /// line.
  bool pending() const noexcept {
    // acquire pairs with the sender's store: the slot was written before. Every span that covers a
    // byte below a tail that was loaded before this is counted.
    return words_.spans.load(std::memory_order_acquire) != done_;
  }
  /// From `at` on: bytes that lie in the lane, or else in the ring, next; SIZE_MAX: all there are.
  /// lied: the sender broke the rules.
  struct Part {
    size_t in_lane = 0;
    size_t in_ring = 0;
    bool lied = false;
  };
  Part part_at(uint64_t at, size_t ring_size) noexcept;
  /// Reads bytes that part_at() found in the lane. -errno; -EAGAIN: the sender lied.
  long read(const iovec* iov, size_t n) noexcept;
  /// Moves `n` bytes of the lane, as part_at(`at`) found them, to their places in the ring. False:
  /// the sender lied.
  bool bring_in(uint64_t at, size_t n, std::byte* ring, size_t ring_size) noexcept;

 private:
  void moved(size_t n) noexcept;

  const wire::DirectionWords& words_;
  const wire::PageSpan* const spans_;
  os::OwnedFd in_;
  uint64_t done_ = 0;   // spans that are behind us
  uint64_t begin_ = 0;  // of the span that is begun, if begin_ < end_: what of it is in the lane
  uint64_t end_ = 0;    // of the last one that was loaded
};

}  // namespace rsock::transport
