// Threads that sleep for completions of one device: who wakes, by whom, and who has the place at
// the completion channel. Needs a device; both ends are in this process.
#include "core/transport/verbs/direct_wait.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>
#include <vector>

#include "core/base/call_state.h"
#include "core/base/thread_signals.h"
#include "tests/transport/verbs_pair.h"

namespace rsock::transport {
namespace {

constexpr timespec kLong{10, 0};  // far beyond any honest wait here: reaching it is a lost wake-up

class DirectWaitTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!test_device()) GTEST_SKIP() << "no RDMA device";
  }
  static Pair ready_pair() { return make_verbs_pair(); }
};

void send(Channel& from, char byte) { ASSERT_EQ(from.tx_put(&byte, 1), 1u); }

/// One byte, as a blocking receive takes it. False: a wake-up was lost.
bool receive(Channel& at) {
  char byte = 0;
  for (;;) {
    if (at.rx_take(&byte, 1) == 1) return true;
    const uint32_t bell = at.rx_bell();
    at.rx_arm(Sleep::kFutex);
    if (at.rx_available() != 0) continue;
    if (!at.rx_sleep(bell, &kLong)) return false;
  }
}

/// There and back, two threads that sleep in between.
void ping_pong(Pair& pair, int messages) {
  std::thread echo([&] {
    for (int i = 0; i < messages; ++i) {
      ASSERT_TRUE(receive(*pair.b));
      send(*pair.b, 'b');
    }
  });
  for (int i = 0; i < messages; ++i) {
    send(*pair.a, 'a');
    EXPECT_TRUE(receive(*pair.a));
  }
  echo.join();
}

TEST_F(DirectWaitTest, ASleeperTakesTheEventItselfNotTheKeeper) {
  Pair pair = ready_pair();
  ASSERT_TRUE(pair.a && pair.b);
  constexpr int kMessages = 200;
  const uint64_t before = test_keeper()->events();
  ping_pong(pair, kMessages);
  // Two sleepers, one place: what comes while neither has it is the keeper's.
  EXPECT_LT(test_keeper()->events() - before, uint64_t{kMessages});
}

