// A channel over a reliable queue pair: bytes by RDMA WRITE into the peer's ring, control words by
// the keepers' line.
//
// Contract: core/transport/transport.h. What is particular here:
//  - Each end has both rings and all words of its own in its own memory; a byte_ring view works on
//  each. What a peer
//    says (a completion's length, a credit, a word of the line) is checked and then stored in a
//    word that only we write.
//  - Data: RDMA WRITE at the same offset of the peer's ring, with the length as immediate value.
//  The receiver trusts the
//    completion, never the bytes. First messages go at once; while kEager are in flight, small ones
//    gather and leave with the next completion.
//  - Credits: an empty write whose immediate value is the bytes consumed since the last one; at
//  half a ring.
//  - tx_end() and tx_recall() are questions: they return kOpen, and the answer (END_OK or FROZEN,
//  never both) turns the
//    direction later. Until then the direction takes no bytes. END_OK means that every byte is in
//    the peer's memory.
//  - Failure of the queue pair loses bytes in flight, never words: path_failure() says so, and the
//  stream moves both
//    directions back to TCP by the words.
//
// Invariants.
//  1. credit <= consumed at the peer <= written <= posted_ <= tail <= credit + capacity.
//  2. A completion that tells of bytes beyond the room that we gave (head + capacity) fails the
//  direction.
//  3. Small bytes gather only while a signalled write is in flight: its completion posts them.
//  4. FROZEN and END_OK are said at most once, and only one of them: both are decided in the local
//  head word.
//
// Locks: post_mutex_ guards the send queue; a leaf, taken under a stream's lock or under the
// device's queue lock.
#pragma once

#include <atomic>
#include <memory>

#include "core/os/owned_fd.h"
#include "core/ring/byte_ring.h"
#include "core/transport/transport.h"
#include "core/transport/verbs/device.h"
#include "core/transport/word_line.h"
#include "core/wire/control_page.h"
#include "core/wire/line.h"

namespace rsock::transport::verbs {

/// Where the peer's receive ring is, as its JOIN said (checked by the decoder).
struct RemoteRing {
  uint64_t address = 0;
  uint32_t key = 0;
  uint32_t size = 0;
};

/// The immediate value: this bit says credit, the rest is a count of bytes (a ring is at most 64
/// MiB).
inline constexpr uint32_t kCreditBit = uint32_t{1} << 31;
/// A write no longer than this: the receiver copies out while the next one is on its way.
inline constexpr uint32_t kLongestWrite = 128 * 1024;

class VerbsChannel final : public Channel {
 public:
  VerbsChannel(std::shared_ptr<Device> device, QueuePair pair, const RemoteRing& remote,
               uint64_t nonce, std::shared_ptr<WordLine> line, os::OwnedFd doorbell) noexcept;
  ~VerbsChannel() override;

  // --- what the keeper tells; keeper thread unless stated ---
  /// The queue pair may be used from here on.
  void connected() noexcept;
  /// From the line. May come before the stream has the channel.
  void on_word(wire::Word word, uint64_t value) noexcept;
  /// No word comes any more.
  void line_down() noexcept;
  /// The queue pair is of no use any more. `reason`: a literal. Any thread; the first reason
  /// counts.
  void fail_path(const char* reason) noexcept;
  uint64_t nonce() const noexcept { return nonce_; }
  /// Something was posted that has not completed. Any thread.
  bool in_flight() const noexcept {
    return posted_.load(std::memory_order_relaxed) != delivered_.load(std::memory_order_relaxed) &&
           failure_.load(std::memory_order_relaxed) == nullptr;
  }
  const QueuePair& pair() const noexcept { return pair_; }

  // --- what the device tells; its queue lock is held ---
  void on_sent(const ibv_wc& wc) noexcept;
  void on_arrival(uint32_t immediate) noexcept;

  // --- Channel ---
  PathKind kind() const noexcept override { return PathKind::kRdma; }
  size_t capacity() const noexcept override { return pair_.memory.ring_size(); }
  size_t tx_room(size_t want) noexcept override;
  /// Half a ring may be consumed and not told yet (credit()); of the rest a third has to be free.
  size_t tx_least_bound() const noexcept override { return capacity() / 4 * 3; }
  size_t tx_write(const iovec* iov, size_t n, size_t skip, size_t limit) noexcept override;
  size_t tx_fill(ByteSource& from, size_t limit) noexcept override;
  size_t tx_put(const void* from, size_t n) noexcept override;
  uint64_t tx_unread() noexcept override;
  uint64_t tx_undelivered() noexcept override;
  uint64_t tx_tail() noexcept override { return writer_.tail(); }
  size_t tx_unread_spans(uint64_t from, size_t n, iovec spans[2]) noexcept override {
    return writer_.unread_spans(from, n, spans);
  }
  bool tx_failed() const noexcept override;

  size_t rx_available() noexcept override;
  size_t rx_read(const iovec* iov, size_t n, size_t skip, size_t limit,
                 bool peek) noexcept override;
  size_t rx_take(void* to, size_t n) noexcept override;
  size_t rx_discard(size_t n) noexcept override;
  uint64_t rx_head() noexcept override { return reader_.head(); }
  uint64_t rx_published() noexcept override;
  bool rx_failed() const noexcept override;

