// Which streams keep their queue pair: the test is the keeper, its clock, and the device.
//
// The channels are fakes that say they are RDMA; no keeper thread runs, so that what moves between
// two looks is what the test moves.

#include "core/stream/heat.h"

#include "core/os/os.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/rdma_host.h"
#include "core/transport/fake/fake_channel.h"
#include "tests/stream/fabric.h"
#include "tests/stream/impostor.h"

namespace rsock {
namespace {

using namespace rsock::testing;

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kIdleSeconds = 60;
constexpr const char* kColdest = "a busier stream needed the queue pair";

/// Nothing is worth lifting: nobody asks for a keeper.
void configure_cold(std::vector<std::string> more) {
  more.insert(more.end(), {"RSOCK_LIFT_CALLS=1000000000", "RSOCK_LIFT_BYTES=1G"});
  configure(std::move(more));
}

Stream& stream_of(int fd) { return *FdTable::stream(fd); }

/// A connection whose own end is on a queue pair; the other end is too, but no stream that counts.
struct Lifted {
  explicit Lifted(uint64_t nonce, transport::PathKind kind = transport::PathKind::kRdma)
      : c(Connection::make()) {
    transport::FakeOptions options;
    options.kind = kind;
    pair = std::move(*transport::make_fake_pair(options));
    attach(c.left, std::move(pair.caller), nonce);
    attach(c.right, std::move(pair.callee), nonce + 1);
    // Whoever shares memory with us can be kicked.
    if (kind == transport::PathKind::kShm) {
      stream_of(c.left).peer_kick = wire::keeper_name(nonce, nonce);
    }
    stream::remember_attached(stream_of(c.left), nonce);
    turn();
    move(1);
    EXPECT_TRUE(sends_in_ring(stream_of(c.left)));
  }
  static void attach(int fd, std::unique_ptr<transport::Channel> channel, uint64_t nonce) {
    Stream& s = stream_of(fd);
    EXPECT_TRUE(stream::attach(s, s.generation, *os::getsockopt_u64(fd, SO_COOKIE),
                               std::shared_ptr<transport::Channel>(std::move(channel)), nonce, {}));
  }
  /// Both keepers look at the words.
  void turn() {
    for (int i = 0; i < 4; ++i) {
      for (int fd : {c.left, c.right}) stream::attend(stream_of(fd));
    }
  }
  /// Left to right, so many.
  void move(size_t n) {
    const std::string out(n, 'x');
    std::string in(n, '\0');
    ASSERT_EQ(do_send(c.left, out.data(), n), static_cast<long>(n));
    for (size_t got = 0; got < n;) {
      const long r = do_recv(c.right, in.data(), n - got);
      ASSERT_GT(r, 0);
      got += static_cast<size_t>(r);
    }
  }
  bool on_channel() const { return has_channel(c.left); }
  /// Why it was set down, or nothing.
  std::string down() {
    turn();
    Stream& s = stream_of(c.left);
    return s.set_downs != 0 ? s.not_lifted.load() : "";
  }
  Connection c;
  transport::FakePair pair;
};

/// One that found no queue pair left.
struct Waiting {
  Waiting() : c(Connection::make()) {
    Stream& s = stream_of(c.left);
    stream::wait_for_room(s, s.generation);
  }
  void move(size_t n) {
    const std::string out(n, 'x');
    ASSERT_EQ(do_send(c.left, out.data(), n), static_cast<long>(n));
  }
  Connection c;
};

class Heat : public ::testing::Test {
 protected:
  void SetUp() override {
    stream::forget_heat();
    stream::inside().attached.clear();
    leave_host_behind();
    configure_cold({"RSOCK_PATH=rdma", summary_.setting()});
    shared_ = std::make_shared<Fabric::Shared>();
    stream::set_fabric(std::make_unique<Fabric>(shared_));
  }
  /// The keeper comes by, so many seconds later.
  uint64_t look(uint64_t seconds_later = 1) {
    now_ += seconds_later * kSecond;
    return stream::run_heat_timer(now_);
  }
  int asked_for() const { return shared_->resolved; }

