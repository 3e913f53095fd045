// File pages by reference beside a ring: every byte in its place, whoever looks, and wherever the
// direction turns.

#include "core/transport/shm/page_lane.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/transport/shm/shm_segment.h"
#include "tests/base/faults.h"
#include "tests/ring/copy_unread.h"
#include "tests/transport/pairs.h"

namespace rsock::transport {
namespace {

constexpr size_t kRing = 512 * 1024;
constexpr size_t kLeast = PageSender::kLeast;

/// Not a memfd: tmpfs passes pages by reference in newer kernels only.
class File {
 public:
  explicit File(size_t size) : bytes_(size, '\0') {
    char name[] = "/tmp/page_lane_XXXXXX";
    fd_ = mkstemp(name);
    unlink(name);
    std::mt19937 random(static_cast<unsigned>(size));
    for (char& c : bytes_) c = static_cast<char>(random());
    EXPECT_EQ(pwrite(fd_, bytes_.data(), size, 0), static_cast<ssize_t>(size));
  }
  ~File() { close(fd_); }
  int fd() const { return fd_; }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
  int fd_;
};

wire::SocketName fresh_name() {
  static std::atomic<uint64_t> nonce{0};
  return wire::lane_name(static_cast<uint64_t>(getpid()) << 32 | nonce++, 0);
}

bool lay_lane(const Pair& pair) {
  const wire::SocketName name = fresh_name();
  if (!pair.a->tx_offer_lane(name)) return false;
  pair.b->rx_join_lane(name);
  return true;
}

class PageLane : public testing::Test {
 protected:
  PageLane() : pair_(make_shm_pair(kRing)), a_(*pair_.a), b_(*pair_.b) {}
  void give_lane() {
    ASSERT_TRUE(lay_lane(pair_));
  }
  std::string read_string(size_t most) {
    std::string s(most, '\0');
    s.resize(read(b_, s.data(), most));
    return s;
  }
  Pair pair_;
  Channel& a_;
  Channel& b_;
  File file_{3 * kRing};
};

TEST_F(PageLane, PassesNothingBeforeThePeerHasIt) {
  EXPECT_EQ(a_.tx_pass(file_.fd(), 0, kRing), 0u);
  const wire::SocketName name = fresh_name();
  ASSERT_TRUE(a_.tx_offer_lane(name));
  EXPECT_TRUE(a_.tx_offer_lane(name)) << "once more, for a peer that has not heard";
  EXPECT_EQ(a_.tx_pass(file_.fd(), 0, kRing), 0u);
  b_.rx_join_lane(fresh_name());
  EXPECT_EQ(a_.tx_pass(file_.fd(), 0, kRing), 0u);
  b_.rx_join_lane(name);
  EXPECT_EQ(a_.tx_pass(file_.fd(), 0, kLeast - 1), 0u);
  EXPECT_EQ(a_.tx_pass(file_.fd(), 0, kLeast), kLeast);
  EXPECT_EQ(read_string(kRing), file_.bytes().substr(0, kLeast));
}

/// Another process connects first: it gets nothing, and nor does anybody else.
TEST_F(PageLane, AStrangerGetsNoPages) {
  const wire::SocketName name = fresh_name();
  ASSERT_TRUE(a_.tx_offer_lane(name));
  int ready[2];
  int over[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(over), 0);
  const pid_t stranger = fork();
  if (stranger == 0) {
    const int lane = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address;
    const socklen_t len = wire::to_sockaddr(name, &address);
    char byte = connect(lane, reinterpret_cast<sockaddr*>(&address), len) == 0 ? 'y' : 'n';
    (void)!::write(ready[1], &byte, 1);
    close(over[1]);
    (void)!::read(over[0], &byte, 1);
    _exit(recv(lane, &byte, 1, MSG_DONTWAIT) > 0 ? 1 : 0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ASSERT_EQ(byte, 'y');
  b_.rx_join_lane(name);  // second in the queue
  EXPECT_EQ(a_.tx_pass(file_.fd(), 0, kRing), 0u);
  EXPECT_EQ(a_.tx_pass(file_.fd(), 0, kRing), 0u);
  close(over[1]);
  int status = 0;
  ASSERT_EQ(waitpid(stranger, &status, 0), stranger);
  EXPECT_EQ(status, 0);
  for (const int fd : {ready[0], ready[1], over[0]}) close(fd);
}

TEST_F(PageLane, APeerThatIsGoneCostsNoSignal) {
  give_lane();
  ASSERT_GT(a_.tx_pass(file_.fd(), 0, kLeast), 0u);
  pair_.b.reset();
  EXPECT_EQ(a_.tx_pass(file_.fd(), 0, kLeast), 0u);  // SIGPIPE would end the test
  sigset_t pending;
  sigpending(&pending);
  EXPECT_FALSE(sigismember(&pending, SIGPIPE));
}

/// The kernel passes some 64 KiB at a time: a peer that goes in between costs a short count, and
/// the signal is there all the same.
TEST_F(PageLane, APeerThatGoesInTheMiddleCostsNoSignal) {
  for (int i = 0; i < 200; ++i) {
    Pair pair = make_shm_pair(kRing);
    ASSERT_TRUE(lay_lane(pair));
    std::atomic<bool> passing{false};
    std::thread peer([&] {
      while (!passing.load()) {
      }
      pair.b.reset();
    });
    passing = true;
    (void)pair.a->tx_pass(file_.fd(), 0, kRing);  // SIGPIPE would end the test
    peer.join();
  }
}

/// The streams that a random mix of everything gives are equal, many times around the ring.
TEST_F(PageLane, KeepsTheOrderOfWhatIsCopiedAndWhatIsPassed) {
  give_lane();
  std::mt19937 random(7);
  const auto below = [&](size_t n) { return random() % n; };
  std::string sent;
  size_t received = 0;
  uint64_t passed = 0;
  for (int round = 0; round < 3000; ++round) {
    if (below(2) == 0) {
      const size_t at = below(file_.bytes().size());
      const size_t want = below(3) == 0 ? below(200) : below(2 * kRing);
      const size_t n = a_.tx_pass(file_.fd(), static_cast<off_t>(at), want);
      ASSERT_LE(n, want);
      sent += file_.bytes().substr(at, n);
      passed += n;
    } else {
      std::string piece(1 + below(below(4) == 0 ? 100'000 : 300), static_cast<char>(round));
      if (below(2) == 0 && piece.size() <= Channel::kShort) {
        piece.resize(a_.tx_put(piece.data(), piece.size()));
      } else {
        piece.resize(write(a_, piece.data(), piece.size()));
      }
      sent += piece;
    }
    ASSERT_EQ(b_.rx_available(), sent.size() - received);
    for (size_t left = below(4); left > 0; --left) {
      const size_t most = 1 + below(below(2) == 0 ? 500 : 150'000);
      std::string got(most, '\0');
      switch (below(5)) {
        case 0:
          got.resize(read(b_, got.data(), most, true));
          ASSERT_EQ(got, sent.substr(received, got.size()));
          ASSERT_EQ(got.size(), std::min(most, sent.size() - received));
          got.clear();
          break;
        case 1: {
          const size_t n = b_.rx_discard(most);
          ASSERT_EQ(n, std::min(most, sent.size() - received));
          received += n;
          got.clear();
          break;
        }
        case 2:
          got.resize(std::min(most, Channel::kShort));
          got.resize(b_.rx_take(got.data(), got.size()));
          break;
        case 3: {  // in pieces, with a gap
          iovec iov[3] = {{got.data(), most / 3}, {nullptr, 0}, {got.data() + most / 3, 0}};
          iov[2].iov_len = most - most / 3;
          got.resize(b_.rx_read(iov, 3, 0, most, false));
          break;
        }
        default:
          got.resize(read(b_, got.data(), most));
      }
      ASSERT_EQ(got, sent.substr(received, got.size())) << round;
      received += got.size();
    }
  }
  ASSERT_EQ(read_string(kRing), sent.substr(received));
  EXPECT_GT(passed, uint64_t{20} * kRing);
  EXPECT_FALSE(a_.tx_failed() || b_.rx_failed());
}

TEST_F(PageLane, WhatIsFrozenIsReplayedFromTheFile) {
  for (const bool by_sender : {false, true}) {
    Pair pair = make_shm_pair(kRing);
    ASSERT_TRUE(lay_lane(pair));
    std::string sent(kRing - 100'000, 'a');  // so that the rest lies across the ring's edge
    ASSERT_EQ(write(*pair.a, sent.data(), sent.size()), sent.size());
    ASSERT_EQ(read(*pair.b, sent.data(), sent.size()), sent.size());
    sent.clear();
    for (const off_t at : {5'000, 70'001}) {
      ASSERT_EQ(pair.a->tx_pass(file_.fd(), at, kLeast + 11), kLeast + 11);
      ASSERT_EQ(write(*pair.a, "between", 7), 7u);
      sent += file_.bytes().substr(static_cast<size_t>(at), kLeast + 11) + "between";
    }
    std::string got(30'000, '\0');
    ASSERT_EQ(read(*pair.b, got.data(), got.size()), got.size());
    EXPECT_EQ(got, sent.substr(0, got.size()));
    const Turn turn = by_sender ? pair.a->tx_recall() : pair.b->rx_freeze();
    ASSERT_EQ(turn.kind, TurnKind::kFrozen);
    std::string left(sent.size() - got.size(), '\0');
    for (const size_t from : {size_t{0}, size_t{50'000}}) {  // a replay goes on where it stopped
      std::string rest(left.size() - from, '\0');
      ASSERT_EQ(ring::tx_copy_unread(*pair.a, turn.at + from, rest.data(), rest.size()),
                rest.size());
      EXPECT_EQ(rest, sent.substr(got.size() + from));
    }
    char more;
    EXPECT_EQ(read(*pair.b, &more, 1), 0u);
  }
}

TEST_F(PageLane, AReplayOfAFileThatWasCutFailsAndDoesNotInvent) {
  const test::FaultsRecovered faults;
  sigset_t bus;  // as in the keeper
  sigemptyset(&bus);
  sigaddset(&bus, SIGBUS);
  pthread_sigmask(SIG_BLOCK, &bus, nullptr);
  give_lane();
  ASSERT_EQ(a_.tx_pass(file_.fd(), 0, 2 * kLeast), 2 * kLeast);
  ASSERT_EQ(ftruncate(file_.fd(), static_cast<off_t>(kLeast)), 0);
  const Turn turn = b_.rx_freeze();
  ASSERT_EQ(turn.at, 0u);
  std::string bytes(2 * kLeast, '\0');
  EXPECT_EQ(ring::tx_copy_unread(a_, 0, bytes.data(), bytes.size()), 0u);
  sigset_t blocked;
  pthread_sigmask(SIG_UNBLOCK, &bus, &blocked);
  EXPECT_TRUE(sigismember(&blocked, SIGBUS));
}

TEST_F(PageLane, AFileThatIsCutAfterwardsIsReceivedAllTheSame) {
  give_lane();
  ASSERT_EQ(a_.tx_pass(file_.fd(), 0, 2 * kLeast), 2 * kLeast);
  ASSERT_EQ(ftruncate(file_.fd(), 0), 0);
  EXPECT_EQ(read_string(kRing), file_.bytes().substr(0, 2 * kLeast));
}

TEST_F(PageLane, TheEndOfAFileIsTheEnd) {
  give_lane();
  const auto size = static_cast<off_t>(file_.bytes().size());
  EXPECT_EQ(a_.tx_pass(file_.fd(), size - 1000, kRing), 0u) << "too little of it is left";
  EXPECT_EQ(a_.tx_pass(file_.fd(), size - 100'000, kRing), 100'000u);
  EXPECT_EQ(a_.tx_pass(file_.fd(), size, kRing), 0u);
  EXPECT_EQ(a_.tx_pass(file_.fd(), size + 5, kRing), 0u);
  EXPECT_EQ(read_string(kRing), file_.bytes().substr(file_.bytes().size() - 100'000));
}

TEST_F(PageLane, ABadAddressTakesNothing) {
  const test::FaultsRecovered faults;
  give_lane();
  ASSERT_EQ(a_.tx_pass(file_.fd(), 0, kLeast), kLeast);
  void* const none = mmap(nullptr, kLeast, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT_EQ(read(b_, none, kLeast), Channel::kFault) << "into the program's memory";
  EXPECT_EQ(read(b_, none, 100), Channel::kFault) << "by way of the ring";
  EXPECT_EQ(read(b_, none, kLeast), Channel::kFault);
  EXPECT_EQ(read_string(kRing), file_.bytes().substr(0, kLeast));
  munmap(none, kLeast);
}

TEST_F(PageLane, LeavesNoMoreUnreadThanItHolds) {
  EXPECT_EQ(a_.tx_window(), kRing);
  Pair pair = make_shm_pair(4 << 20);
  ASSERT_TRUE(lay_lane(pair));
  ASSERT_GT(pair.a->tx_pass(file_.fd(), 0, kRing), 0u);
  EXPECT_LT(pair.a->tx_window(), pair.a->capacity());
}

TEST_F(PageLane, GivesItsDescriptorsAndMappingsBack) {
  const auto count = [] {
    size_t n = 0;
    for (int fd = 0; fd < 70'000; ++fd) n += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
    return n;
  };
  const size_t before = count();
  {
    Pair pair = make_shm_pair(kRing);
    ASSERT_TRUE(lay_lane(pair));
    ASSERT_GT(pair.a->tx_pass(file_.fd(), 0, kRing), 0u);
  }
  EXPECT_EQ(count(), before);
}

// --- a peer that breaks the rules ---------------------------------------------------------------

struct Hostile : testing::Test {
  Hostile() {
    auto created = create_segment(kRing);
    auto adopted = adopt_segment(created->memfd.get(), kRing);
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    channel = make_shm_channel(std::move(created->segment), os::OwnedFd(fds[0]), true);
    doorbell = os::OwnedFd(fds[1]);
    peer = std::make_unique<ShmSegment>(std::move(*adopted));
    const wire::SocketName name = fresh_name();
    sockaddr_un address;
    const socklen_t len = wire::to_sockaddr(name, &address);
    const os::OwnedFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), len), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    channel->rx_join_lane(name);
    lane = os::OwnedFd(accept(listener.get(), nullptr, nullptr));
  }
  void span(size_t slot, uint64_t begin, uint64_t end) {
    peer->page().span[1][slot].begin.store(begin);
    peer->page().span[1][slot].end.store(end);
  }
  wire::DirectionWords& words() { return peer->page().direction[1]; }
  /// Nothing that was not sent, and never a wait.
  void expect_failure() {
    std::string bytes(kRing, '\0');
    (void)read(*channel, bytes.data(), bytes.size());
    EXPECT_EQ(read(*channel, bytes.data(), bytes.size()), 0u);
    EXPECT_TRUE(channel->rx_failed());
  }

  std::unique_ptr<Channel> channel;
  std::unique_ptr<ShmSegment> peer;
  os::OwnedFd doorbell;
  os::OwnedFd lane;
};
using PageLaneHostile = Hostile;

TEST_F(PageLaneHostile, ASpanWithNothingInTheLane) {
  span(0, 0, 100);
  words().spans.store(1);
  words().tail.store(100);
  expect_failure();
}

TEST_F(PageLaneHostile, LessInTheLaneThanWasSaid) {
  ASSERT_EQ(::write(lane.get(), "four", 4), 4);
  span(0, 0, 100);
  words().spans.store(1);
  words().tail.store(100);
  char all[100];
  EXPECT_EQ(read(*channel, all, sizeof(all), true), 0u);
  EXPECT_TRUE(channel->rx_failed());
}

TEST_F(PageLaneHostile, ASpanThatEndsBeforeItBegins) {
  ASSERT_EQ(::write(lane.get(), "four", 4), 4);
  span(0, 4, 0);
  words().spans.store(1);
  words().tail.store(100);
  expect_failure();
}

TEST_F(PageLaneHostile, ASpanLongerThanTheRing) {
  span(0, 0, kRing + 1);
  words().spans.store(1);
  words().tail.store(kRing);
  expect_failure();
}

TEST_F(PageLaneHostile, SpansThatOverlap) {
  ASSERT_EQ(::write(lane.get(), "fourfour", 8), 8);
  span(0, 0, 4);
  span(1, 2, 6);
  words().spans.store(2);
  words().tail.store(6);
  expect_failure();
}

TEST_F(PageLaneHostile, MoreSpansThanThereAreSlots) {
  words().spans.store(wire::kPageSpans + 1);
  words().tail.store(6);
  expect_failure();
}

TEST_F(PageLaneHostile, AnEmptySpanAtTheEndOfTheCount) {
  span(0, UINT64_MAX, UINT64_MAX);
  words().spans.store(1);
  words().tail.store(6);
  expect_failure();
}

TEST_F(PageLaneHostile, SpansWithoutALane) {
  auto created = create_segment(kRing);
  auto adopted = adopt_segment(created->memfd.get(), kRing);
  int fds[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  const auto without = make_shm_channel(std::move(created->segment), os::OwnedFd(fds[0]), true);
  adopted->page().span[1][0].end.store(4);
  adopted->page().direction[1].spans.store(1);
  adopted->page().direction[1].tail.store(4);
  char all[4];
  EXPECT_EQ(read(*without, all, sizeof(all)), 0u);
  EXPECT_TRUE(without->rx_failed());
  close(fds[1]);
}

}  // namespace
}  // namespace rsock::transport
