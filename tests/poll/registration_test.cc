// What is registered where: before the stream is one, under several numbers, while it changes.

#include <sys/eventfd.h>
#include <sys/mman.h>

#include <thread>

#include "tests/base/faults.h"
#include "tests/poll/door.h"
#include "tests/poll/epoll.h"

namespace rsock {
namespace {

using namespace rsock::testing;

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
  const OtherDoor door(&clears_what_is_added);
  EXPECT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLIN), 0);
  EXPECT_TRUE(s.watchers.empty());
  FdTable::set(c.left, stream::FdKind::kStream, &s);
}

/// The kernel's instance is both processes'. A child that closes what it has inherited, as a
/// server's child does, said DEL or MOD for a registration under our data, and the parent's was
/// gone.
TEST_P(EpollStreams, AForkedChildThatClosesAStreamLeavesTheParentsRegistration) {
  for (const bool lifted : {false, true}) {
    for (const bool spent : {false, true}) {
      Epoll epoll;
      Connection c = Connection::make();
      if (lifted) {
        ASSERT_TRUE(ping_until_lifted(c));
      }
      ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLIN | EPOLLONESHOT), 0);
      if (spent) {
        ASSERT_EQ(do_send(c.right, "a", 1), 1);
        ASSERT_EQ(epoll.wait_for(c.left, 10'000), EPOLLIN);
      }
      EXPECT_EQ(in_forked_child([&] {
                  close_fd(c.left);
                  close_fd(c.right);
                  return true;
                }),
                0);
      if (spent) {
        EXPECT_EQ(epoll.wait_for(c.left, 0), 0u) << "a shot that was fired";
        EXPECT_EQ(epoll.control(EPOLL_CTL_MOD, c.left, EPOLLIN | EPOLLONESHOT), 0);
      } else {
        ASSERT_EQ(do_send(c.right, "a", 1), 1);
      }
      EXPECT_EQ(epoll.wait_for(c.left, 10'000), EPOLLIN) << lifted << spent;
      EXPECT_EQ(epoll.wait_for(c.left, 0), 0u);
    }
  }
}

Epoll* g_added_to = nullptr;
int g_added = -1;

/// Another thread adds while the fork is on its way: when the holders' memory is mapped, say.
long adds_in_a_fork(long nr, long a, long b, long c, long d, long e, long f) noexcept {
  if (nr == SYS_mmap && (d & MAP_SHARED) != 0 && g_added_to != nullptr) {
    EXPECT_EQ(
        std::exchange(g_added_to, nullptr)->control(EPOLL_CTL_ADD, g_added, EPOLLIN | EPOLLONESHOT),
        0);
  }
  return raw_syscall(nr, a, b, c, d, e, f);
}

TEST_P(EpollStreams, ARegistrationThatIsMadeDuringAForkIsSharedToo) {
  Epoll epoll;
  Connection c = Connection::make();
  g_added_to = &epoll;
  g_added = c.left;
  {
    const OtherDoor door(&adds_in_a_fork);
    EXPECT_EQ(in_forked_child([&] {
                close_fd(c.left);
                return true;
              }),
              0);
  }
  ASSERT_EQ(g_added_to, nullptr);
  EXPECT_TRUE(FdTable::stream(c.left)->pinned);
  ASSERT_EQ(do_send(c.right, "a", 1), 1);
  EXPECT_EQ(epoll.wait_for(c.left, 10'000), EPOLLIN);
  EXPECT_EQ(epoll.wait_for(c.left, 0), 0u);
}

/// Either process may arm it again, and the other hear of it.
TEST_P(EpollStreams, AForkedChildArmsTheSharedRegistration) {
  Epoll epoll;
  Connection c = Connection::make();
  ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.left, EPOLLIN | EPOLLONESHOT), 0);
  ASSERT_EQ(do_send(c.right, "a", 1), 1);
  ASSERT_EQ(epoll.wait_for(c.left, 10'000), EPOLLIN);
  EXPECT_EQ(in_forked_child(
                [&] { return epoll.control(EPOLL_CTL_MOD, c.left, EPOLLIN | EPOLLONESHOT) == 0; }),
            0);
  EXPECT_EQ(epoll.wait_for(c.left, 10'000), EPOLLIN);
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
    test::FaultsRecovered faults;
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

/// The registration lives as long as the connection, and its number may be another file's.
TEST_P(EpollStreams, ANumberThatWasClosedAndReusedKeepsItsNewRegistration) {
  for (const bool lifted : {false, true}) {
    Epoll epoll;
    Connection c = Connection::make();
    if (lifted) {
      ASSERT_TRUE(ping_until_lifted(c));
    }
    ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, c.right, EPOLLIN), 0);
    const int number = c.right;
    c.right = ::fcntl(number, F_DUPFD_CLOEXEC, 0);
    stream::on_dup(number, c.right);
    close_fd(number);
    const int event = ::eventfd(0, EFD_CLOEXEC);
    ASSERT_EQ(event, number);
    epoll_event other{};
    other.events = EPOLLIN;
    other.data.u64 = 4711;
    ASSERT_EQ(epoll.control(EPOLL_CTL_ADD, event, &other), 0);
    char byte;
    for (int i = 0; i < 100; ++i) {
      ASSERT_EQ(do_send(c.left, "a", 1), 1);
      EXPECT_EQ(epoll.wait_for(number, 10'000), EPOLLIN) << "round " << i;
      ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
      ASSERT_EQ(do_send(c.right, "a", 1), 1);
      ASSERT_EQ(do_recv(c.left, &byte, 1), 1);
      nap_us(200);
    }
    const uint64_t one = 1;
    ASSERT_EQ(::write(event, &one, sizeof(one)), 8);
    epoll_event events[4];
    ASSERT_EQ(epoll.wait(events, 4, 1'000), 1);
    EXPECT_EQ(events[0].data.u64, 4711u);
    ::close(event);
  }
}

RSOCK_WITH_AND_WITHOUT_SPINNING(EpollStreams);

}  // namespace
}  // namespace rsock
