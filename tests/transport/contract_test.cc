// What transport.h promises about bytes and control words, on every backend that runs here.

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/ring/copy_unread.h"
#include "tests/transport/contract.h"

namespace rsock::transport {
namespace {

INSTANTIATE_TEST_SUITE_P(Backends, Contract, every_backend(), backend_name);

// --- bytes
// ----------------------------------------------------------------------------------------

TEST_P(Contract, CarriesBytesBothWaysAtOnce) {
  EXPECT_EQ(write(a_, "to b", 4), 4u);
  EXPECT_EQ(write(b_, "to a!", 5), 5u);
  arrive(a_, 5);
  arrive(b_, 4);
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
  arrive(b_, b_.capacity());
  EXPECT_EQ(read(b_, big.data(), 10), 10u);
  if (a_.decides_alone()) {
    EXPECT_EQ(a_.tx_room(), 10u);
  } else {  // half a ring is told at once
    EXPECT_EQ(read(b_, big.data(), b_.capacity() / 2), b_.capacity() / 2);
    EXPECT_TRUE(eventually(a_, [&] { return a_.tx_room() == 10 + a_.capacity() / 2; }));
  }
  EXPECT_FALSE(a_.tx_failed() || b_.rx_failed());
}

TEST_P(Contract, HonoursSkipAndLimitInBothDirections) {
  char one[] = "abcd";
  char two[] = "efgh";
  const iovec out[2] = {{one, 4}, {two, 4}};
  EXPECT_EQ(a_.tx_write(out, 2, 3, 3), 3u);
  EXPECT_EQ(a_.tx_write(out, 2, 8, 5), 0u);
  arrive(b_, 3);
  char left[4] = "...";
  char right[4] = "...";
  const iovec in[2] = {{left, 3}, {right, 3}};
  EXPECT_EQ(b_.rx_read(in, 2, 2, 2, false), 2u);
  EXPECT_STREQ(left, "..d");
  EXPECT_STREQ(right, "e..");
  EXPECT_EQ(b_.rx_available(), 1u);
}

/// Has `size` bytes of byte_at(), and gives at most `most` at a time.
class Bytes final : public ByteSource {
 public:
  Bytes(size_t size, size_t most) : size_(size), most_(most) {}
  size_t gather(std::byte* to, size_t limit) noexcept override {
    const size_t n = std::min({limit, size_ - at_, most_ - given_});
    for (size_t i = 0; i < n; ++i) to[i] = std::byte{byte_at(at_ + i)};
    at_ += n;
    given_ += n;
    return n;
  }
  bool done() const noexcept override { return at_ == size_ || given_ == most_; }
  void more() { given_ = 0; }

