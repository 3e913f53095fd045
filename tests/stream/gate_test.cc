#include "core/stream/gate.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace rsock::stream {
namespace {

TEST(Gate, LetsEverybodyInUntilItIsTaken) {
  Gate gate;
  EXPECT_TRUE(gate.enter());
  EXPECT_TRUE(gate.enter());
  EXPECT_FALSE(gate.managed());
  EXPECT_FALSE(gate.idle());
  EXPECT_FALSE(gate.leave());
  EXPECT_TRUE(gate.leave()) << "the last one out is told";
  EXPECT_TRUE(gate.idle());
}

TEST(Gate, CannotBeTakenWhileSomebodyIsInside) {
  Gate gate;
  ASSERT_TRUE(gate.enter());
  EXPECT_FALSE(gate.take());
  EXPECT_TRUE(gate.leave());
  EXPECT_TRUE(gate.take());
  EXPECT_TRUE(gate.managed());
  EXPECT_FALSE(gate.take()) << "only once";
}

TEST(Gate, TurnsAwayWhoComesWhileItIsTaken) {
  Gate gate;
  ASSERT_TRUE(gate.take());
  EXPECT_FALSE(gate.enter());
  gate.give_back();
  EXPECT_TRUE(gate.idle()) << "who was turned away left nothing behind";
  EXPECT_TRUE(gate.enter());
  EXPECT_TRUE(gate.leave());
}

TEST(Gate, GivingBackWhatWasNotTakenChangesNothing) {
  Gate gate;
  ASSERT_TRUE(gate.enter());
  gate.give_back();
  EXPECT_FALSE(gate.take());
  EXPECT_TRUE(gate.leave());
}

TEST(Gate, AVisitEndsOnEveryWayOut) {
  Gate gate;
  int last = 0;
  try {
    ASSERT_TRUE(gate.enter());
    GateVisit visit(gate, [&] { ++last; });
    throw 1;
  } catch (int) {
  }
  EXPECT_EQ(last, 1);
  EXPECT_TRUE(gate.idle());
}

/// The invariant that lifting stands on: what visitors did before they left is seen by who takes
/// the gate, and nobody is inside while it is taken.
TEST(Gate, NobodyIsEverInsideATakenGate) {
  Gate gate;
  uint64_t guarded = 0;  // touched only under the taken gate
  std::atomic<uint64_t> inside{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!stop.load(std::memory_order_relaxed)) {
        if (!gate.enter()) continue;
        inside.fetch_add(1, std::memory_order_relaxed);
        std::this_thread::yield();
        inside.fetch_sub(1, std::memory_order_relaxed);
        gate.leave();
        std::this_thread::yield();
      }
    });
  }
  uint64_t taken = 0;
  for (int i = 0; i < 200'000 && taken < 2'000; ++i) {
    if (!gate.take()) {
      std::this_thread::yield();
      continue;
    }
    ASSERT_EQ(inside.load(std::memory_order_relaxed), 0u);
    ++guarded;
    ++taken;
    gate.give_back();
  }
  stop = true;
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(guarded, taken);
  EXPECT_GT(taken, 0u);
  EXPECT_TRUE(gate.idle());
}

}  // namespace
}  // namespace rsock::stream
