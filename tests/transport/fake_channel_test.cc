#include "core/transport/fake/fake_channel.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <string>
#include <vector>

#include "tests/ring/copy_unread.h"
#include "tests/transport/pairs.h"

namespace rsock::transport {
namespace {

struct Fake {
  explicit Fake(FakeOptions options = {}) : pair(*make_fake_pair(options)) {}
  FakePair pair;
  Channel& a = *pair.caller;
  Channel& b = *pair.callee;
  FakeLink& link = *pair.link;
};

TEST(FakeChannel, HeldBytesArriveOnlyWhenPumped) {
  Fake f({.hold_bytes = true});
  EXPECT_EQ(write(f.a, "abcdef", 6), 6u);
  EXPECT_EQ(f.b.rx_available(), 0u);
  EXPECT_EQ(f.link.pump_bytes(FakeSide::kCaller, 4), 4u);
  EXPECT_EQ(f.b.rx_available(), 4u);
  f.link.pump();
  EXPECT_EQ(f.b.rx_available(), 6u);
}

TEST(FakeChannel, APumpWakesASleepingReceiver) {
  Fake f({.hold_bytes = true});
  const uint32_t bell = f.b.rx_bell();
  f.b.rx_arm(Sleep::kFutex);
  write(f.a, "x", 1);
  EXPECT_EQ(f.b.rx_bell(), bell);
  f.link.pump();
  EXPECT_NE(f.b.rx_bell(), bell);
}

TEST(FakeChannel, StarvedOfCreditsTheSenderStopsThoughTheReaderReads) {
  Fake f({.capacity = 16, .hold_credits = true});
  std::string s(16, 'x');
  EXPECT_EQ(write(f.a, s.data(), 16), 16u);
  EXPECT_EQ(read(f.b, s.data(), 16), 16u);
  EXPECT_EQ(f.a.tx_room(), 0u);
  EXPECT_EQ(write(f.a, "y", 1), 0u);
  f.link.pump_credits(FakeSide::kCaller);
  EXPECT_EQ(f.a.tx_room(), 16u);
}

TEST(FakeChannel, AnEndDeliversWhatWasHeldBeforeIt) {
  Fake f({.hold_bytes = true});
  write(f.a, "abc", 3);
  EXPECT_EQ(f.a.tx_end().at, 3u);
  EXPECT_EQ(f.b.rx_turn().at, 3u);
  char c[3];
  EXPECT_EQ(read(f.b, c, 3), 3u);
}

TEST(FakeChannel, ARecallCountsDeliveredBytesNotCreditedOnes) {
  Fake f({.hold_credits = true});
  write(f.a, "abcdef", 6);
  char c[4];
  EXPECT_EQ(read(f.b, c, 4), 4u);
  EXPECT_EQ(f.a.tx_unread(), 6u);
  EXPECT_EQ(f.a.tx_recall().at, 4u);
}

TEST(FakeChannel, ABrokenPathFailsBothEndsAndHangsUp) {
  Fake f({.hold_bytes = true, .hold_credits = true});
  write(f.a, "abcdef", 6);
  f.link.pump_bytes(FakeSide::kCaller, 4);
  char c[8];
  EXPECT_EQ(read(f.b, c, 3), 3u);
  f.link.fail();
  f.link.pump();
  EXPECT_TRUE(f.a.tx_failed() && f.a.rx_failed() && f.b.tx_failed() && f.b.rx_failed());
  EXPECT_EQ(write(f.a, "x", 1), 0u);
  EXPECT_EQ(read(f.b, c, 8), 1u);  // what had arrived is there
  EXPECT_EQ(f.a.tx_unread(), 6u);  // no credit came
  for (Channel* end : {&f.a, &f.b}) {
    pollfd p{end->wait_fd(), POLLIN, 0};
    EXPECT_EQ(poll(&p, 1, 0), 1);
    EXPECT_TRUE(p.revents & POLLHUP);
  }
}

TEST(FakeChannel, ControlWordsDieWithThePath) {
  Fake f;
  write(f.a, "abc", 3);
  f.link.fail();
  f.a.tx_set_start(7);
  f.b.rx_set_ready();
  EXPECT_FALSE(f.b.rx_start().has_value());
  EXPECT_FALSE(f.a.tx_peer_ready());
  EXPECT_EQ(f.b.rx_freeze().kind, TurnKind::kFrozen);
  EXPECT_EQ(f.a.tx_turn().kind, TurnKind::kOpen);
  EXPECT_EQ(f.a.tx_recall().at, 0u);
  char c[3];
  EXPECT_EQ(ring::tx_copy_unread(f.a, 0, c, 3), 3u);
}

TEST(FakeChannel, AFailureWakesSleepers) {
  Fake f;
  const uint32_t rx = f.b.rx_bell();
  const uint32_t tx = f.a.tx_bell();
  f.link.fail();
  EXPECT_NE(f.b.rx_bell(), rx);
  EXPECT_NE(f.a.tx_bell(), tx);
}

}  // namespace
}  // namespace rsock::transport