  const MutexLock keeper_{stream::inside().mutex};
  Summary summary_;
  std::shared_ptr<Fabric::Shared> shared_;
  uint64_t now_ = 1'000 * kSecond;
};

// --- idle --------------------------------------------------------------------------------------

TEST_F(Heat, AStreamThatMovesNothingIsSetDownAfterTheIdleTime) {
  Lifted a(1);
  look();
  for (uint64_t second = 15; second < kIdleSeconds; second += 15) {
    look(15);
    ASSERT_EQ(a.down(), "") << "after " << second << " s";
  }
  look(15);
  EXPECT_EQ(a.down(), "idle");
  EXPECT_FALSE(a.on_channel()) << "the queue pair is given back";
  EXPECT_TRUE(echoes(a.c.left, a.c.right, 100'000));
  EXPECT_NE(summary_.line().find("\"set_down_for\":{\"idle\":1}"), std::string::npos);
}

TEST_F(Heat, MemoryOfAnIdleRingIsGivenBackToo) {
  stream::inside().idle_at = 0;
  Lifted idle(1, transport::PathKind::kShm);
  Lifted busy(3, transport::PathKind::kShm);
  EXPECT_EQ(look(), UINT64_MAX) << "no queue pair to give back";
  uint64_t due = stream::run_idle_timer(now_);
  for (uint64_t second = 15; second < kIdleSeconds + 15; second += 15) {
    EXPECT_EQ(due, now_ + 15 * kSecond);
    now_ = due;
    busy.move(1);
    due = stream::run_idle_timer(now_);
    ASSERT_EQ(idle.down(), "") << "after " << second << " s";
  }
  now_ = due;
  busy.move(1);
  due = stream::run_idle_timer(now_);
  EXPECT_EQ(idle.down(), "idle");
  EXPECT_FALSE(idle.on_channel());
  EXPECT_EQ(busy.down(), "");
  EXPECT_TRUE(busy.on_channel());
  EXPECT_TRUE(echoes(idle.c.left, idle.c.right, 100'000));
  stream::set_down(stream_of(busy.c.left), "test");
  EXPECT_EQ(busy.down(), "test");
  EXPECT_EQ(stream::run_idle_timer(due), UINT64_MAX) << "an idle process sleeps";
}

TEST_F(Heat, AByteNowAndThenKeepsIt) {
  Lifted a(1);
  look();
  for (int i = 0; i < 20; ++i) {
    a.move(1);
    look(kIdleSeconds / 2);
    look(kIdleSeconds / 3);
  }
  EXPECT_EQ(a.down(), "");
  EXPECT_TRUE(a.on_channel());
}

TEST_F(Heat, BytesThatComeCountAsThoseThatGo) {
  Lifted a(1);
  look();
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(do_send(a.c.right, "x", 1), 1);
    char byte;
    ASSERT_EQ(do_recv(a.c.left, &byte, 1), 1);
    look(kIdleSeconds / 2);
  }
  EXPECT_EQ(a.down(), "");
}

TEST_F(Heat, ZeroSecondsMeanNever) {
  configure_cold({"RSOCK_PATH=rdma", "RSOCK_RDMA_IDLE_S=0"});
  Lifted a(1);
  EXPECT_EQ(look(), UINT64_MAX) << "nothing to come back for";
  EXPECT_EQ(look(10'000), UINT64_MAX);
  EXPECT_EQ(a.down(), "");
}

TEST_F(Heat, OnlyThoseOnQueuePairsAreLookedAt) {
  Connection plain = Connection::make();
  EXPECT_EQ(look(), UINT64_MAX);
  Connection shm = Connection::make();
  transport::FakeOptions options;
  options.kind = transport::PathKind::kShm;
  auto pair = std::move(*transport::make_fake_pair(options));
  Lifted::attach(shm.left, std::move(pair.caller), 5);
  stream::remember_attached(stream_of(shm.left), 5);
  EXPECT_EQ(look(), UINT64_MAX);
  look(2 * kIdleSeconds);
  EXPECT_TRUE(has_channel(shm.left));
}

TEST_F(Heat, ItComesByFourTimesInTheIdleTimeAndEachSecondWhileSomebodyWaits) {
  Lifted a(1);
  const uint64_t quiet = look();
  EXPECT_EQ(quiet, now_ + kIdleSeconds / 4 * kSecond);
  Waiting w;
  const uint64_t crowded = look();
  EXPECT_EQ(crowded, now_ + kSecond);
}

// --- the coldest for a hotter one --------------------------------------------------------------

TEST_F(Heat, TheColdestGoesForOneThatIsTwiceAsBusy) {
  Lifted hot(1), cold(3), warm(5);
  Waiting w;
  look();
  hot.move(10'000);
  cold.move(100);
  warm.move(1'000);
  w.move(200);
  look();
  EXPECT_EQ(cold.down(), kColdest);
  EXPECT_EQ(hot.down() + warm.down(), "");
  EXPECT_EQ(asked_for(), 1) << "and the busier one asks for the queue pair";
  EXPECT_TRUE(echoes(cold.c.left, cold.c.right, 100'000));
}

TEST_F(Heat, LessThanTwiceAsBusyIsNotWorthTheMove) {
  Lifted a(1), b(3);
  Waiting w;
  look();
  a.move(101);
  b.move(1'000);
  w.move(201);
  look();
  EXPECT_EQ(a.down() + b.down(), "");
  EXPECT_EQ(asked_for(), 1) << "it asks all the same: room may have come, here or at the peer";
}

TEST_F(Heat, WhoMovesNothingAsksForNothing) {
  Lifted a(1);
  Waiting w;
  for (int i = 0; i < 5; ++i) look();
  EXPECT_EQ(a.down(), "");
  EXPECT_EQ(asked_for(), 0);
  w.move(2);
  look();
  EXPECT_EQ(a.down(), kColdest) << "it has waited all the time";
  EXPECT_EQ(asked_for(), 1);
}

TEST_F(Heat, TheHottestOfThoseWhoWaitIsTheFirst) {
  Lifted a(1);
  Waiting cool, hot;
  look();
  a.move(100);
  cool.move(150);
  hot.move(400);
  look();
  EXPECT_EQ(a.down(), kColdest) << "not busy enough is only the other";
  EXPECT_EQ(asked_for(), 1) << "one at a time";
}

/// It was lifted for what it moved on TCP. Whoever lifts it between two looks finds nothing moved
/// in the next one, and it would go before it has carried a byte.
TEST_F(Heat, OneThatWasLiftedSinceTheLastLookIsNotTheColdest) {
  Lifted before(1);
  Waiting w;
  look();
  Lifted after(3);
  before.move(1'000);
  w.move(500);
  look();
  EXPECT_EQ(after.down(), "");
  EXPECT_EQ(before.down(), "");
}

TEST_F(Heat, WhatWasMovedBeforeTheLastLookDoesNotCount) {
  Lifted a(1), b(3);
  Waiting w;
  look();
  a.move(50'000);
  b.move(100);
  look();
  a.move(10);
  b.move(100);
  w.move(100);
  look();
  EXPECT_EQ(a.down(), kColdest) << "it was hot a second ago";
  EXPECT_EQ(b.down(), "");
}

TEST_F(Heat, WhoClosesWaitsNoMore) {
  Lifted a(1);
  {
    Waiting w;
    look();
    w.move(1'000);
  }
  look();
  EXPECT_EQ(a.down(), "");
  EXPECT_EQ(asked_for(), 0);
}

TEST_F(Heat, WhoWaitsTwiceIsOneWhoWaits) {
  Waiting w;
  Stream& s = stream_of(w.c.left);
  stream::wait_for_room(s, s.generation);
  look();
  w.move(10);
  look();
  w.move(10);
  EXPECT_EQ(look(), UINT64_MAX) << "nobody is left";
  EXPECT_EQ(asked_for(), 1);
}

TEST_F(Heat, AForkedChildHasNoneOfIt) {
  Lifted a(1);
  Waiting w;
  look();
  w.move(1'000);
  stream::forget_heat();
  stream::inside().attached.clear();
  EXPECT_EQ(look(), UINT64_MAX);
  EXPECT_EQ(a.down(), "");
}

}  // namespace
}  // namespace rsock
