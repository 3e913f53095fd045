// Streams that follow each other between two ends, connected by the connection manager as the
// keeper does it: what a later one takes of a former one. Needs a device; both ends are in this
// process.
#include "core/transport/verbs/queue_pair.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <functional>
#include <vector>

#include "core/base/clock.h"
#include "core/transport/verbs/connection_manager.h"
#include "tests/transport/verbs_pair.h"

namespace rsock::transport {
namespace {

using verbs::CmEvent;
using verbs::queue_pair_counts;
using Kind = CmEvent::Kind;

constexpr uint64_t kPartner = 7;
constexpr uint64_t kListener = 1;
constexpr int kStreams = 3;

/// The parameter: whether the count of bytes travels as immediate value.
class Successive : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!test_device()) GTEST_SKIP() << "no RDMA device";
    manager_ = std::move(*verbs::ConnectionManager::open());
    ibv_gid gid{};
    ASSERT_EQ(verbs::RdmaLibrary::get()->ibv_query_gid(test_device()->context(), 1, 1, &gid), 0);
    memcpy(here_.address.data(), gid.raw, sizeof(gid.raw));
    const auto listener = manager_->listen(0, kListener);
    ASSERT_TRUE(listener.has_value());
    there_ = here_;
    there_.port = manager_->port_of(*listener);
    before_ = queue_pair_counts();
  }
  void TearDown() override {
    keeper_.reset();
    if (device_) end_all_waits();
  }

  uint64_t made() const { return queue_pair_counts().made - before_.made; }
  uint64_t reused() const { return queue_pair_counts().reused - before_.reused; }

  /// Events until `wanted` is among them.
  CmEvent await(Kind wanted) {
    CmEvent e;
    for (const uint64_t limit = monotonic_ns() + 5'000'000'000; monotonic_ns() < limit;) {
      while (manager_->next(&e)) {
        if (e.kind == Kind::kDisconnected) (void)device_->spares().on_disconnected(e.key);
        if (e.kind == Kind::kTimeWaitExit && device_->spares().on_time_wait_exit(e.key)) ++exits_;
        if (e.kind == wanted) return e;
      }
      pollfd p{manager_->event_fd(), POLLIN, 0};
      (void)::poll(&p, 1, 20);
    }
    ADD_FAILURE() << "no event of kind " << static_cast<int>(wanted);
    return {};
  }

  verbs::QueuePair queue_pair_on(rdma_cm_id* id) {
    if (!device_) {
      device_ = *verbs::Device::open(id->verbs, 64);
      keeper_ = std::make_unique<TestKeeper>(device_);
    }
    auto pair = device_->make_queue_pair(id, kTestCapacity, kPartner, GetParam());
    EXPECT_TRUE(pair.has_value());
    return std::move(*pair);
  }

  static verbs::RemoteRing decode(const CmEvent& e) {
    verbs::RemoteRing ring;
    EXPECT_GE(e.size, sizeof(ring));
    memcpy(&ring, e.data, sizeof(ring));
    return ring;
  }
  static std::span<const uint8_t> encode(const verbs::RemoteRing& ring) {
    return {reinterpret_cast<const uint8_t*>(&ring), sizeof(ring)};
  }

  /// A stream: `a` connects, `b` accepts. After a failure: nothing.
  Pair connect() {
    VerbsEnds ends;
    const auto called = manager_->resolve(here_, there_, ++last_key_);
    EXPECT_TRUE(called.has_value());
    await(Kind::kResolved);
    verbs::QueuePair one = queue_pair_on(*called);
    EXPECT_TRUE(manager_->connect(one.id, one.qp, encode(ring_of(one))));

    const CmEvent request = await(Kind::kRequest);
    if (HasFailure()) return give_up(std::move(one));
    manager_->adopt(request.id, ++last_key_);
    verbs::QueuePair two = queue_pair_on(request.id);
    const auto second = ring_of(two);
    ends.b = verbs::make_verbs_channel(device_, std::move(two), decode(request), 2, ends.line_b);
    EXPECT_TRUE(manager_->accept(ends.b->pair().id, ends.b->pair().qp, encode(second)));

    const CmEvent reply = await(Kind::kResponse);
    if (HasFailure()) return give_up(std::move(one));
    ends.a = verbs::make_verbs_channel(device_, std::move(one), decode(reply), 1, ends.line_a);
    EXPECT_TRUE(manager_->establish(ends.a->pair().id, ends.a->pair().qp));
    Pair pair = ends.join();
    ends.a->connected();
    await(Kind::kEstablished);
    ends.b->connected();
    return pair;
  }

  Pair give_up(verbs::QueuePair pair) {
    device_->retire(std::move(pair));
    return {};
  }

  /// Bytes of `a` from `first` on, until `total` have come to `b`, each looked at.
  static void move_bytes(Channel& a, Channel& b, uint64_t first, size_t total) {
    std::vector<uint8_t> out(total), in(total);
    for (size_t i = 0; i < total; ++i) out[i] = byte_at(first + i);
    size_t sent = 0, received = 0;
    EXPECT_TRUE(eventually(a, [&] {
      sent += write(a, out.data() + sent, total - sent);
      received += read(b, in.data() + received, total - received);
      return received == total || a.path_failure() != nullptr || b.rx_failed();
    }));
    ASSERT_EQ(a.path_failure(), nullptr);
    ASSERT_EQ(received, total);
    ASSERT_EQ(in, out);
    ASSERT_EQ(b.rx_available(), 0u) << "bytes that nobody sent";
  }

  /// Until `n` more connections have left TIMEWAIT.
  void await_exits(int n) {
    for (const int until = exits_ + n; exits_ < until && !HasFailure();) await(Kind::kTimeWaitExit);
  }
  /// The device shall hold nothing when the test has ended.
  void end_all_waits() {
    for (const uint64_t limit = monotonic_ns() + 10'000'000'000; device_->bury();) {
      if (monotonic_ns() > limit) return ADD_FAILURE() << "something is kept for ever", void();
      const timespec nap{0, 200'000'000};
      nanosleep(&nap, nullptr);
    }
  }

  /// Other bytes in each stream and direction.
  void move_both_ways(Pair& pair, int stream, size_t n) {
    move_bytes(*pair.a, *pair.b, static_cast<uint64_t>(stream) << 20, n);
    move_bytes(*pair.b, *pair.a, static_cast<uint64_t>(stream) << 19, n);
  }

  std::unique_ptr<verbs::ConnectionManager> manager_;
  std::shared_ptr<verbs::Device> device_;
  std::unique_ptr<TestKeeper> keeper_;
  wire::Endpoint here_;
  wire::Endpoint there_;
  uint64_t last_key_ = 100;
  int exits_ = 0;
  verbs::QueuePairCounts before_;
};

