// epoll with streams in it: registrations that are older than the stream, several threads in one
// instance, edges, ONESHOT, and what other threads may see meanwhile.

#include <thread>

#include "core/base/clock.h"
#include "core/os/os.h"
#include "core/poll/instance.h"
#include "tests/stream/loopback.h"

namespace rsock {
namespace {

using namespace rsock::testing;

/// An epoll instance and the program's calls on it, as preload/ makes them.
class Epoll {
 public:
  Epoll() : fd_(::epoll_create1(EPOLL_CLOEXEC)) { poll::on_epoll_create(fd_); }
  ~Epoll() { close_fd(fd_); }
  Epoll(const Epoll&) = delete;
  Epoll& operator=(const Epoll&) = delete;

  int fd() const { return fd_; }
  poll::Instance& instance() const { return *poll::instance_of(fd_); }

  long control(int op, int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = kData + static_cast<uint64_t>(fd);
    return control(op, fd, &event);
  }
  long control(int op, int fd, epoll_event* event) {
    return poll::epoll_ctl(fd_, op, fd, event,
                           [&]() -> long { return ask_kernel(SYS_epoll_ctl, fd_, op, fd, event); });
  }
  long wait(epoll_event* events, int max, int timeout_ms) {
    const timespec limit{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
    return poll::epoll_wait(
        fd_, events, max, timeout_ms < 0 ? nullptr : &limit, nullptr,
        [&]() -> long { return ask_kernel(SYS_epoll_pwait, fd_, events, max, timeout_ms, 0, 8); });
  }
  /// The events of the one descriptor that is ready, 0 for none, ~0 for any other answer.
  uint32_t wait_for(int fd, int timeout_ms) {
    epoll_event events[4] = {};
    const long n = wait(events, 4, timeout_ms);
    if (n == 0) return 0;
    return n == 1 && events[0].data.u64 == kData + static_cast<uint64_t>(fd) ? events[0].events
                                                                             : ~0u;
  }

 private:
  static constexpr uint64_t kData = 0x1234'5678'0000'0000;
  int fd_;
};

class EpollStreams : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536", GetParam()}); }
};

/// socket, add, connect: the order of Asio, Netty and libuv.
TEST_P(EpollStreams, ASocketThatWasAddedBeforeConnectWakesAfterTheLift) {
  for (const bool modify : {false, true}) {
    Epoll epoll;
    sockaddr_in address;
    const int listener = listen_somewhere(&address);
    Connection c;
    c.left = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    stream::on_socket(c.left, AF_INET, SOCK_STREAM, 0);
    ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLIN | EPOLLET), 0);
    if (modify) {
      ASSERT_EQ(epoll.control(EPOLL_CTL_MOD, c.left, EPOLLIN), 0);
    }
    ASSERT_EQ(::connect(c.left, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    stream::on_connect(c.left, 0);
    c.right = accept_stream(listener);
    close_fd(listener);
    ASSERT_TRUE(ping_until_lifted(c));
    for (epoll_event left_over[4]; epoll.wait(left_over, 4, 0) > 0;) {
    }
    std::thread peer([&] {
      nap_us(20'000);
      ASSERT_EQ(do_send(c.right, "a", 1), 1);
    });
    EXPECT_EQ(epoll.wait_for(c.left, 10'000), EPOLLIN);
    peer.join();
    EXPECT_EQ(epoll.wait_for(c.left, 0), modify ? EPOLLIN : 0u) << "level or edge, as it was last";
  }
}

TEST_P(EpollStreams, ARegistrationThatEndedWithItsSocketIsNoOnesLater) {
  Epoll epoll;
  sockaddr_in address;
  const int listener = listen_somewhere(&address);
  const int gone = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  stream::on_socket(gone, AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, gone, EPOLLIN | EPOLLOUT), 0);
  close_fd(gone);
  Connection c;
  c.left = connect_stream(address);
  ASSERT_EQ(c.left, gone) << "the lowest free number";
  c.right = accept_stream(listener);
  close_fd(listener);
  ASSERT_TRUE(ping_until_lifted(c));
  EXPECT_EQ(epoll.wait_for(c.left, 0), 0u);
  EXPECT_EQ(epoll.control(EPOLL_CTL_MOD, c.left, EPOLLIN), -ENOENT);
}

/// The thread that adds has looked the stream up; meanwhile another closes it: the number leaves
/// the table, and the watchers wait for our lock.
long clears_what_is_added(long nr, long a, long b, long c, long d, long e, long f) noexcept {
  if (nr == SYS_epoll_ctl && b == EPOLL_CTL_ADD) FdTable::clear(static_cast<int>(c));
  return raw_syscall(nr, a, b, c, d, e, f);
}

TEST_P(EpollStreams, AddOfAStreamThatIsClosedMeanwhileLinksNothing) {
  Epoll epoll;
  Connection c = Connection::make();
  Stream& s = *FdTable::stream(c.left);
  os::set_door(&clears_what_is_added);
  EXPECT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLIN), 0);
  os::set_door(&raw_syscall);
  EXPECT_TRUE(s.watchers.empty());
  FdTable::set(c.left, stream::FdKind::kStream, &s);
}

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

/// While an item is managed the kernel must not know the program's interest, not for a moment: its
/// socket is silent and always writable.
TEST_P(EpollStreams, AnotherThreadSeesNothingOfAModification) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const std::string bytes(1 << 20, 'x');
  while (do_send(c.left, bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
  }
  std::atomic<bool> over{false};
  std::atomic<int> seen{0};
  std::thread other([&] {
    epoll_event events[4];
    while (!over) seen += static_cast<int>(epoll.wait(events, 4, 1));
  });
  for (int i = 0; i < 2'000; ++i) {
    ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLOUT), 0);
    ASSERT_EQ(epoll.control(EPOLL_CTL_MOD, c.left, EPOLLOUT | EPOLLIN), 0);
    ASSERT_EQ(epoll.control(EPOLL_CTL_MOD, c.left, EPOLLOUT | EPOLLONESHOT), 0);
    ASSERT_EQ(epoll.control(EPOLL_CTL_DEL, c.left, nullptr), 0);
  }
  over = true;
  other.join();
  EXPECT_EQ(seen.load(), 0);
}

