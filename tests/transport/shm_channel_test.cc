// What is particular to shared memory: another process, and words that it may write as it likes.

#include "core/transport/shm/shm_channel.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/ring/copy_unread.h"
#include "tests/transport/pairs.h"

namespace rsock::transport {
namespace {

// --- hostile words
// ----------------------------------------------------------------------------------

/// A channel and, beside it, the peer's own hand on the shared memory.
struct Hostile {
  explicit Hostile() {
    auto created = create_segment(kTestCapacity);
    auto adopted = adopt_segment(created->memfd.get(), kTestCapacity);
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    channel = make_shm_channel(std::move(created->segment), os::OwnedFd(fds[0]), true);
    doorbell = os::OwnedFd(fds[1]);
    peer = std::make_unique<ShmSegment>(std::move(*adopted));
  }
  wire::DirectionWords& tx() { return peer->page().direction[0]; }  // what the channel sends
  wire::DirectionWords& rx() { return peer->page().direction[1]; }

  std::unique_ptr<Channel> channel;
  std::unique_ptr<ShmSegment> peer;
  os::OwnedFd doorbell;
};

TEST(ShmChannelHostile, ATailBeyondTheCapacityFailsTheDirection) {
  Hostile h;
  h.rx().tail.store(kTestCapacity + 1);
  char c[64];
  EXPECT_EQ(read(*h.channel, c, sizeof(c)), 0u);
  EXPECT_TRUE(h.channel->rx_failed());
  EXPECT_FALSE(h.channel->tx_failed());
}

TEST(ShmChannelHostile, ATailThatMovesBackwardsFailsTheDirection) {
  Hostile h;
  h.rx().tail.store(100);
  EXPECT_EQ(h.channel->rx_available(), 100u);
  h.rx().tail.store(99);
  EXPECT_EQ(h.channel->rx_available(), 0u);
  EXPECT_TRUE(h.channel->rx_failed());
}

TEST(ShmChannelHostile, AHeadBeyondTheTailFailsTheDirection) {
  Hostile h;
  write(*h.channel, "abc", 3);
  h.tx().head.store(4);
  EXPECT_EQ(h.channel->tx_room(), 0u);
  EXPECT_TRUE(h.channel->tx_failed());
  EXPECT_EQ(write(*h.channel, "x", 1), 0u);
}

TEST(ShmChannelHostile, OurOwnWordsAreNotBelievedWhenThePeerRewritesThem) {
  Hostile h;
  write(*h.channel, "abc", 3);
  h.tx().tail.store(0);
  EXPECT_EQ(h.channel->tx_tail(), 3u);
  h.rx().tail.store(10);
  h.rx().head.store(5);  // ours
  char c[8];
  EXPECT_EQ(read(*h.channel, c, 8), 0u);
  EXPECT_TRUE(h.channel->rx_failed());
}

TEST(ShmChannelHostile, AFreezeOutsideTheRingIsReportedAndCopiesNothing) {
  Hostile h;
  write(*h.channel, "abc", 3);
  h.tx().head.store(wire::kHeadSealed | 1000);
  const Turn turn = h.channel->tx_turn();
  EXPECT_EQ(turn.kind, TurnKind::kFrozen);
  EXPECT_EQ(turn.at, 1000u);
  char c;
  EXPECT_EQ(ring::tx_copy_unread(*h.channel, turn.at, &c, 1), 0u);
}

TEST(ShmChannelHostile, TheRingSizeInThePageIsNotReadAgain) {
  Hostile h;
  h.peer->page().ring_size = 1 << 30;
  EXPECT_EQ(h.channel->capacity(), kTestCapacity);
}

TEST(ShmChannelHostile, AFloodOfRingsDoesNotHoldTheDrain) {
  Hostile h;
  const std::string rings(100'000, 'r');
  (void)send(h.doorbell.get(), rings.data(), rings.size(), MSG_DONTWAIT);
  h.channel->drain_wait_fd();  // returns
  pollfd p{h.channel->wait_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&p, 1, 0), 1);
}

TEST(ShmChannelHostile, RandomWordsNeverLeadOutOfTheRing) {
  std::mt19937_64 random(5);
  std::vector<char> buffer(kTestCapacity + 100);
  for (int round = 0; round < 20'000; ++round) {
    if (round % 100 == 0) SCOPED_TRACE(round);
    static std::unique_ptr<Hostile> h;
    if (round % 50 == 0) h = std::make_unique<Hostile>();
    const uint64_t near = h->channel->tx_tail() + random() % 9 - 4;
    const uint64_t values[] = {
        random(),  near, near + kTestCapacity, near | wire::kHeadEnded, near | wire::kHeadSealed, 0,
        UINT64_MAX};
    std::atomic<uint64_t>* words[] = {&h->rx().tail, &h->rx().head, &h->tx().tail, &h->tx().head};
    words[random() % 4]->store(values[random() % 7]);
    const size_t n = random() % buffer.size();
    EXPECT_LE(write(*h->channel, buffer.data(), n), n);
    EXPECT_LE(read(*h->channel, buffer.data(), n, random() % 2 != 0), n);
    EXPECT_LE(h->channel->rx_available(), kTestCapacity);
    EXPECT_LE(h->channel->tx_room(), kTestCapacity);
    if (random() % 30 == 0) (void)h->channel->rx_freeze();
    if (random() % 30 == 0) (void)h->channel->tx_recall();
    if (round % 50 == 49) h.reset();
  }
}

// --- a full doorbell
// --------------------------------------------------------------------------------

TEST(ShmChannel, ADoorbellThatIsFullHasRung) {
  Pair pair = make_shm_pair();
  for (int i = 0; i < 10'000; ++i) pair.a->wake_peer();  // never blocks
  pollfd p{pair.b->wait_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&p, 1, 0), 1);
  for (int i = 0; i < 100; ++i) pair.b->drain_wait_fd();
  EXPECT_EQ(poll(&p, 1, 0), 0);
}

// --- two processes
// ----------------------------------------------------------------------------------

constexpr timespec kLong{10, 0};

/// Runs `child` with the callee's end in another process. Returns its exit status after `parent`.
int with_process(const std::function<int(Channel&)>& child,
                 const std::function<void(Channel&, pid_t)>& parent) {
  auto created = create_segment(kTestCapacity);
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(fds[0]);
    auto adopted = adopt_segment(created->memfd.get(), kTestCapacity);
    if (!adopted) _exit(99);
    auto channel = make_shm_channel(std::move(*adopted), os::OwnedFd(fds[1]), false);
    _exit(child(*channel));
  }
  close(fds[1]);
  created->memfd.reset();
  auto channel = make_shm_channel(std::move(created->segment), os::OwnedFd(fds[0]), true);
  parent(*channel, pid);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

/// Reads at least one byte, sleeping on the futex. 0: a wake-up was lost.
size_t read_sleeping(Channel& c, void* p, size_t n) {
  for (;;) {
    const uint32_t bell = c.rx_bell();
    c.rx_arm(Sleep::kFutex);
    if (const size_t m = read(c, p, n); m != 0) return m;
    if (!c.rx_sleep(bell, &kLong)) return 0;
  }
}

bool write_sleeping(Channel& c, const uint8_t* p, size_t n) {
  size_t done = 0;
  for (;;) {
    const uint32_t bell = c.tx_bell();
    c.tx_arm(Sleep::kFutex);
    done += write(c, p + done, n - done);
    if (done == n) return true;
    if (!c.tx_sleep(bell, &kLong)) return false;
  }
}

TEST(ShmChannelProcesses, EchoesAStreamWhileBothSidesSleep) {
  constexpr uint64_t kTotal = 3'000'000;
  const int status = with_process(
      [](Channel& c) {
        std::vector<uint8_t> buffer(30'000);
        for (uint64_t done = 0; done < kTotal;) {
          const size_t n = read_sleeping(c, buffer.data(), buffer.size());
          if (n == 0) return 1;
          for (size_t i = 0; i < n; ++i) buffer[i] ^= 0xff;
          if (!write_sleeping(c, buffer.data(), n)) return 2;
          done += n;
        }
        return 0;
      },
      [](Channel& c, pid_t) {
        std::mt19937 random(9);
        std::vector<uint8_t> out(20'000);
        std::vector<uint8_t> in(20'000);
        for (uint64_t done = 0; done < kTotal;) {
          const size_t n = std::min<uint64_t>(1 + random() % out.size(), kTotal - done);
          for (size_t i = 0; i < n; ++i) out[i] = byte_at(done + i);
          ASSERT_TRUE(write_sleeping(c, out.data(), n));
          for (size_t got = 0; got < n;) {
            const size_t m = read_sleeping(c, in.data() + got, n - got);
            ASSERT_NE(m, 0u);
            got += m;
          }
          for (size_t i = 0; i < n; ++i) ASSERT_EQ(in[i] ^ 0xff, out[i]);
          done += n;
        }
      });
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(ShmChannelProcesses, AKilledPeerHangsUpAndItsBytesStay) {
  const int status = with_process(
      [](Channel& c) {
        write(c, "before the end", 14);
        c.wake_peer();
        pause();
        return 0;
      },
      [](Channel& c, pid_t pid) {
        char buffer[64];
        pollfd p{c.wait_fd(), POLLIN, 0};
        ASSERT_EQ(poll(&p, 1, 10'000), 1);
        kill(pid, SIGKILL);
        // POLLHUP comes with the death; the ring is ours to read as long as we hold it.
        for (int i = 0; i < 1000 && !(p.revents & POLLHUP); ++i) {
          c.drain_wait_fd();
          ASSERT_EQ(poll(&p, 1, 10'000), 1);
        }
        EXPECT_TRUE(p.revents & POLLHUP);
        EXPECT_EQ(read(c, buffer, sizeof(buffer)), 14u);
      });
  EXPECT_TRUE(WIFSIGNALED(status));
}

}  // namespace
}  // namespace rsock::transport
