// What transport.h promises, on every backend that runs here.

#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/transport/pairs.h"

namespace rsock::transport {
namespace {

class Contract : public testing::TestWithParam<Backend> {
 protected:
  Pair pair_ = GetParam().make();
  Channel& a_ = *pair_.a;
  Channel& b_ = *pair_.b;

  std::string read_string(Channel& c, size_t n, bool peek = false) {
    std::string s(n, '\0');
    s.resize(read(c, s.data(), n, peek));
    return s;
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, Contract,
                         testing::Values(Backend{"Shm", [] { return make_shm_pair(); }},
                                         Backend{"Fake", [] { return make_fake(); }}),
                         [](const auto& info) { return std::string(info.param.name); });

// --- bytes
// ----------------------------------------------------------------------------------------

TEST_P(Contract, CarriesBytesBothWaysAtOnce) {
  EXPECT_EQ(write(a_, "to b", 4), 4u);
  EXPECT_EQ(write(b_, "to a!", 5), 5u);
  EXPECT_EQ(a_.rx_available(), 5u);
  EXPECT_EQ(b_.rx_available(), 4u);
  EXPECT_EQ(read_string(a_, 99), "to a!");
  EXPECT_EQ(read_string(b_, 99), "to b");
}

TEST_P(Contract, FullAndEmptyAreZeroNotErrors) {
  EXPECT_EQ(read_string(b_, 10), "");
  std::vector<char> big(2 * a_.capacity(), 'x');
  EXPECT_EQ(write(a_, big.data(), big.size()), a_.capacity());
  EXPECT_EQ(a_.tx_room(), 0u);
  EXPECT_EQ(write(a_, "y", 1), 0u);
  EXPECT_EQ(a_.tx_unread(), a_.capacity());
  EXPECT_EQ(read(b_, big.data(), 10), 10u);
  EXPECT_EQ(a_.tx_room(), 10u);
  EXPECT_FALSE(a_.tx_failed() || b_.rx_failed());
}

TEST_P(Contract, HonoursSkipAndLimitInBothDirections) {
  char one[] = "abcd";
  char two[] = "efgh";
  const iovec out[2] = {{one, 4}, {two, 4}};
  EXPECT_EQ(a_.tx_write(out, 2, 3, 3), 3u);
  EXPECT_EQ(a_.tx_write(out, 2, 8, 5), 0u);
  char left[4] = "...";
  char right[4] = "...";
  const iovec in[2] = {{left, 3}, {right, 3}};
  EXPECT_EQ(b_.rx_read(in, 2, 2, 2, false), 2u);
  EXPECT_STREQ(left, "..d");
  EXPECT_STREQ(right, "e..");
  EXPECT_EQ(b_.rx_available(), 1u);
}

TEST_P(Contract, PeekLeavesAndDiscardTakes) {
  write(a_, "abcdef", 6);
  EXPECT_EQ(read_string(b_, 3, true), "abc");
  EXPECT_EQ(b_.rx_head(), 0u);
  EXPECT_EQ(b_.rx_discard(2), 2u);
  EXPECT_EQ(read_string(b_, 99, true), "cdef");
  EXPECT_EQ(b_.rx_discard(99), 4u);
  EXPECT_EQ(b_.rx_head(), 6u);
  EXPECT_EQ(b_.rx_discard(1), 0u);
}

TEST_P(Contract, OffsetsCountFromTheBeginning) {
  std::vector<char> buffer(50'000, 'x');
  for (uint64_t lap = 1; lap <= 5; ++lap) {
    ASSERT_EQ(write(a_, buffer.data(), buffer.size()), buffer.size());
    ASSERT_EQ(read(b_, buffer.data(), buffer.size()), buffer.size());
    EXPECT_EQ(a_.tx_tail(), lap * buffer.size());
    EXPECT_EQ(b_.rx_head(), lap * buffer.size());
    EXPECT_EQ(b_.rx_published(), lap * buffer.size());
    EXPECT_EQ(a_.tx_unread(), 0u);
  }
}

TEST_P(Contract, KeepsOrderAndEveryByteUnderRandomSizes) {
  std::mt19937 random(11);
  std::vector<uint8_t> buffer(100'000);
  uint64_t sent = 0;
  uint64_t got = 0;
  while (got < 5'000'000) {
    size_t n = random() % 4 != 0 ? random() % 300 : random() % buffer.size();
    for (size_t i = 0; i < n; ++i) buffer[i] = byte_at(sent + i);
    sent += write(a_, buffer.data(), n);
    n = random() % 4 != 0 ? random() % 300 : random() % buffer.size();
    const size_t m = read(b_, buffer.data(), n, random() % 8 == 0);
    for (size_t i = 0; i < m; ++i) ASSERT_EQ(buffer[i], byte_at(got + i));
    got = b_.rx_head();
    ASSERT_EQ(a_.tx_tail(), sent);
    ASSERT_EQ(b_.rx_available(), sent - got);
    ASSERT_EQ(a_.tx_room(), a_.capacity() - (sent - got));
  }
}

// --- control words
// --------------------------------------------------------------------------------

TEST_P(Contract, StartAndReadyAndReplayedReachTheOtherEnd) {
  EXPECT_FALSE(b_.rx_start().has_value());
  a_.tx_set_start(0);
  EXPECT_EQ(b_.rx_start(), 0u);
  EXPECT_FALSE(a_.rx_start().has_value());
  b_.tx_set_start(12345678901234);
  EXPECT_EQ(a_.rx_start(), 12345678901234u);

  EXPECT_FALSE(a_.tx_peer_ready());
  b_.rx_set_ready();
  EXPECT_TRUE(a_.tx_peer_ready());
  EXPECT_FALSE(b_.tx_peer_ready());

  EXPECT_FALSE(b_.rx_replayed());
  a_.tx_set_replayed();
  EXPECT_TRUE(b_.rx_replayed());
  EXPECT_FALSE(a_.rx_replayed());
}

TEST_P(Contract, AnEndedDirectionIsDrainedToItsTail) {
  write(a_, "abcdef", 6);
  read_string(b_, 1);
  EXPECT_EQ(b_.rx_turn().kind, TurnKind::kOpen);
  const Turn end = a_.tx_end();
  EXPECT_EQ(end.kind, TurnKind::kEnded);
  EXPECT_EQ(end.at, 6u);
  EXPECT_EQ(write(a_, "no more", 7), 0u);
  EXPECT_EQ(a_.tx_room(), 0u);
  EXPECT_EQ(b_.rx_turn().kind, TurnKind::kEnded);
  EXPECT_EQ(b_.rx_turn().at, 6u);
  EXPECT_EQ(read_string(b_, 99), "bcdef");
  EXPECT_EQ(b_.rx_head(), end.at);
  EXPECT_EQ(b_.tx_turn().kind, TurnKind::kOpen);  // the other direction goes on
  EXPECT_EQ(write(b_, "x", 1), 1u);
}

TEST_P(Contract, AFrozenDirectionGivesNothingAndKeepsItsRestForTheSender) {
  write(a_, "abcdef", 6);
  EXPECT_EQ(read_string(b_, 2), "ab");
  const Turn frozen = b_.rx_freeze();
  EXPECT_EQ(frozen.kind, TurnKind::kFrozen);
  EXPECT_EQ(frozen.at, 2u);
  EXPECT_EQ(b_.rx_available(), 0u);
  EXPECT_EQ(read_string(b_, 99), "");
  EXPECT_EQ(read_string(b_, 99, true), "");
  EXPECT_EQ(b_.rx_discard(1), 0u);
  EXPECT_EQ(a_.tx_turn().kind, TurnKind::kFrozen);
  EXPECT_EQ(a_.tx_turn().at, 2u);
  // Bytes that the sender still wrote before it looked are part of what it replays.
  EXPECT_EQ(write(a_, "gh", 2), 2u);
  std::string rest(a_.tx_tail() - 2, '\0');
  EXPECT_EQ(a_.tx_copy_unread(2, rest.data(), rest.size()), rest.size());
  EXPECT_EQ(rest, "cdefgh");
}

TEST_P(Contract, ARecalledDirectionIsFrozenAtWhatWasDelivered) {
  write(a_, "abcdef", 6);
  EXPECT_EQ(read_string(b_, 4), "abcd");
  const Turn turn = a_.tx_recall();
  EXPECT_EQ(turn.kind, TurnKind::kFrozen);
  EXPECT_EQ(turn.at, 4u);
  EXPECT_EQ(read_string(b_, 99), "");
  EXPECT_EQ(b_.rx_turn().kind, TurnKind::kFrozen);
  EXPECT_EQ(b_.rx_turn().at, 4u);
  EXPECT_EQ(b_.rx_freeze().kind, TurnKind::kFrozen);
  EXPECT_EQ(write(a_, "x", 1), 0u);
  char rest[2];
  EXPECT_EQ(a_.tx_copy_unread(4, rest, 2), 2u);
  EXPECT_EQ(std::string(rest, 2), "ef");
}

TEST_P(Contract, TheSecondToTurnADirectionObeysTheFirst) {
  write(a_, "abc", 3);
  EXPECT_EQ(a_.tx_end().kind, TurnKind::kEnded);
  EXPECT_EQ(b_.rx_freeze().kind, TurnKind::kEnded);
  EXPECT_EQ(b_.rx_freeze().at, 3u);
  EXPECT_EQ(a_.tx_recall().kind, TurnKind::kEnded);
  EXPECT_EQ(read_string(b_, 9), "abc");

  write(b_, "def", 3);
  read_string(a_, 1);
  EXPECT_EQ(a_.rx_freeze().kind, TurnKind::kFrozen);
  EXPECT_EQ(b_.tx_end().kind, TurnKind::kFrozen);
  EXPECT_EQ(b_.tx_end().at, 1u);
  EXPECT_EQ(b_.tx_recall().at, 1u);
}

TEST_P(Contract, RacingTurnsHaveOneWinnerThatBothEndsName) {
  int ended = 0;
  constexpr int kRounds = 500;
  for (int round = 0; round < kRounds; ++round) {
    Pair pair = GetParam().make();
    write(*pair.a, "abc", 3);
    Turn ours;
    Turn theirs;
    std::thread other([&] { theirs = pair.b->rx_freeze(); });
    ours = round % 2 == 0 ? pair.a->tx_end() : pair.a->tx_recall();
    other.join();
    ASSERT_EQ(ours.kind, theirs.kind);
    ASSERT_EQ(ours.at, theirs.at);
    ASSERT_EQ(ours.at, pair.a->tx_turn().at);
    ended += ours.kind == TurnKind::kEnded;
  }
  EXPECT_LE(ended, kRounds / 2);
}

TEST_P(Contract, ARecallDuringReadsSplitsTheStreamExactly) {
  for (int round = 0; round < 300; ++round) {
    Pair pair = GetParam().make();
    std::vector<uint8_t> data(20'000);
    for (size_t i = 0; i < data.size(); ++i) data[i] = byte_at(i);
    ASSERT_EQ(write(*pair.a, data.data(), data.size()), data.size());
    std::vector<uint8_t> got;
    std::thread reader([&] {
      uint8_t piece[97];
      for (int i = 0; i < 300; ++i) {
        const size_t n = read(*pair.b, piece, sizeof(piece));
        if (n == 0) break;
        got.insert(got.end(), piece, piece + n);
      }
    });
    for (int i = 0; i < round * 20; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
    const Turn turn = pair.a->tx_recall();
    reader.join();
    ASSERT_EQ(turn.at, got.size());
    got.resize(data.size());
    ASSERT_EQ(pair.a->tx_copy_unread(turn.at, got.data() + turn.at, data.size() - turn.at),
              data.size() - turn.at);
    ASSERT_EQ(got, data);
  }
}

// --- waiting
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
  pollfd p{b_.wait_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&p, 1, 0), 0);
}

TEST_P(Contract, WakeLocalAndWakePeerReachBothSleepersOfAnEnd) {
  for (const bool local : {true, false}) {
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
  pair_.a.reset();
  pollfd p{b_.wait_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&p, 1, 1000), 1);
  EXPECT_TRUE(p.revents & POLLHUP);
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
  read(b_, big.data(), third - 1);
  EXPECT_EQ(a_.tx_bell(), bell);
  read(b_, big.data(), 1);
  EXPECT_NE(a_.tx_bell(), bell);
  EXPECT_TRUE(a_.tx_sleep(bell, &kLong).has_value());
}

TEST_P(Contract, DiscardWakesASenderToo) {
  std::vector<char> big(a_.capacity());
  write(a_, big.data(), big.size());
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
      200'000, [&] { write(a_, "x", 1); },
      [&] {
        bell = b_.rx_bell();
        b_.rx_arm(Sleep::kFutex);
        seen = b_.rx_available();
      },
      [&] {
        missed += seen == 0 && b_.rx_bell() == bell;
        b_.rx_discard(1);
      });
  EXPECT_EQ(missed, 0u);
}

TEST_P(Contract, ArmingAndReleasingNeverMissEachOther) {
  const std::vector<char> third(a_.capacity() / 3 + 1);
  std::vector<char> full(a_.capacity());
  ASSERT_EQ(write(a_, full.data(), full.size()), full.size());
  uint64_t missed = 0;
  size_t room = 0;
  uint32_t bell = 0;
  collide(
      50'000, [&] { b_.rx_discard(third.size()); },
      [&] {
        bell = a_.tx_bell();
        a_.tx_arm(Sleep::kFutex);
        room = a_.tx_room();
      },
      [&] {
        missed += room == 0 && a_.tx_bell() == bell;
        write(a_, third.data(), third.size());
      });
  EXPECT_EQ(missed, 0u);
}

// Both sides sleep for every byte, so that every wake-up is needed.
TEST_P(Contract, NoWakeUpIsLostInPingPong) {
  constexpr int kRounds = 5'000;
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
    EXPECT_EQ(read(a_, &last, 1) + read(b_, &last, 1), 1u);
  }
}

// A stream through a ring that is full and empty all the time; both ends sleep whenever they must.
TEST_P(Contract, NoWakeUpIsLostUnderRandomLoad) {
  constexpr uint64_t kTotal = 8'000'000;
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
