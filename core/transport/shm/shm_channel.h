// A channel in shared memory: two byte rings and a control page that both processes map.
//
// Contract: core/transport/transport.h. What is particular here:
//  - Bytes move by memcpy. Publishing is a store and a fence; a system call follows only when the
//    other end has announced that it sleeps.
//  - The turn of a direction is the seals of its head word (byte_ring.h). An ended direction's
//  offset
//    is its tail, which no longer moves.
//  - The doorbell is the Unix stream socket of the rendezvous. One byte is one ring; a full socket
//    buffer means that it has rung already.
//  - Order of waiting: read the bell, arm, check, sleep. Whoever arms before reading the bell can
//    lose a wake-up: a publish between the two disarms him and is in the bell that he takes for
//    old. For the doorbell likewise: drain, arm, check, sleep.
#pragma once

#include <memory>

#include "core/os/owned_fd.h"
#include "core/ring/byte_ring.h"
#include "core/transport/shm/page_lane.h"
#include "core/transport/shm/segment_pool.h"
#include "core/transport/shm/shm_segment.h"
#include "core/transport/transport.h"

namespace rsock::transport {

class ShmChannel final : public Channel {
 public:
  ShmChannel(ShmSegment segment, os::OwnedFd doorbell, bool caller, Reuse reuse) noexcept;
  ~ShmChannel() override;

  PathKind kind() const noexcept override { return PathKind::kShm; }
  size_t capacity() const noexcept override { return segment_.ring_size(); }

  size_t tx_room(size_t want) noexcept override { return writer_.room(want); }
  size_t tx_write(const iovec* iov, size_t n, size_t skip, size_t limit) noexcept override;
  size_t tx_fill(ByteSource& from, size_t limit) noexcept override;
  size_t tx_pass(int file, off_t offset, size_t limit) noexcept override;
  bool tx_let_go_of_files() noexcept override;
  bool tx_offer_lane(const wire::SocketName& name) noexcept override {
    return sent_pages_.offer(name);
  }
  int tx_direction() const noexcept override { return tx_index_; }
  size_t tx_window() const noexcept override { return window_; }
  void tx_widen() noexcept override;
  size_t tx_put(const void* from, size_t n) noexcept override;
  uint64_t tx_unread() noexcept override { return writer_.unread(); }
  uint64_t tx_tail() noexcept override { return writer_.tail(); }
  size_t tx_unread_spans(uint64_t from, size_t n, iovec spans[2]) noexcept override;
  bool tx_failed() const noexcept override { return writer_.failed(); }

  size_t rx_available() noexcept override { return reader_.available(); }
  size_t rx_read(const iovec* iov, size_t n, size_t skip, size_t limit,
                 bool peek) noexcept override;
  size_t rx_take(void* to, size_t n) noexcept override;
  void rx_join_lane(const wire::SocketName& name) noexcept override;
  size_t rx_discard(size_t n) noexcept override;
  uint64_t rx_head() noexcept override { return reader_.head(); }
  uint64_t rx_published() noexcept override;
  bool rx_failed() const noexcept override { return reader_.failed(); }

  void tx_set_start(uint64_t stream_offset) noexcept override;
  std::optional<uint64_t> rx_start() noexcept override;
  void rx_set_ready() noexcept override;
  bool tx_peer_ready() noexcept override;
  Turn tx_turn() noexcept override;
  bool tx_maybe_turned() noexcept override { return freeze_heard_ || writer_.seal_seen(); }
  Turn rx_turn() noexcept override;
  Turn tx_end() noexcept override;
  Turn tx_recall() noexcept override;
  Turn rx_freeze() noexcept override;
  void tx_set_replayed() noexcept override;
  bool rx_replayed() noexcept override;

  uint32_t rx_bell() noexcept override;
  uint32_t tx_bell() noexcept override;
  void rx_arm(Sleep how) noexcept override;
  bool rx_disarm() noexcept override;
  void tx_arm(Sleep how) noexcept override;
  Result<void> rx_sleep(uint32_t seen, const timespec* timeout) noexcept override;
  Result<void> tx_sleep(uint32_t seen, const timespec* timeout) noexcept override;
  void wake_local() noexcept override;
  void wake_peer() noexcept override;
  int wait_fd() const noexcept override { return doorbell_.get(); }
  bool drain_wait_fd() noexcept override;
  void let_go() noexcept override;

 private:
  void set_window(size_t window) noexcept;
  void populate_ahead(int index) noexcept;
  template <typename From>
  size_t write_from(From& from, size_t limit) noexcept;
  void populate_for_reading(size_t piece) noexcept;
  size_t read_pages(ring::IovCursor& to, size_t limit, bool* faulted) noexcept;
  /// PageReceiver::bring_in(), or the direction fails.
  bool bring_in(uint64_t at, size_t n) noexcept;
  void bring_pages_in() noexcept;
  void let_bytes_gather(size_t n) noexcept;
  void wake_receiver() noexcept;
  void wake_sender_if_roomy() noexcept;
  void ring_doorbell() noexcept;

  ShmSegment segment_;
  os::OwnedFd doorbell_;
  Reuse reuse_;
  const int tx_index_;  // of the ring that we write
  wire::DirectionWords& tx_;
  wire::DirectionWords& rx_;
  // The two sides are used by different threads at once: a line each.
  alignas(64) ring::RingWriter writer_;
  bool freeze_heard_ = false;  // the receiver said so beside its sleep bits
  PageSender sent_pages_;
  size_t window_;         // tx_window()
  bool wide_ = false;     // it stays the whole ring
  Turn over_;             // what our tx_end() or tx_recall() found or made; open before
  alignas(64) ring::RingReader reader_;
  PageReceiver pages_;
  bool at_the_heels_ = false;  // the last look found few messages
  uint64_t tail_at_look_ = 0;  // our own, at the last look
};

/// `doorbell` is the connected Unix stream socket of the rendezvous; `caller` tells which role of
/// the rendezvous this end had. With `reuse` the segment is parked when the channel goes.
std::unique_ptr<Channel> make_shm_channel(ShmSegment segment, os::OwnedFd doorbell, bool caller,
                                          Reuse reuse = {});

}  // namespace rsock::transport