 private:
  const size_t size_;
  const size_t most_;
  size_t at_ = 0;
  size_t given_ = 0;
};

TEST_P(Contract, FillsFromASourceAcrossTheEdgeAndStopsWhereItStops) {
  const size_t capacity = a_.capacity();
  const size_t total = 5 * capacity + 17;
  Bytes source(total, capacity / 3 + 1);
  uint64_t received = 0;
  while (received < total) {
    source.more();
    const size_t took = a_.tx_fill(source, capacity);
    ASSERT_EQ(took, std::min(capacity / 3 + 1, total - received));
    arrive(b_, took);
    const std::string got = read_string(b_, took);
    ASSERT_EQ(got.size(), took);
    for (size_t i = 0; i < took; ++i) {
      ASSERT_EQ(static_cast<uint8_t>(got[i]), byte_at(received + i)) << received + i;
    }
    received += took;
    EXPECT_TRUE(eventually(a_, [&] { return a_.tx_room() >= took; }));
  }
  EXPECT_EQ(a_.tx_fill(source, 1), 0u);
  Bytes large(2 * capacity, 2 * capacity);
  EXPECT_TRUE(eventually(a_, [&] { return a_.tx_room() >= capacity / 2; }));
  EXPECT_LE(a_.tx_fill(large, 2 * capacity), capacity);
  EXPECT_EQ(a_.tx_fill(large, 1), 0u);
  EXPECT_FALSE(a_.tx_failed() || b_.rx_failed());
}

TEST_P(Contract, PeekLeavesAndDiscardTakes) {
  write(a_, "abcdef", 6);
  arrive(b_, 6);
  EXPECT_EQ(read_string(b_, 3, true), "abc");
  EXPECT_EQ(b_.rx_head(), 0u);
  EXPECT_EQ(b_.rx_discard(2), 2u);
  EXPECT_EQ(read_string(b_, 99, true), "cdef");
  EXPECT_EQ(b_.rx_discard(99), 4u);
  EXPECT_EQ(b_.rx_head(), 6u);
  EXPECT_EQ(b_.rx_discard(1), 0u);
}

TEST_P(Contract, OffsetsCountFromTheBeginning) {
  // Where credits are messages, half of the ring may be free without the sender's hearing of it.
  std::vector<char> buffer(a_.decides_alone() ? 50'000 : 30'000, 'x');
  for (uint64_t lap = 1; lap <= 5; ++lap) {
    ASSERT_TRUE(eventually(a_, [&] { return a_.tx_room() >= buffer.size(); }));
    ASSERT_EQ(write(a_, buffer.data(), buffer.size()), buffer.size());
    arrive(b_, buffer.size());
    ASSERT_EQ(read(b_, buffer.data(), buffer.size()), buffer.size());
    EXPECT_EQ(a_.tx_tail(), lap * buffer.size());
    EXPECT_EQ(b_.rx_head(), lap * buffer.size());
    EXPECT_EQ(b_.rx_published(), lap * buffer.size());
    EXPECT_TRUE(eventually(a_, [&] { return a_.tx_undelivered() == 0; }));
    if (a_.decides_alone()) {
      EXPECT_EQ(a_.tx_unread(), 0u);
    }
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
    ASSERT_LE(b_.rx_available(), sent - got);
    ASSERT_LE(a_.tx_room(), a_.capacity() - (sent - got));
    if (!a_.decides_alone()) continue;
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
  arrive(b_, 6);
  read_string(b_, 1);
  EXPECT_EQ(b_.rx_turn().kind, TurnKind::kOpen);
  const Turn end = answered(a_, a_.tx_end());
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
  arrive(b_, 6);
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
  EXPECT_EQ(ring::tx_copy_unread(a_, 2, rest.data(), rest.size()), rest.size());
  EXPECT_EQ(rest, "cdefgh");
}

TEST_P(Contract, ARecalledDirectionIsFrozenAtWhatWasDelivered) {
  write(a_, "abcdef", 6);
  arrive(b_, 6);
  EXPECT_EQ(read_string(b_, 4), "abcd");
  Turn turn = a_.tx_recall();
  if (!a_.decides_alone()) {
    EXPECT_TRUE(b_.rx_asked_back());
    (void)b_.rx_freeze();  // as the peer's keeper does
    turn = a_.tx_recall();
  }
  EXPECT_EQ(turn.kind, TurnKind::kFrozen);
  EXPECT_EQ(turn.at, 4u);
  EXPECT_EQ(read_string(b_, 99), "");
  EXPECT_EQ(b_.rx_turn().kind, TurnKind::kFrozen);
  EXPECT_EQ(b_.rx_turn().at, 4u);
  EXPECT_EQ(b_.rx_freeze().kind, TurnKind::kFrozen);
  EXPECT_EQ(write(a_, "x", 1), 0u);
  char rest[2];
  EXPECT_EQ(ring::tx_copy_unread(a_, 4, rest, 2), 2u);
  EXPECT_EQ(std::string(rest, 2), "ef");
}

TEST_P(Contract, LettingGoHangsUpAtOnceWhoeverStillHoldsTheChannel) {
  write(a_, "last", 4);
  arrive(b_, 4);
  pollfd p{b_.wait_fd(), 0, 0};
  EXPECT_EQ(::poll(&p, 1, 0), 0);
  EXPECT_FALSE(b_.peer_let_go());
  a_.let_go();  // and a_ lives on, as in a forked child or a thread that sleeps on its bell
  EXPECT_TRUE(b_.peer_let_go());
  if (b_.decides_alone()) {
    EXPECT_EQ(::poll(&p, 1, 0), 1);
    EXPECT_NE(p.revents & POLLHUP, 0);
  }
  EXPECT_EQ(read_string(b_, 99), "last");
}

// An end may let go between the other's READY and its own START: its process exits, or the stream
// is pinned meanwhile.
TEST_P(Contract, WhoLetsGoWithoutAStartOwesNothing) {
  if (a_.decides_alone()) GTEST_SKIP() << "the words stay: no START is an answer";
  b_.rx_set_ready();
  a_.let_go();
  EXPECT_TRUE(eventually(b_, [&] { return b_.rx_replayed(); }));
}

// Nor does it take back anything: with a START only REPLAYED says that the rest is on TCP.
TEST_P(Contract, WhoLetsGoAfterItsStartHasNotGivenBackItsBytes) {
  if (a_.decides_alone()) GTEST_SKIP() << "the words stay: no START is an answer";
  b_.rx_set_ready();
  a_.tx_set_start(0);
  a_.let_go();
  EXPECT_TRUE(eventually(b_, [&] { return b_.peer_let_go(); }));
  EXPECT_FALSE(b_.rx_replayed());
}

TEST_P(Contract, TheSecondToTurnADirectionObeysTheFirst) {
  write(a_, "abc", 3);
  arrive(b_, 3);
  EXPECT_EQ(answered(a_, a_.tx_end()).kind, TurnKind::kEnded);
  EXPECT_EQ(b_.rx_freeze().kind, TurnKind::kEnded);
  EXPECT_EQ(b_.rx_freeze().at, 3u);
  EXPECT_EQ(a_.tx_recall().kind, TurnKind::kEnded);
  EXPECT_EQ(read_string(b_, 9), "abc");

  write(b_, "def", 3);
  arrive(a_, 3);
  read_string(a_, 1);
  EXPECT_EQ(a_.rx_freeze().kind, TurnKind::kFrozen);
  EXPECT_EQ(b_.tx_end().kind, TurnKind::kFrozen);
  EXPECT_EQ(b_.tx_end().at, 1u);
  EXPECT_EQ(b_.tx_recall().at, 1u);
}

TEST_P(Contract, RacingTurnsHaveOneWinnerThatBothEndsName) {
  int ended = 0;
  const int kRounds = a_.decides_alone() ? 500 : 50;
  for (int round = 0; round < kRounds; ++round) {
    Pair pair = GetParam().make();
    write(*pair.a, "abc", 3);
    if (!pair.a->decides_alone()) arrive(*pair.b, 3);
    Turn ours;
    Turn theirs;
    std::thread other([&] { theirs = pair.b->rx_freeze(); });
    ours = round % 2 == 0 ? pair.a->tx_end() : pair.a->tx_recall();
    other.join();
    ours = answered(*pair.a, ours);
    ASSERT_EQ(ours.kind, theirs.kind);
    ASSERT_EQ(ours.at, theirs.at);
    ASSERT_EQ(ours.at, pair.a->tx_turn().at);
    ended += ours.kind == TurnKind::kEnded;
  }
  EXPECT_LE(ended, kRounds / 2);
}

TEST_P(Contract, ARecallDuringReadsSplitsTheStreamExactly) {
  const int rounds = a_.decides_alone() ? 300 : 30;
  for (int round = 0; round < rounds; ++round) {
    Pair pair = GetParam().make();
    std::vector<uint8_t> data(20'000);
    for (size_t i = 0; i < data.size(); ++i) data[i] = byte_at(i);
    ASSERT_EQ(write(*pair.a, data.data(), data.size()), data.size());
    if (!pair.a->decides_alone()) arrive(*pair.b, data.size());
    std::vector<uint8_t> got;
    std::thread reader([&] {
      uint8_t piece[97];
      for (int i = 0; i < 300; ++i) {
        const size_t n = read(*pair.b, piece, sizeof(piece));
        if (n == 0) break;
        got.insert(got.end(), piece, piece + n);
        if (pair.b->rx_asked_back()) (void)pair.b->rx_freeze();
      }
    });
    for (int i = 0; i < round * 20; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
    Turn turn = pair.a->tx_recall();
    reader.join();
    if (pair.b->rx_asked_back()) (void)pair.b->rx_freeze();
    turn = answered(*pair.a, turn);
    ASSERT_EQ(turn.at, got.size());
    got.resize(data.size());
    ASSERT_EQ(ring::tx_copy_unread(*pair.a, turn.at, got.data() + turn.at, data.size() - turn.at),
              data.size() - turn.at);
    ASSERT_EQ(got, data);
  }
}

}  // namespace
}  // namespace rsock::transport