TEST_P(EpollStreams, AModificationWakesAThreadForWhatHoldsAlready) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLPRI), 0);
  std::thread other([&] { EXPECT_EQ(epoll.wait_for(c.right, 20'000), EPOLLIN); });
  ASSERT_TRUE(eventually([&] { return epoll.instance().sleepers.load() == 1; }));
  nap_us(5'000);
  ASSERT_EQ(epoll.control(EPOLL_CTL_MOD, c.right, EPOLLIN | EPOLLONESHOT), 0);
  other.join();
}

TEST_P(EpollStreams, TheKernelsErrorsWithAndWithoutAChannel) {
  for (const bool lifted : {false, true}) {
    Epoll epoll;
    Connection c = Connection::make();
    if (lifted) {
      ASSERT_TRUE(ping_until_lifted(c));
    }
    auto* nowhere = reinterpret_cast<epoll_event*>(-4096);
    EXPECT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, nowhere), -EFAULT);
    EXPECT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, nullptr), -EFAULT);
    EXPECT_EQ(epoll.control(EPOLL_CTL_MOD, c.left, EPOLLIN), -ENOENT);
    EXPECT_EQ(epoll.control(EPOLL_CTL_DEL, c.left, nullptr), -ENOENT);
    EXPECT_EQ(epoll.control(99, c.left, EPOLLIN), -EINVAL);
    EXPECT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLIN | EPOLLEXCLUSIVE | EPOLLRDHUP), -EINVAL);
    EXPECT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLIN | EPOLLEXCLUSIVE), 0);
    EXPECT_EQ(epoll.control(EPOLL_CTL_MOD, c.left, EPOLLIN), -EINVAL);
    EXPECT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLIN), -EEXIST);
    EXPECT_EQ(epoll.control(EPOLL_CTL_DEL, c.left, nullptr), 0);
    EXPECT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLIN), 0);
    EXPECT_EQ(epoll.control(EPOLL_CTL_MOD, c.left, EPOLLIN | EPOLLEXCLUSIVE), -EINVAL);
    EXPECT_EQ(epoll.control(EPOLL_CTL_MOD, c.left, nowhere), -EFAULT);
  }
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

/// Linux registers numbers, not connections.
TEST_P(EpollStreams, OneStreamUnderTwoNumbersIsReportedUnderBoth) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const int copy = ::fcntl(c.right, F_DUPFD_CLOEXEC, 0);
  stream::on_dup(c.right, copy);
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN), 0);
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, copy, EPOLLIN), 0);
  EXPECT_EQ(epoll.wait_for(c.right, 5), 0u);
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  epoll_event events[4];
  EXPECT_EQ(epoll.wait(events, 4, 10'000), 2);
  char byte;
  ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
  EXPECT_EQ(epoll.wait_for(c.right, 5), 0u);
  // The one whose registration the doorbell was goes.
  ASSERT_EQ(epoll.control(EPOLL_CTL_DEL, c.right, nullptr), 0);
  EXPECT_EQ(epoll.wait_for(copy, 5), 0u);
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  EXPECT_EQ(epoll.wait_for(copy, 10'000), EPOLLIN);
  close_fd(copy);
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
    os::set_door(&no_descriptors);
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
    os::set_door(&raw_syscall);
  }
}

INSTANTIATE_TEST_SUITE_P(Waits, EpollStreams,
                         ::testing::Values("RSOCK_SPIN_US=0", "RSOCK_SPIN_US=50"),
                         [](const ::testing::TestParamInfo<const char*>& info) {
                           return std::string(info.index == 0 ? "Sleeping" : "Spinning");
                         });

}  // namespace
}  // namespace rsock
