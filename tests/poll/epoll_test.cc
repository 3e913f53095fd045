// epoll with streams in it: several threads in one instance, edges, ONESHOT, time-outs.

#include <thread>

#include "core/base/clock.h"
#include "core/poll/readiness_ops.h"
#include "core/stream/hand_over.h"
#include "tests/poll/door.h"
#include "tests/poll/epoll.h"

namespace rsock {
namespace {

using namespace rsock::testing;

/// Two threads in one instance. Each takes one event, one byte, and is busy from then on: what
/// comes next is the other's.
void two_workers(Epoll& epoll, const Connection& c) {
  std::atomic<int> took{0};
  std::atomic<bool> over{false};
  auto work = [&] {
    for (;;) {
      epoll_event events[4];
      const long n = epoll.wait(events, 4, 20'000);
      ASSERT_GT(n, 0);
      char byte;
      if (do_recv(c.right, &byte, 1, MSG_DONTWAIT) != 1) continue;
      ++took;
      EXPECT_TRUE(eventually([&] { return over.load(); }));
      return;
    }
  };
  std::thread one(work);
  std::thread two(work);
  EXPECT_TRUE(eventually([&] { return epoll.instance().sleepers.load() == 2; }));
  nap_us(5'000);
  EXPECT_EQ(do_send(c.left, "a", 1), 1);
  EXPECT_TRUE(eventually([&] { return took.load() == 1; }));
  nap_us(20'000);  // the other sleeps again
  EXPECT_EQ(do_send(c.left, "a", 1), 1);
  EXPECT_TRUE(eventually([&] { return took.load() == 2; }, 6'000)) << "slept on";
  over = true;
  one.join();
  two.join();
}

TEST_P(EpollStreams, WhileOneThreadIsBusyTheNextBytesWakeTheOther) {
  for (const uint32_t how : {0u, static_cast<uint32_t>(EPOLLET)}) {
    Epoll epoll;
    Connection c = Connection::make();
    ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN | how), 0);
    ASSERT_TRUE(ping_until_lifted(c));
    two_workers(epoll, c);
  }
}

std::atomic<int> doorbell_rings{0};
long count_rings(long nr, long a, long b, long c, long d, long e, long f) noexcept {
  if (nr == SYS_sendto && c == 1) doorbell_rings.fetch_add(1);  // a ring is one byte
  return raw_syscall(nr, a, b, c, d, e, f);
}

/// A thread that finds something in each wait looks at what was busy lately by itself: its peers
/// need not ring. One that sleeps is rung for.
TEST_P(EpollStreams, ABusyThreadIsNotRungFor) {
  Epoll epoll;
  Connection c = Connection::make();
  Connection d = Connection::make();
  for (const Connection* each : {&c, &d}) {
    ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, each->right, EPOLLIN), 0);
    ASSERT_TRUE(ping_until_lifted(*each));
  }
  char byte;
  const auto serve = [&](const Connection& from) {
    ASSERT_EQ(do_send(from.left, "a", 1), 1);
    ASSERT_EQ(epoll.wait_for(from.right, 10'000), EPOLLIN);
    ASSERT_EQ(do_recv(from.right, &byte, 1), 1);
  };
  for (int i = 0; i < 3; ++i) serve(c), serve(d);
  const OtherDoor counting(&count_rings);
  doorbell_rings = 0;
  for (int i = 0; i < 10; ++i) serve(c), serve(d);
  EXPECT_EQ(doorbell_rings.load(), 0);
  for (int i = 0; i < 110; ++i) serve(c);  // d cools down
  serve(d);
  EXPECT_EQ(doorbell_rings.load(), 1);
  EXPECT_EQ(epoll.wait_for(c.right, 20), 0u);  // it has slept, and is awake again
  serve(c);
  serve(d);
  EXPECT_EQ(doorbell_rings.load(), 1);
}

/// Of all that a thread armed to sleep only the first one's peer has to ring.
TEST_P(EpollStreams, OneRingWakesAndTheOthersAreSaved) {
  Epoll epoll;
  std::vector<Connection> all;
  char byte;
  for (int i = 0; i < 10; ++i) {
    all.push_back(Connection::make());
    ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, all.back().right, EPOLLIN), 0);
    ASSERT_TRUE(ping_until_lifted(all.back()));
  }
  const OtherDoor counting(&count_rings);
  for (int round = 0; round < 3; ++round) {
    doorbell_rings = 0;
    std::thread sleeper([&] {
      epoll_event events[16];
      EXPECT_EQ(epoll.wait(events, 16, 20'000), 1);
    });
    EXPECT_TRUE(eventually([&] { return epoll.instance().sleepers.load() == 1; }));
    nap_us(2'000);
    for (Connection& c : all) {
      ASSERT_EQ(do_send(c.left, "a", 1), 1);
      if (&c == &all.front()) sleeper.join();
    }
    for (Connection& c : all) ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
    EXPECT_TRUE(round == 0 || doorbell_rings.load() == 1) << doorbell_rings.load();
  }
}

/// Another sleeper of the same stream keeps its arming.
TEST_P(EpollStreams, ASleeperInPollIsRungForAlthoughAnInstanceIsAwake) {
  Epoll epoll;
  Connection c = Connection::make();
  Connection d = Connection::make();
  for (const Connection* each : {&c, &d}) {
    ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, each->right, EPOLLIN), 0);
    ASSERT_TRUE(ping_until_lifted(*each));
  }
  std::atomic<bool> over{false};
  std::atomic<int> heard{0};
  std::thread sleeper([&] {
    char byte;
    while (!over.load()) {
      pollfd p{d.right, POLLIN, 0};
      const timespec limit{20, 0};
      const long n = poll::poll(&p, 1, &limit, nullptr,
                                [&]() -> long { return ask_kernel(SYS_poll, &p, 1, 20'000); });
      ASSERT_EQ(n, 1) << "slept on";
      if (do_recv(d.right, &byte, 1, MSG_DONTWAIT) == 1) ++heard;
    }
  });
  for (int i = 1; i <= 200; ++i) {
    // Awake for c, which disarms what was armed for the sleep before.
    ASSERT_EQ(do_send(c.left, "a", 1), 1);
    epoll_event events[4];
    ASSERT_GT(epoll.wait(events, 4, 10'000), 0);
    char byte;
    ASSERT_EQ(do_recv(c.right, &byte, 1, MSG_DONTWAIT), 1);
    (void)epoll.wait(events, 4, i % 2);
    if (i == 200) over = true;
    ASSERT_EQ(do_send(d.left, "a", 1), 1);
    ASSERT_TRUE(eventually([&] { return heard.load() == i; })) << i;
  }
  sleeper.join();
}

/// The usual reactor with workers: one thread waits, another modifies. Nobody was refused, so only
/// the MOD asks for the edge.
TEST_P(EpollStreams, RoomAfterAModIsAnEdgeForTheThreadThatSleeps) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLIN | EPOLLET), 0);
  ASSERT_TRUE(ping_until_lifted(c));
  epoll_event events[4];
  (void)epoll.wait(events, 4, 0);
  std::atomic<uint32_t> heard{0};
  std::thread sleeper([&] { heard = epoll.wait_for(c.left, 20'000); });
  EXPECT_TRUE(eventually([&] { return epoll.instance().sleepers.load() == 1; }));
  nap_us(5'000);
  // Of 64 KiB: less than a third stays free.
  const std::string much(50'000, 'x');
  ASSERT_EQ(do_send(c.left, much.data(), much.size()), static_cast<long>(much.size()));
  ASSERT_EQ(epoll.control(EPOLL_CTL_MOD, c.left, EPOLLOUT | EPOLLET), 0);
  nap_us(5'000);
  std::string in(much.size(), '\0');
  ASSERT_EQ(do_recv(c.right, in.data(), in.size(), MSG_WAITALL), static_cast<long>(in.size()));
  EXPECT_TRUE(eventually([&] { return heard.load() != 0; }, 6'000)) << "slept on";
  sleeper.join();
  EXPECT_EQ(heard & EPOLLOUT, static_cast<uint32_t>(EPOLLOUT));
}

/// What is kept under a number goes with the number: the next file there is another one.
TEST_P(EpollStreams, AParkedEntryDoesNotOutliveItsNumber) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const int name = ::dup(c.right);
  stream::on_dup(c.right, name);
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, name, EPOLLIN), 0);
  ASSERT_EQ(epoll.control(EPOLL_CTL_DEL, name, 0u), 0);
  close_fd(name);
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  if (ends[0] != name) {
    ASSERT_EQ(::dup3(ends[0], name, O_CLOEXEC), name);
    ::close(ends[0]);
  }
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, name, EPOLLIN), 0);
  ASSERT_TRUE(stream::set_down_and_wait(*FdTable::stream(c.right), "test"));
  ASSERT_EQ(::write(ends[1], "x", 1), 1);
  EXPECT_EQ(epoll.wait_for(name, 5'000), static_cast<uint32_t>(EPOLLIN));
  ::close(name);
  ::close(ends[1]);
}

/// Added and deleted around each wait, as some programs do.
TEST_P(EpollStreams, AStreamThatIsDeletedAndAddedAgainIsTheSameToTheProgram) {
  Epoll epoll;
  Epoll other;
  Connection c = Connection::make();
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN), 0);
  ASSERT_TRUE(ping_until_lifted(c));
  char byte;
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(do_send(c.left, "a", 1), 1);
    ASSERT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
    ASSERT_EQ(epoll.control(EPOLL_CTL_DEL, c.right, 0u), 0);
    EXPECT_EQ(epoll.control(EPOLL_CTL_DEL, c.right, 0u), -ENOENT);
    EXPECT_EQ(epoll.control(EPOLL_CTL_MOD, c.right, EPOLLIN), -ENOENT);
    EXPECT_EQ(epoll.wait_for(c.right, 5), 0u) << "it is not in there";
    ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLOUT), 0);
    EXPECT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLOUT), -EEXIST);
    EXPECT_EQ(epoll.wait_for(c.right, 10'000), EPOLLOUT);
    ASSERT_EQ(epoll.control(EPOLL_CTL_MOD, c.right, EPOLLIN), 0);
    EXPECT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
    ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
  }
  // To another instance, and back.
  ASSERT_EQ(epoll.control(EPOLL_CTL_DEL, c.right, 0u), 0);
  ASSERT_EQ(other.control(EPOLL_CTL_ADD, c.right, EPOLLIN), 0);
  EXPECT_EQ(FdTable::stream(c.right)->watching.load(), 1);
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  EXPECT_EQ(other.wait_for(c.right, 10'000), EPOLLIN);
  EXPECT_EQ(epoll.wait_for(c.right, 5), 0u);
  ASSERT_EQ(other.control(EPOLL_CTL_DEL, c.right, 0u), 0);
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN | EPOLLET), 0);
  EXPECT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
  // Deleted while it is lifted, on TCP afterwards: the kernel must not have it any more.
  ASSERT_EQ(epoll.control(EPOLL_CTL_DEL, c.right, 0u), 0);
  ASSERT_TRUE(stream::set_down_and_wait(*FdTable::stream(c.right), "test"));
  EXPECT_EQ(FdTable::stream(c.right)->watching.load(), 0);
  EXPECT_EQ(epoll.wait_for(c.right, 5), 0u);
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN), 0);
  EXPECT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
}

/// A thread serves the connection, alone because ONESHOT says so, when the channel comes.
TEST_P(EpollStreams, AOneshotThatWasSpentOnTcpStaysSpentThroughTheLift) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN | EPOLLONESHOT), 0);
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  ASSERT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
  char byte;
  ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  EXPECT_EQ(epoll.wait_for(c.right, 20), 0u);
  ASSERT_EQ(epoll.control(EPOLL_CTL_MOD, c.right, EPOLLIN | EPOLLONESHOT), 0);
  EXPECT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
  EXPECT_EQ(epoll.wait_for(c.right, 0), 0u);
}

TEST_P(EpollStreams, AOneshotThatIsNotSpentIsReportedAfterTheSetDown) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN | EPOLLONESHOT), 0);
  ASSERT_TRUE(stream::set_down_and_wait(*FdTable::stream(c.right), "test"));
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  EXPECT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
  EXPECT_EQ(epoll.wait_for(c.right, 5), 0u);
  ASSERT_EQ(epoll.control(EPOLL_CTL_MOD, c.right, EPOLLIN | EPOLLONESHOT), 0);
  EXPECT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
}

