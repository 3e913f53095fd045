#include "core/stream/reach.h"

#include <gtest/gtest.h>

namespace rsock::stream {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;

wire::Endpoint service(uint16_t port) {
  wire::Endpoint e;
  e.address[15] = 1;
  e.port = port;
  return e;
}

TEST(Reach, AFailureHoldsForFiveSecondsThenTwiceAsLong) {
  Reach reach;
  uint64_t now = 100 * kSecond;
  for (const uint64_t seconds : {5, 10, 20, 40, 80, 160, 300, 300}) {
    EXPECT_EQ(reach.blocked(service(1), now), nullptr);
    reach.failed(service(1), "no", now);
    EXPECT_STREQ(reach.blocked(service(1), now + seconds * kSecond - 1), "no");
    now += seconds * kSecond;
    EXPECT_EQ(reach.blocked(service(1), now), nullptr);
  }
  EXPECT_EQ(reach.blocked(service(2), now), nullptr);
}

TEST(Reach, FailuresSideBySideAreOne) {
  Reach reach;
  for (int i = 0; i < 50; ++i) reach.failed(service(1), "no", kSecond);
  EXPECT_EQ(reach.blocked(service(1), 6 * kSecond), nullptr);
}

TEST(Reach, SuccessBeginsAnew) {
  Reach reach;
  reach.failed(service(1), "no", kSecond);
  reach.failed(service(1), "no", 10 * kSecond);
  reach.found(service(1), 77, 30 * kSecond);
  EXPECT_EQ(reach.blocked(service(1), 30 * kSecond), nullptr);
  EXPECT_EQ(reach.keeper_of(service(1)), 77u);
  reach.failed(service(1), "no", 40 * kSecond);
  EXPECT_EQ(reach.keeper_of(service(1)), std::nullopt);
  EXPECT_EQ(reach.blocked(service(1), 45 * kSecond), nullptr);
}

TEST(Reach, WhoAnsweredBeforeIsMissedOnceOnly) {
  Reach reach;
  EXPECT_FALSE(reach.answered_before(service(1)));
  reach.found(service(1), 77, kSecond);
  reach.not_there(service(1));  // another of its keepers may be
  EXPECT_TRUE(reach.answered_before(service(1)));
  reach.failed(service(1), "no", 2 * kSecond);
  EXPECT_FALSE(reach.answered_before(service(1)));
}

TEST(Reach, ForgetsTheOldestWhenItIsFull) {
  Reach reach;
  for (uint16_t i = 0; i < 2 * Reach::kMost; ++i) reach.failed(service(i), "no", kSecond + i);
  EXPECT_EQ(reach.blocked(service(0), 2 * kSecond), nullptr);
  EXPECT_STREQ(reach.blocked(service(2 * Reach::kMost - 1), 2 * kSecond), "no");
}

}  // namespace
}  // namespace rsock::stream
