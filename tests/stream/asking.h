// Both ends of a connection on a path whose words go by a line: an end and a recall are questions,
// and the answer comes when the test gives it. No device, no keeper: the test is both keepers.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "core/base/clock.h"
#include "core/os/os.h"
#include "core/stream/keeper_loop.h"
#include "core/transport/fake/fake_channel.h"
#include "tests/stream/loopback.h"

namespace rsock::testing {

using stream::Channel;
using transport::Turn;

/// One end: the fake's bytes, and words as over a line.
class AskingChannel final : public Channel {
 public:
  explicit AskingChannel(std::unique_ptr<Channel> path) : path_(std::move(path)) {}

  // --- the test's part ---
  /// The peer says END_OK to what was asked.
  void answer_end() {
    (void)path_->tx_end();
    path_->wake_local();
  }
  bool end_asked() const { return end_asked_; }
  bool recall_asked() const { return recall_asked_; }
  /// What the peer says of its replay comes when the test says so.
  void hold_replayed(bool hold) {
    hold_replayed_ = hold;
    path_->wake_local();
  }
  /// The line is down, and the peer never told what it had read of the last bytes.
  void peer_dies() {
    died_ = true;
    peer_leaves();
  }
  /// BYE has come, or the line is down.
  void peer_leaves() {
    gone_ = true;
    path_->wake_local();
  }

  // --- words ---
  bool decides_alone() const noexcept override { return false; }
  bool peer_let_go() noexcept override { return gone_; }
  Turn tx_end() noexcept override {
    end_asked_ = true;
    return tx_turn();
  }
  Turn tx_recall() noexcept override {
    recall_asked_ = true;
    if (died_) return tx_turn();
    return gone_ ? path_->tx_recall() : tx_turn();
  }
  bool rx_replayed() noexcept override { return !hold_replayed_ && path_->rx_replayed(); }
  size_t tx_room(size_t want) noexcept override { return closed() ? 0 : path_->tx_room(want); }
  size_t tx_write(const iovec* iov, size_t n, size_t skip, size_t limit) noexcept override {
    return closed() ? 0 : path_->tx_write(iov, n, skip, limit);
  }
  size_t tx_fill(transport::ByteSource& from, size_t limit) noexcept override {
    return closed() ? 0 : path_->tx_fill(from, limit);
  }
  size_t tx_put(const void* from, size_t n) noexcept override {
    return closed() ? 0 : path_->tx_put(from, n);
  }

  // --- the fake's ---
  transport::PathKind kind() const noexcept override { return path_->kind(); }
  size_t capacity() const noexcept override { return path_->capacity(); }
  uint64_t tx_unread() noexcept override { return path_->tx_unread(); }
  uint64_t tx_tail() noexcept override { return path_->tx_tail(); }
  size_t tx_unread_spans(uint64_t from, size_t n, iovec spans[2]) noexcept override {
    return path_->tx_unread_spans(from, n, spans);
  }
  bool tx_failed() const noexcept override { return died_ || path_->tx_failed(); }
  size_t rx_available() noexcept override { return path_->rx_available(); }
  size_t rx_read(const iovec* iov, size_t n, size_t skip, size_t limit,
                 bool peek) noexcept override {
    return path_->rx_read(iov, n, skip, limit, peek);
  }
  size_t rx_take(void* to, size_t n) noexcept override { return path_->rx_take(to, n); }
  size_t rx_discard(size_t n) noexcept override { return path_->rx_discard(n); }
  uint64_t rx_head() noexcept override { return path_->rx_head(); }
  uint64_t rx_published() noexcept override { return path_->rx_published() + (died_ ? 1 : 0); }
  bool rx_failed() const noexcept override { return path_->rx_failed(); }
  void tx_set_start(uint64_t at) noexcept override { path_->tx_set_start(at); }
  std::optional<uint64_t> rx_start() noexcept override { return path_->rx_start(); }
  void rx_set_ready() noexcept override { path_->rx_set_ready(); }
  bool tx_peer_ready() noexcept override { return path_->tx_peer_ready(); }
  Turn tx_turn() noexcept override { return path_->tx_turn(); }
  bool tx_maybe_turned() noexcept override { return path_->tx_maybe_turned(); }
  Turn rx_turn() noexcept override { return path_->rx_turn(); }
  Turn rx_freeze() noexcept override { return path_->rx_freeze(); }
  void tx_set_replayed() noexcept override { path_->tx_set_replayed(); }
  uint32_t rx_bell() noexcept override { return path_->rx_bell(); }
  uint32_t tx_bell() noexcept override { return path_->tx_bell(); }
  void rx_arm(transport::Sleep how) noexcept override { path_->rx_arm(how); }
  void tx_arm(transport::Sleep how) noexcept override { path_->tx_arm(how); }
  Result<void> rx_sleep(uint32_t seen, const timespec* timeout) noexcept override {
    return path_->rx_sleep(seen, timeout);
  }
  Result<void> tx_sleep(uint32_t seen, const timespec* timeout) noexcept override {
    return path_->tx_sleep(seen, timeout);
  }
  void wake_local() noexcept override { path_->wake_local(); }
  void wake_peer() noexcept override { path_->wake_peer(); }
  int wait_fd() const noexcept override { return path_->wait_fd(); }
  bool drain_wait_fd() noexcept override { return path_->drain_wait_fd(); }
  void let_go() noexcept override {}

 private:
  bool closed() const { return end_asked_ || recall_asked_; }

  const std::unique_ptr<Channel> path_;
  std::atomic<bool> end_asked_{false};
  std::atomic<bool> recall_asked_{false};
  std::atomic<bool> hold_replayed_{false};
  std::atomic<bool> gone_{false};
  std::atomic<bool> died_{false};
};

/// A connection whose ends have agreed on such a path, and send and receive over it.
struct Asking {
  Asking() : connection(Connection::make()) {
    auto pair = transport::make_fake_pair({});
    EXPECT_TRUE(pair);
    left = std::make_shared<AskingChannel>(std::move(pair->caller));
    right = std::make_shared<AskingChannel>(std::move(pair->callee));
    put(connection.left, left);
    put(connection.right, right);
    EXPECT_TRUE(ping_until_lifted(connection));
  }
  static void put(int fd, const std::shared_ptr<AskingChannel>& channel) {
    Stream& s = *FdTable::stream(fd);
    const auto cookie = os::getsockopt_u64(fd, SO_COOKIE);
    ASSERT_TRUE(cookie);
    s.lift_asked = true;  // its traffic looks for the peer's READY
    const MutexLock lock(stream::inside().mutex);
    ASSERT_TRUE(stream::attach(s, s.generation, *cookie, channel, 7, {}));
  }
  Stream& left_stream() const { return *FdTable::stream(connection.left); }
  Stream& right_stream() const { return *FdTable::stream(connection.right); }
  /// What a keeper does when a word has come.
  static void tend(Stream& s) {
    const MutexLock lock(stream::inside().mutex);
    stream::tend(s);
  }

  Connection connection;
  std::shared_ptr<AskingChannel> left;
  std::shared_ptr<AskingChannel> right;
};

/// Traffic asks for no lift of its own.
inline void configure_without_lifts() {
  configure({"RSOCK_LIFT_CALLS=4000000000", "RSOCK_LIFT_BYTES=4000000000"});
}

inline double seconds_since(uint64_t began_ns) {
  return static_cast<double>(monotonic_ns() - began_ns) / 1e9;
}

}  // namespace rsock::testing