TEST_P(EpollStreams, AOneshotThatIsSpentSaysNothingOfAHangUpAfterTheSetDown) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN | EPOLLONESHOT), 0);
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  ASSERT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
  ASSERT_TRUE(stream::set_down_and_wait(*FdTable::stream(c.right), "test"));
  ASSERT_EQ(do_shutdown(c.left, SHUT_RDWR), 0);
  ASSERT_EQ(do_shutdown(c.right, SHUT_RDWR), 0);
  EXPECT_EQ(epoll.wait_for(c.right, 20), 0u);
  ASSERT_EQ(epoll.control(EPOLL_CTL_MOD, c.right, EPOLLIN | EPOLLONESHOT), 0);
  EXPECT_NE(epoll.wait_for(c.right, 10'000) & EPOLLHUP, 0u);
}

/// The peer's half is over, so the kernel carries it; ours goes on in the ring.
TEST_P(EpollStreams, AnEdgeOfTheKernelsDirectionIsReportedOnce) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN | EPOLLRDHUP | EPOLLET), 0);
  ASSERT_EQ(do_shutdown(c.left, SHUT_WR), 0);
  EXPECT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN | EPOLLRDHUP);
  int reports = 0;
  for (int i = 0; i < 100; ++i) reports += epoll.wait_for(c.right, 1) != 0 ? 1 : 0;
  EXPECT_LT(reports, 4) << "the keeper's looks may be told of";
  EXPECT_TRUE(sends_in_ring(*FdTable::stream(c.right)));
}

