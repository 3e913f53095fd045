// What transport.h promises about sleeping and waking, on every backend that runs here.

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/transport/contract.h"

namespace rsock::transport {
namespace {

INSTANTIATE_TEST_SUITE_P(Backends, Contract, every_backend(), backend_name);

// --------------------------------------------------------------------------------------

constexpr timespec kLong{10, 0};  // far beyond any honest wait here: reaching it is a lost wake-up

TEST_P(Contract, SleepReturnsAtOnceWhenTheBellRangBefore) {
  const uint32_t bell = b_.rx_bell();
  b_.rx_arm(Sleep::kFutex);
  write(a_, "x", 1);
  EXPECT_TRUE(b_.rx_sleep(bell, &kLong).has_value());
}

TEST_P(Contract, SleepTimesOutWhenNothingRings) {
  const timespec brief{0, 2'000'000};
  const auto r = b_.rx_sleep(b_.rx_bell(), &brief);
  ASSERT_FALSE(r.has_value());
  EXPECT_TRUE(r.error() == ETIMEDOUT);
  const auto t = a_.tx_sleep(a_.tx_bell(), &brief);
  ASSERT_FALSE(t.has_value());
  EXPECT_TRUE(t.error() == ETIMEDOUT);
}

TEST_P(Contract, NothingRingsForWhoIsNotArmed) {
  write(a_, "x", 1);
  arrive(b_, 1);
  pollfd p{b_.wait_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&p, 1, 0), 0);
}

TEST_P(Contract, WakeLocalAndWakePeerReachBothSleepersOfAnEnd) {
  for (const bool local : {true, false}) {
    // Where every word wakes whom it concerns there is nothing to wake besides.
    if (!local && !a_.decides_alone()) return;
    const uint32_t rx = b_.rx_bell();
    const uint32_t tx = b_.tx_bell();
    std::thread r([&] { EXPECT_TRUE(b_.rx_sleep(rx, &kLong).has_value()); });
    std::thread t([&] { EXPECT_TRUE(b_.tx_sleep(tx, &kLong).has_value()); });
    local ? b_.wake_local() : a_.wake_peer();
    r.join();
    t.join();
  }
  pollfd p{b_.wait_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&p, 1, 0), 1);  // wake_peer rings the doorbell too
}

TEST_P(Contract, TheDoorbellStaysReadableUntilItIsDrained) {
  b_.rx_arm(Sleep::kDoorbell);
  write(a_, "x", 1);
  pollfd p{b_.wait_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&p, 1, 1000), 1);
  EXPECT_EQ(poll(&p, 1, 0), 1);
  b_.drain_wait_fd();
  EXPECT_EQ(poll(&p, 1, 0), 0);
}

TEST_P(Contract, TheDoorbellHangsUpWhenThePeerLetsGo) {
  write(a_, "last words", 10);
  arrive(b_, 10);
  pair_.a.reset();
  pollfd p{b_.wait_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&p, 1, 1000), 1);
  EXPECT_TRUE(b_.peer_let_go());
  if (b_.decides_alone()) {
    EXPECT_TRUE(p.revents & POLLHUP);
  }
  b_.drain_wait_fd();
  b_.wake_peer();
  EXPECT_EQ(read_string(b_, 99), "last words");
}

TEST_P(Contract, ASenderIsWokenWhenAThirdIsFreeAndNotBefore) {
  std::vector<char> big(a_.capacity());
  write(a_, big.data(), big.size());
  const uint32_t bell = a_.tx_bell();
  a_.tx_arm(Sleep::kFutex);
  const size_t third = a_.capacity() / 3;
  arrive(b_, big.size());
  if (a_.decides_alone()) {
    read(b_, big.data(), third - 1);
    EXPECT_EQ(a_.tx_bell(), bell);
    read(b_, big.data(), 1);
  } else {  // credits come at half a ring
    read(b_, big.data(), a_.capacity() / 2 - 1);
    EXPECT_EQ(a_.tx_bell(), bell);
    read(b_, big.data(), 1);
  }
  EXPECT_TRUE(eventually(a_, [&] { return a_.tx_bell() != bell; }));
  EXPECT_TRUE(a_.tx_sleep(bell, &kLong).has_value());
}