TEST_P(Successive, StreamsUseTheSameTwoQueuePairs) {
  for (int i = 0; i < kStreams; ++i) {
    Pair pair = connect();
    if (HasFailure()) return;
    move_both_ways(pair, i, 3 * kTestCapacity);
    pair = Pair{};
    device_->bury();
    await_exits(2);
    if (HasFailure()) return;
  }
  EXPECT_EQ(made(), 2u);
  EXPECT_EQ(reused(), 2u * (kStreams - 1));
}

TEST_P(Successive, StreamAfterOneThatEndedWithWritesInFlightHasItsOwnBytes) {
  const std::vector<uint8_t> junk(kTestCapacity, 0xee);
  for (int i = 0; i < kStreams; ++i) {
    Pair pair = connect();
    if (HasFailure()) return;
    move_both_ways(pair, i, 2 * kTestCapacity);
    // Both rings full, nobody reads; then the two ends go in turn, the other one still at it.
    EXPECT_NE(write(*pair.a, junk.data(), junk.size()), 0u);
    EXPECT_NE(write(*pair.b, junk.data(), junk.size()), 0u);
    (i % 2 == 0 ? pair.a : pair.b).reset();
    device_->bury();
    pair = Pair{};
    device_->bury();
    await_exits(2);
    if (HasFailure()) return;
  }
  EXPECT_EQ(made(), 2u);
  EXPECT_EQ(reused(), 2u * (kStreams - 1));
}

TEST_P(Successive, NumberIsNotUsedAgainWhileThePeerMaySendToIt) {
  Pair first = connect();
  if (HasFailure()) return;
  first.b.reset();
  device_->bury();
  // `a` has not ended: its queue pair would go on sending for seconds.
  const timespec long_enough{1, 500'000'000};
  nanosleep(&long_enough, nullptr);
  Pair second = connect();
  if (HasFailure()) return;
  move_bytes(*second.a, *second.b, 0, kTestCapacity);
  EXPECT_EQ(exits_, 0);
  EXPECT_EQ(reused(), 0u);
  first = Pair{};
  device_->bury();
  await_exits(2);
  Pair third = connect();
  if (HasFailure()) return;
  move_bytes(*third.a, *third.b, 0, kTestCapacity);
  EXPECT_EQ(reused(), 2u);
}

TEST_P(Successive, SparesEndWithTheirTime) {
  Pair pair = connect();
  if (HasFailure()) return;
  pair = Pair{};
  ASSERT_TRUE(device_->bury());
  await_exits(2);
  const timespec longer_than_kept{5, 500'000'000};
  nanosleep(&longer_than_kept, nullptr);
  EXPECT_FALSE(device_->bury());
  pair = connect();
  EXPECT_EQ(reused(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Verbs, Successive, testing::Values(true, false), [](const auto& info) {
  return info.param ? "WithImmediate" : "WithoutImmediate";
});

}  // namespace
}  // namespace rsock::transport