/// As sleep_on_bell() does: pthread_cancel ends it by the channel's own bells.
TEST_F(DirectWaitTest, ACancelledSleeperGivesThePlaceBack) {
  Pair pair = ready_pair();
  ASSERT_TRUE(pair.a && pair.b);
  for (int i = 0; i < 20; ++i) {
    std::atomic<CallState*> state{nullptr};
    const uint32_t bell = pair.b->rx_bell();
    pair.b->rx_arm(Sleep::kFutex);
    std::thread sleeper([&] {
      const CancellableSleep place(
          [](void* channel) noexcept { static_cast<Channel*>(channel)->wake_local(); },
          pair.b.get());
      state = &call_state();
      if (!place.cancelled()) {
        EXPECT_TRUE(pair.b->rx_sleep(bell, &kLong).has_value());
      }
      EXPECT_TRUE(place.cancelled());
    });
    while (state.load() == nullptr) std::this_thread::yield();
    if (i % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (state.load()->request_and_hold()) state.load()->wake_held();
    sleeper.join();
  }
  constexpr int kMessages = 200;
  const uint64_t before = test_keeper()->events();
  ping_pong(pair, kMessages);
  EXPECT_LT(test_keeper()->events() - before, uint64_t{kMessages});
}

TEST_F(DirectWaitTest, ABellWithoutACompletionWakesTheDirectSleeper) {
  Pair pair = ready_pair();
  ASSERT_TRUE(pair.a && pair.b);
  for (int i = 0; i < 100; ++i) {
    const uint32_t bell = pair.b->rx_bell();
    pair.b->rx_arm(Sleep::kFutex);
    std::thread sleeper([&] { EXPECT_TRUE(pair.b->rx_sleep(bell, &kLong).has_value()); });
    // Sometimes before it sleeps, sometimes after.
    if (i % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    pair.b->wake_local();
    sleeper.join();
  }
}

TEST_F(DirectWaitTest, SleepersOfSeveralStreamsHearEachTheirOwn) {
  constexpr int kPairs = 4;
  constexpr int kMessages = 300;
  Pair pairs[kPairs];
  for (Pair& p : pairs) {
    p = ready_pair();
    ASSERT_TRUE(p.a && p.b);
  }
  std::vector<std::thread> threads;
  for (int k = 0; k < kPairs; ++k) {
    threads.emplace_back([&, k] {
      for (int i = 0; i < kMessages; ++i) ASSERT_TRUE(receive(*pairs[k].b)) << k << " " << i;
    });
  }
  // The first stream is busy, the last one nearly idle.
  for (int i = 0; i < kMessages; ++i) {
    send(*pairs[0].a, 'a');
    if (i % 3 == 0) std::this_thread::yield();
  }
  for (int k = 1; k < kPairs; ++k) {
    for (int i = 0; i < kMessages; ++i) send(*pairs[k].a, 'a');
  }
  for (std::thread& t : threads) t.join();
}

TEST_F(DirectWaitTest, AnIdleSleeperLeavesThePlaceToABusyOne) {
  Pair idle = ready_pair();
  Pair busy = ready_pair();
  ASSERT_TRUE(idle.a && idle.b && busy.a && busy.b);
  std::thread sleeper([&] { EXPECT_TRUE(receive(*idle.b)); });
  ping_pong(busy, 300);
  send(*idle.a, 'a');
  sleeper.join();
}

TEST_F(DirectWaitTest, TheTimeLimitHoldsWhileEventsOfOthersCome) {
  Pair idle = ready_pair();
  Pair busy = ready_pair();
  ASSERT_TRUE(idle.a && idle.b && busy.a && busy.b);
  std::atomic<bool> over{false};
  std::thread sleeper([&] {
    const uint32_t bell = idle.b->rx_bell();
    idle.b->rx_arm(Sleep::kFutex);
    const timespec brief{0, 30'000'000};
    const auto r = idle.b->rx_sleep(bell, &brief);
    EXPECT_TRUE(!r.has_value() && r.error() == ETIMEDOUT);
    over = true;
  });
  while (!over) {
    send(*busy.a, 'a');
    ASSERT_TRUE(receive(*busy.b));
  }
  sleeper.join();
}

TEST_F(DirectWaitTest, ASignalEndsItOnlyWithoutRestart) {
  Pair pair = ready_pair();
  ASSERT_TRUE(pair.a && pair.b);
  struct sigaction old {};
  struct sigaction ours {};
  // What preload/handlers.cc counts for a handler without SA_RESTART.
  ours.sa_handler = [](int) {
    ++thread_signals().ran;
    ++thread_signals().broke;
  };
  ASSERT_EQ(sigaction(SIGUSR1, &ours, &old), 0);
  std::atomic<bool> ended{false};
  std::thread sleeper([&] {
    const uint32_t bell = pair.b->rx_bell();
    pair.b->rx_arm(Sleep::kFutex);
    const auto r = pair.b->rx_sleep(bell, nullptr);
    EXPECT_TRUE(!r.has_value() && r.error() == EINTR);
    ended = true;
  });
  // One that comes before the sleep is not seen by it: that is the caller's HandlerWatch.
  while (!ended) {
    pthread_kill(sleeper.native_handle(), SIGUSR1);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  sleeper.join();
  ASSERT_EQ(sigaction(SIGUSR1, &old, nullptr), 0);
}

std::atomic<pid_t> g_child{-1};  // in the child 0

/// In the child the bell is nobody's: its wait looks again instead.
TEST_F(DirectWaitTest, AHandlerMayFork) {
  Pair pair = ready_pair();
  ASSERT_TRUE(pair.a && pair.b);
  struct sigaction old {};
  struct sigaction ours {};
  ours.sa_handler = [](int) {
    if (g_child >= 0) return;
    g_child = fork();
    if (g_child != 0) return;
    verbs::Device::after_fork_child();
    alarm(5);  // ends a child that sleeps
  };
  ours.sa_flags = SA_RESTART;
  ASSERT_EQ(sigaction(SIGUSR1, &ours, &old), 0);
  std::thread sleeper([&] {
    const uint32_t bell = pair.b->rx_bell();
    pair.b->rx_arm(Sleep::kFutex);
    const bool woken = pair.b->rx_sleep(bell, nullptr).has_value();
    if (g_child == 0) _exit(woken ? 0 : 1);
    EXPECT_TRUE(woken);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  pthread_kill(sleeper.native_handle(), SIGUSR1);
  while (g_child < 0) std::this_thread::yield();
  int status = -1;
  EXPECT_EQ(waitpid(g_child, &status, 0), g_child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  pair.b->wake_local();
  sleeper.join();
  ASSERT_EQ(sigaction(SIGUSR1, &old, nullptr), 0);
}

}  // namespace
}  // namespace rsock::transport