/// Bytes that came by TCP before the switch, and a reader that takes its time.
TEST_P(EpollStreams, AnEdgeForBytesBeforeTheSwitchIsReportedOnce) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN | EPOLLET), 0);
  char byte;
  ASSERT_TRUE(eventually([&] {  // the peer lifts what it sends; of ours some bytes stay unread
    return do_send(c.left, "xx", 2) == 2 && do_recv(c.right, &byte, 1) == 1 &&
           do_send(c.right, "x", 1) == 1 && do_recv(c.left, &byte, 1) == 1 &&
           sends_in_ring(*FdTable::stream(c.left));
  }));
  int reports = 0;
  for (int i = 0; i < 100; ++i) reports += epoll.wait_for(c.right, 1) != 0 ? 1 : 0;
  EXPECT_LT(reports, 5);
  std::string rest(1 << 16, 'x');
  while (do_recv(c.right, rest.data(), rest.size(), MSG_DONTWAIT) > 0) {
  }
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  EXPECT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
}

/// A sender that TCP told to wait, and that is in the ring when there is room again.
TEST_P(EpollStreams, RoomIsAnEdgeForWhoWasToldToWaitBeforeTheLift) {
  Epoll epoll;
  Connection c = Connection::make();
  std::string bytes(1 << 20, 'x');
  while (do_send(c.left, bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
  }
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLOUT | EPOLLET), 0);
  ASSERT_EQ(do_recv(c.right, bytes.data(), 1), 1);
  std::thread waiter([&] { EXPECT_EQ(epoll.wait_for(c.left, 20'000), EPOLLOUT); });
  std::atomic<bool> over{false};
  std::thread reader([&] {
    EXPECT_TRUE(eventually([&] { return has_channel(c.right); }));
    nap_us(20'000);
    while (!over) (void)do_recv(c.right, bytes.data(), bytes.size(), MSG_DONTWAIT);
  });
  waiter.join();
  over = true;
  reader.join();
}

TEST_P(EpollStreams, ALiftDuringTheWaitDoesNotProlongIt) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLPRI), 0);
  const uint64_t begin = monotonic_ns();
  uint64_t lifted = 0;
  std::thread peer([&] {
    nap_us(300'000);
    ASSERT_TRUE(ping_until_lifted(c));
    lifted = monotonic_ns();
  });
  EXPECT_EQ(epoll.wait_for(c.right, 400), 0u);
  const uint64_t waited = monotonic_ns() - begin;
  peer.join();
  EXPECT_GE(waited, 400'000'000u);
  EXPECT_LT(waited, lifted - begin + 395'000'000u);
}

std::atomic<bool> no_doorbells;

long no_descriptors(long nr, long a, long b, long c, long d, long e, long f) noexcept {
  if (nr == SYS_eventfd2) return -EMFILE;
  const auto* event = reinterpret_cast<const epoll_event*>(d);
  const bool doorbell =
      nr == SYS_epoll_ctl && b == EPOLL_CTL_ADD &&
      poll::EventData::parse(event->data.u64).tag == poll::EventData::Tag::kDoorbell;
  return doorbell && no_doorbells ? -ENOSPC : raw_syscall(nr, a, b, c, d, e, f);
}

TEST_P(EpollStreams, WithoutADescriptorOrAWatchNewsAreLateButNotLost) {
  for (const bool deaf : {false, true}) {
    Epoll epoll;
    Connection c = Connection::make();
    ASSERT_TRUE(ping_until_lifted(c));
    no_doorbells = deaf;
    const OtherDoor door(&no_descriptors);
    ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN | EPOLLRDHUP), 0);
    std::thread peer([&] {
      nap_us(20'000);
      ASSERT_EQ(do_send(c.left, "a", 1), 1);
    });
    EXPECT_EQ(epoll.wait_for(c.right, 10'000), EPOLLIN);
    peer.join();
    char byte;
    ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
    peer = std::thread([&] {  // news of this process only
      nap_us(20'000);
      ASSERT_EQ(do_shutdown(c.right, SHUT_RD), 0);
    });
    EXPECT_NE(epoll.wait_for(c.right, 10'000), 0u);
    peer.join();
  }
}

RSOCK_WITH_AND_WITHOUT_SPINNING(EpollStreams);

}  // namespace
}  // namespace rsock