  void tx_set_start(uint64_t stream_offset) noexcept override;
  std::optional<uint64_t> rx_start() noexcept override;
  void rx_set_ready() noexcept override;
  bool tx_peer_ready() noexcept override;
  Turn tx_turn() noexcept override;
  bool tx_maybe_turned() noexcept override;
  Turn rx_turn() noexcept override;
  Turn tx_end() noexcept override;
  Turn tx_recall() noexcept override;
  Turn rx_freeze() noexcept override;
  void tx_set_replayed() noexcept override;
  bool rx_replayed() noexcept override;

  uint32_t rx_bell() noexcept override;
  uint32_t tx_bell() noexcept override;
  void rx_arm(Sleep how) noexcept override;
  void tx_arm(Sleep how) noexcept override;
  Result<void> rx_sleep(uint32_t seen, const timespec* timeout) noexcept override;
  Result<void> tx_sleep(uint32_t seen, const timespec* timeout) noexcept override;
  void wake_local() noexcept override;
  /// Nothing: every word wakes whom it concerns when it arrives.
  void wake_peer() noexcept override {}
  int wait_fd() const noexcept override { return doorbell_.get(); }
  bool drain_wait_fd() noexcept override;
  void let_go() noexcept override;

  bool decides_alone() const noexcept override { return false; }
  bool peer_let_go() noexcept override;
  bool rx_asked_back() noexcept override;
  const char* path_failure() noexcept override;

 private:
  bool push(bool more = false) noexcept;
  bool push_locked(bool more) noexcept RSOCK_REQUIRES(post_mutex_);
  bool post_what_fits_locked(bool more) noexcept RSOCK_REQUIRES(post_mutex_);
  void note_behind_locked(bool behind) noexcept RSOCK_REQUIRES(post_mutex_);
  void push_credit_locked() noexcept RSOCK_REQUIRES(post_mutex_);
  bool post_locked(uint64_t offset, uint32_t n, uint32_t immediate, bool signal,
                   bool solicited) noexcept RSOCK_REQUIRES(post_mutex_);
  uint32_t slots_for(uint64_t n) const noexcept RSOCK_REQUIRES(post_mutex_);
  void credit() noexcept;
  void look_for_end() noexcept;
  void wake_receiver() noexcept;
  void wake_sender_if_roomy() noexcept;
  void arm_sleep(std::atomic<uint32_t>& word, Sleep how) noexcept;
  uint32_t take_sleep(std::atomic<uint32_t>& word) noexcept;
  void wake_all() noexcept;
  void ring_doorbell() noexcept;

  const std::shared_ptr<Device> device_;
  QueuePair pair_;
  const RemoteRing remote_;
  const uint64_t nonce_;
  const std::shared_ptr<WordLine> line_;
  const os::OwnedFd doorbell_;  // eventfd

  // The words of each direction, all in our memory: tx_.head is what the peer told of its
  // consuming, rx_.tail what arrived. Bells and sleep words are for threads of this process.
  wire::DirectionWords tx_{};
  wire::DirectionWords rx_{};
  alignas(64) ring::RingWriter writer_;
  std::atomic<bool> end_asked_{false};  // END was said; written under the tx lock
  bool recall_asked_ = false;  // tx lock
  alignas(64) ring::RingReader reader_;
  uint64_t credited_ = 0;  // rx lock
  bool let_go_ = false;    // tx and rx locks

  std::atomic<bool> turned_{false};   // an answer, or the end of all answers, has come
  std::atomic<bool> tx_lied_{false};  // the peer said something impossible of our direction
  std::atomic<bool> rx_lied_{false};  // ... of its own
  std::atomic<bool> frozen_said_{false};
  std::atomic<bool> end_ok_said_{false};
  std::atomic<bool> asked_back_{false};  // RECALL has come
  std::atomic<bool> end_known_{false};   // END has come, at end_at_
  std::atomic<uint64_t> end_at_{0};
  std::atomic<bool> gone_{false};  // BYE, or the line is down
  std::atomic<const char*> failure_{nullptr};

  alignas(64) Mutex post_mutex_;
  std::atomic<uint64_t> posted_{
      0};  // bytes of the ring that were posted; written under post_mutex_
  std::atomic<uint64_t> delivered_{
      0};  // bytes whose write has completed; written under post_mutex_
  std::atomic<uint64_t> credit_wanted_{0};  // consumed bytes that the peer shall hear of
  uint64_t credit_sent_ RSOCK_GUARDED_BY(post_mutex_) = 0;
  uint32_t used_ RSOCK_GUARDED_BY(post_mutex_) = 0;         // slots of the send queue
  uint32_t unsignalled_ RSOCK_GUARDED_BY(post_mutex_) = 0;  // slots since the last signalled entry
  uint32_t signals_in_flight_ RSOCK_GUARDED_BY(post_mutex_) = 0;
  uint32_t longest_write_ RSOCK_GUARDED_BY(post_mutex_) = kLongestWrite;
  uint64_t quiet_bytes_ RSOCK_GUARDED_BY(post_mutex_) = 0;  // posted since the last solicited entry
  bool connected_ RSOCK_GUARDED_BY(post_mutex_) = false;
  bool behind_ RSOCK_GUARDED_BY(post_mutex_) = false;  // counted by the device
};

/// Null: no descriptor for the doorbell (the pair is retired). The device knows the channel from
/// here on.
std::shared_ptr<VerbsChannel> make_verbs_channel(std::shared_ptr<Device> device, QueuePair&& pair,
                                                 const RemoteRing& remote, uint64_t nonce,
                                                 std::shared_ptr<WordLine> line) noexcept;

}  // namespace rsock::transport::verbs
