// How long a wait may spin follows from how former waits ended: told in states, never in measured
// time. A budget's own clock is real, so the configured maximum is either nothing or so long (a
// second) that no test meets its end.

#include "core/stream/spin.h"

#include "tests/stream/loopback.h"

namespace rsock::stream {
namespace {

class Spin : public ::testing::Test {
 protected:
  void allow(const char* setting) { testing::configure({setting}); }
  void hit() { SpinBudget(state_).hit(); }
  void miss() { SpinBudget(state_).missed(); }
  bool spins() { return SpinBudget(state_).more(); }

  SpinState state_;
};

TEST_F(Spin, IsForbiddenByAMaximumOfZero) {
  allow("RSOCK_SPIN_US=0");
  EXPECT_FALSE(spins());
  hit();
  EXPECT_FALSE(spins());
  for (int i = 0; i < 100; ++i) miss();
  EXPECT_FALSE(spins());
}

TEST_F(Spin, IsTriedByAFreshStream) {
  allow("RSOCK_SPIN_US=1000000");
  EXPECT_TRUE(spins());
}

TEST_F(Spin, EndsAfterAFewWaitsThatHadToSleep) {
  allow("RSOCK_SPIN_US=1000000");
  int waits = 0;
  while (state_.limit != 0 || waits == 0) {
    miss();
    ASSERT_LT(++waits, 12);
  }
  EXPECT_FALSE(spins()) << "an idle stream sleeps at once";
}

TEST_F(Spin, IsHalvedByAMissAndGrowsWithAHit) {
  allow("RSOCK_SPIN_US=1000000");
  miss();
  const uint64_t half = state_.limit;
  EXPECT_EQ(half, SpinBudget::max_ticks() / 2);
  hit();
  EXPECT_GT(state_.limit, half);
  for (int i = 0; i < 40; ++i) hit();
  EXPECT_EQ(state_.limit, SpinBudget::max_ticks()) << "and never beyond the maximum";
}

TEST_F(Spin, IsTriedAgainAfterQuickWaitsAndLessOftenAfterEachFailure) {
  allow("RSOCK_SPIN_US=1000000");
  while (!state_.begun || state_.limit != 0) miss();
  const auto waits_until_a_try = [&] {
    int n = 0;
    while (!spins() && n < 100'000) {
      miss();  // asleep, but not for longer than a spin
      ++n;
    }
    return n;
  };
  const int first = waits_until_a_try();
  ASSERT_GT(first, 0);
  ASSERT_LT(first, 100);
  miss();  // the try failed
  EXPECT_EQ(waits_until_a_try(), 2 * first);
  hit();  // this one did not
  EXPECT_TRUE(spins());
}

TEST_F(Spin, AFailedTryStopsAtSomeGap) {
  allow("RSOCK_SPIN_US=1000000");
  while (!state_.begun || state_.limit != 0) miss();
  for (int i = 0; i < 50'000; ++i) miss();
  EXPECT_LE(state_.try_gap, 4096u);
}

TEST_F(Spin, FollowsAMaximumThatWasLowered) {
  allow("RSOCK_SPIN_US=1000000");
  for (int i = 0; i < 10; ++i) hit();
  allow("RSOCK_SPIN_US=0");
  EXPECT_FALSE(spins());
}

}  // namespace
}  // namespace rsock::stream