TEST_P(Contract, DiscardWakesASenderToo) {
  std::vector<char> big(a_.capacity());
  write(a_, big.data(), big.size());
  arrive(b_, big.size());
  a_.tx_arm(Sleep::kDoorbell);
  b_.rx_discard(a_.capacity());
  pollfd p{a_.wait_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&p, 1, 1000), 1);
}

/// One end's way to wait, with the rule of transport.h: bell (or drain), arm, check, sleep.
template <typename Check>
void wait_rx(Channel& c, Sleep how, Check ready) {
  const uint32_t bell = c.rx_bell();
  if (how == Sleep::kDoorbell) c.drain_wait_fd();
  c.rx_arm(how);
  if (ready()) return;
  if (how == Sleep::kFutex) {
    ASSERT_TRUE(c.rx_sleep(bell, &kLong).has_value()) << "lost wake-up (futex)";
    return;
  }
  pollfd p{c.wait_fd(), POLLIN, 0};
  ASSERT_EQ(poll(&p, 1, 10'000), 1) << "lost wake-up (doorbell)";
}

template <typename Check>
void wait_tx(Channel& c, Sleep how, Check ready) {
  const uint32_t bell = c.tx_bell();
  if (how == Sleep::kDoorbell) c.drain_wait_fd();
  c.tx_arm(how);
  if (ready()) return;
  if (how == Sleep::kFutex) {
    ASSERT_TRUE(c.tx_sleep(bell, &kLong).has_value()) << "lost wake-up (futex)";
    return;
  }
  pollfd p{c.wait_fd(), POLLIN, 0};
  ASSERT_EQ(poll(&p, 1, 10'000), 1) << "lost wake-up (doorbell)";
}

// Sanitizers slow these down tenfold and look for other things.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCollisions = 10'000;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr int kCollisions = 10'000;
#else
constexpr int kCollisions = 200'000;
#endif
#else
constexpr int kCollisions = 200'000;
#endif

/// Runs two actions again and again, each time started at the same instant on two threads, and
/// `after` when both are done.
template <typename Left, typename Right, typename After>
void collide(int rounds, Left left, Right right, After after) {
  std::atomic<int> start{0};
  std::atomic<int> done{0};
  const auto wait_until = [](const std::atomic<int>& v, int at_least) {
    for (int spins = 0; v.load(std::memory_order_acquire) < at_least;) {
      if (++spins % 10'000 == 0) std::this_thread::yield();
    }
  };
  std::thread other([&] {
    for (int i = 1; i <= rounds; ++i) {
      wait_until(start, i);
      left();
      done.store(i, std::memory_order_release);
    }
  });
  for (int i = 1; i <= rounds; ++i) {
    start.store(i, std::memory_order_release);
    for (int spin = 0; spin < i % 1024; ++spin) std::atomic_signal_fence(std::memory_order_seq_cst);
    right();
    wait_until(done, i);
    after();
  }
  other.join();
}

// The heart of invariant 5: whoever arms and finds nothing is rung. A store that its thread's next
// load overtakes breaks it, which only two cores at the same nanosecond can show.
TEST_P(Contract, ArmingAndPublishingNeverMissEachOther) {
  uint64_t missed = 0;
  size_t seen = 0;
  uint32_t bell = 0;
  collide(
      a_.decides_alone() ? kCollisions : 3'000, [&] { write(a_, "x", 1); },
      [&] {
        bell = b_.rx_bell();
        b_.rx_arm(Sleep::kFutex);
        seen = b_.rx_available();
      },
      [&] {
        missed += seen == 0 && !eventually(b_, [&] { return b_.rx_bell() != bell; });
        if (!b_.decides_alone()) arrive(b_, 1);
        b_.rx_discard(1);
      });
  EXPECT_EQ(missed, 0u);
}

TEST_P(Contract, ArmingAndReleasingNeverMissEachOther) {
  // What is told at once: by a third the waker decides, half a ring is what a credit waits for.
  const std::vector<char> third(a_.decides_alone() ? a_.capacity() / 3 + 1 : a_.capacity() / 2);
  std::vector<char> full(a_.capacity());
  ASSERT_EQ(write(a_, full.data(), full.size()), full.size());
  arrive(b_, full.size());
  uint64_t missed = 0;
  size_t room = 0;
  uint32_t bell = 0;
  collide(
      a_.decides_alone() ? kCollisions / 4 : 500, [&] { b_.rx_discard(third.size()); },
      [&] {
        bell = a_.tx_bell();
        a_.tx_arm(Sleep::kFutex);
        room = a_.tx_room();
      },
      [&] {
        missed += room == 0 && !eventually(a_, [&] { return a_.tx_bell() != bell; });
        if (!a_.decides_alone()) {
          EXPECT_TRUE(eventually(a_, [&] { return a_.tx_room() >= third.size(); }));
        }
        write(a_, third.data(), third.size());
        if (!a_.decides_alone()) arrive(b_, full.size());
      });
  EXPECT_EQ(missed, 0u);
}

// Both sides sleep for every byte, so that every wake-up is needed.
TEST_P(Contract, NoWakeUpIsLostInPingPong) {
  const int kRounds = a_.decides_alone() ? 5'000 : 500;
  for (const Sleep how : {Sleep::kFutex, Sleep::kDoorbell}) {
    const auto hit = [how](Channel& c) {
      char ball;
      while (!testing::Test::HasFatalFailure() && read(c, &ball, 1) == 0) {
        wait_rx(c, how, [&] { return c.rx_available() != 0; });
      }
      ASSERT_EQ(write(c, "o", 1), 1u);
    };
    std::thread other([&] {
      for (int i = 0; i < kRounds && !HasFatalFailure(); ++i) hit(b_);
    });
    write(a_, "o", 1);
    for (int i = 0; i < kRounds && !HasFatalFailure(); ++i) hit(a_);
    other.join();
    char last;
    EXPECT_TRUE(a_.decides_alone() ||
                eventually(a_, [&] { return a_.rx_available() + b_.rx_available() == 1; }));
    EXPECT_EQ(read(a_, &last, 1) + read(b_, &last, 1), 1u);
  }
}

// A stream through a ring that is full and empty all the time; both ends sleep whenever they must.
TEST_P(Contract, NoWakeUpIsLostUnderRandomLoad) {
  const uint64_t kTotal = a_.decides_alone() ? 8'000'000 : 2'000'000;
  for (const Sleep how : {Sleep::kFutex, Sleep::kDoorbell}) {
    Pair pair = GetParam().make();
    std::thread sender([&] {
      std::mt19937 random(3);
      std::vector<uint8_t> buffer(90'000);
      for (uint64_t sent = 0; sent < kTotal && !HasFatalFailure();) {
        const size_t want = std::min<uint64_t>(1 + random() % buffer.size(), kTotal - sent);
        for (size_t i = 0; i < want; ++i) buffer[i] = byte_at(sent + i);
        size_t done = 0;
        while (done < want && !HasFatalFailure()) {
          done += write(*pair.a, buffer.data() + done, want - done);
          if (done < want) wait_tx(*pair.a, how, [&] { return pair.a->tx_room() != 0; });
        }
        sent += done;
      }
    });
    std::mt19937 random(4);
    std::vector<uint8_t> buffer(90'000);
    uint64_t wrong = 0;
    for (uint64_t got = 0; got < kTotal && !HasFatalFailure();) {
      const size_t n = read(*pair.b, buffer.data(), 1 + random() % buffer.size());
      for (size_t i = 0; i < n; ++i) wrong += buffer[i] != byte_at(got + i);
      got += n;
      if (n == 0) wait_rx(*pair.b, how, [&] { return pair.b->rx_available() != 0; });
    }
    sender.join();
    EXPECT_EQ(wrong, 0u);
  }
}

}  // namespace
}  // namespace rsock::transport
