// poll(2) over a set in which some descriptors are streams on a channel, some streams on TCP, some
// not ours.

#include <signal.h>
#include <sys/eventfd.h>

#include <thread>

#include "tests/stream/loopback.h"

namespace rsock {
namespace {

using namespace rsock::testing;

class Poll : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536", GetParam()}); }

  /// poll() as preload/ calls it. timeout_ms < 0: for ever.
  static long ask(pollfd* fds, nfds_t n, int timeout_ms) {
    const timespec limit{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
    const timespec* timeout = timeout_ms < 0 ? nullptr : &limit;
    timespec copy = limit;
    return poll::poll(fds, n, timeout, nullptr, [&]() -> long {
      return ask_kernel(SYS_ppoll, fds, n, timeout == nullptr ? nullptr : &copy, 0, 8);
    });
  }
  static short events(int fd, short interest, int timeout_ms = 0) {
    pollfd p{fd, interest, -1};
    return ask(&p, 1, timeout_ms) >= 0 ? p.revents : static_cast<short>(-1);
  }
};

TEST_P(Poll, ALiftedStreamIsWritableAndNotReadable) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  EXPECT_EQ(events(c.left, POLLIN | POLLOUT), POLLOUT);
  EXPECT_EQ(events(c.left, POLLIN), 0);
}

TEST_P(Poll, BytesInTheRingMakeItReadableUntilTheyAreTaken) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_EQ(do_send(c.left, "abc", 3), 3);
  EXPECT_EQ(events(c.right, POLLIN | POLLRDNORM), POLLIN | POLLRDNORM);
  char buffer[8];
  ASSERT_EQ(do_recv(c.right, buffer, 1), 1);
  EXPECT_EQ(events(c.right, POLLIN), POLLIN) << "level-triggered";
  ASSERT_EQ(do_recv(c.right, buffer, 8), 2);
  EXPECT_EQ(events(c.right, POLLIN), 0);
}

TEST_P(Poll, AFullRingIsNotWritableUntilAThirdIsFree) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  std::string bytes(1 << 20, 'x');
  while (do_send(c.left, bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
  }
  EXPECT_EQ(events(c.left, POLLOUT), 0);
  ASSERT_EQ(do_recv(c.right, bytes.data(), 1000, MSG_WAITALL), 1000);
  EXPECT_EQ(events(c.left, POLLOUT), 0);
  ASSERT_EQ(do_recv(c.right, bytes.data(), 40'000, MSG_WAITALL), 40'000);
  EXPECT_EQ(events(c.left, POLLOUT), POLLOUT);
}

TEST_P(Poll, ASleeperWakesForBytesRoomAndTheEnd) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  std::string bytes(1 << 20, 'x');
  std::thread peer([&] {
    nap_us(5'000);
    ASSERT_EQ(do_send(c.left, "a", 1), 1);
  });
  EXPECT_EQ(events(c.right, POLLIN, -1), POLLIN);
  peer.join();
  while (do_send(c.left, bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
  }
  peer = std::thread([&] {
    nap_us(5'000);
    for (long r; (r = do_recv(c.right, bytes.data(), bytes.size(), MSG_DONTWAIT)) > 0;) {
    }
  });
  EXPECT_EQ(events(c.left, POLLOUT, -1), POLLOUT);
  peer.join();
  peer = std::thread([&] {
    nap_us(5'000);
    EXPECT_EQ(do_shutdown(c.left, SHUT_WR), 0);
  });
  EXPECT_EQ(events(c.right, POLLIN | POLLRDHUP, -1), POLLIN | POLLRDHUP);
  peer.join();
  EXPECT_EQ(do_recv(c.right, bytes.data(), 1), 0);
}

TEST_P(Poll, ASetDownOfASleeperDoesNotLoseItsWakeUp) {
  Connection c = Connection::make();
  for (int round = 0; round < 30; ++round) {
    ASSERT_TRUE(ping_until_lifted(c));
    std::thread other([&] {
      nap_us(round * 100);
      stream::set_down(*FdTable::stream(round % 2 == 0 ? c.left : c.right), "test");
      ASSERT_EQ(do_send(c.left, "a", 1), 1);
    });
    EXPECT_EQ(events(c.right, POLLIN, 20'000), POLLIN);
    other.join();
    char byte;
    ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
  }
}

TEST_P(Poll, MixesStreamsAndOthersInOneSet) {
  Connection lifted = Connection::make();
  ASSERT_TRUE(ping_until_lifted(lifted));
  Connection plain = Connection::make(false, false);
  const int event = ::eventfd(0, EFD_CLOEXEC);
  pollfd fds[] = {
      {lifted.right, POLLIN, -1}, {-1, POLLIN, -1}, {plain.right, POLLIN, -1}, {event, POLLIN, -1}};
  EXPECT_EQ(ask(fds, 4, 0), 0);
  for (const pollfd& p : fds) EXPECT_EQ(p.revents, 0);
  const uint64_t one = 1;
  ASSERT_EQ(::write(event, &one, sizeof(one)), 8);
  EXPECT_EQ(ask(fds, 4, -1), 1);
  EXPECT_EQ(fds[3].revents, POLLIN);
  ASSERT_EQ(do_send(lifted.left, "a", 1), 1);
  ASSERT_EQ(do_send(plain.left, "a", 1), 1);
  EXPECT_TRUE(eventually([&] { return ask(fds, 4, -1) == 3; }));
  EXPECT_EQ(fds[0].revents, POLLIN);
  EXPECT_EQ(fds[1].revents, 0);
  EXPECT_EQ(fds[2].revents, POLLIN);
  ::close(event);
}

/// One stream of the set is lifted, so the thread sleeps on its doorbell; the other is lifted only
/// while it sleeps, and the next bytes come where the thread did not look when it went to sleep.
TEST_P(Poll, AStreamThatIsLiftedWhileTheSetSleepsWakesIt) {
  Connection lifted = Connection::make();
  ASSERT_TRUE(ping_until_lifted(lifted));
  Connection later = Connection::make();
  std::atomic<bool> asleep{false};
  std::thread peer([&] {
    EXPECT_TRUE(eventually([&] { return asleep.load(); }));
    nap_us(20'000);
    // The sleeper's end only sends (another thread of its program), the other end only receives.
    char byte = 0;
    EXPECT_TRUE(eventually([&] {
      return do_send(later.right, "x", 1) == 1 && do_recv(later.left, &byte, 1) == 1 &&
             has_channel(later.right) && sends_in_ring(*FdTable::stream(later.right));
    }));
    EXPECT_TRUE(eventually([&] {  // until the sleeper's end is ready for the ring
      stream::attend(*FdTable::stream(later.left));
      Stream& s = *FdTable::stream(later.left);
      MutexLock lock(s.tx.mutex);
      return s.channel && s.channel->tx_peer_ready();
    }));
    nap_us(20'000);
    EXPECT_EQ(do_send(later.left, "a", 1), 1);
    EXPECT_TRUE(sends_in_ring(*FdTable::stream(later.left)));
  });
  pollfd fds[] = {{lifted.right, POLLIN, 0}, {later.right, POLLIN, 0}};
  asleep = true;
  EXPECT_EQ(ask(fds, 2, 20'000), 1);
  EXPECT_EQ(fds[1].revents, POLLIN);
  peer.join();
}

TEST_P(Poll, AClosedNumberInASetWithAStreamIsNval) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const int gone = ::dup(0);
  ::close(gone);
  pollfd fds[] = {{c.left, POLLIN, 0}, {gone, POLLIN, 0}};
  EXPECT_EQ(ask(fds, 2, -1), 1);
  EXPECT_EQ(fds[1].revents, POLLNVAL);
}

TEST_P(Poll, ATimeoutEndsWithNothingReady) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  EXPECT_EQ(events(c.left, POLLIN, 1), 0);
  EXPECT_EQ(events(c.left, POLLIN, 0), 0);
}

volatile sig_atomic_t handled;

/// Linux looks first; a pending signal that the mask lets through counts only if nothing is ready.
TEST_P(Poll, AMaskLetsAPendingSignalEndACallWithoutATimeout) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  struct sigaction action {};
  action.sa_handler = [](int) { handled = handled + 1; };
  ASSERT_EQ(::sigaction(SIGUSR1, &action, nullptr), 0);
  sigset_t one;
  sigset_t none;
  sigemptyset(&none);
  sigemptyset(&one);
  sigaddset(&one, SIGUSR1);
  ASSERT_EQ(::pthread_sigmask(SIG_BLOCK, &one, nullptr), 0);
  ASSERT_EQ(::pthread_kill(::pthread_self(), SIGUSR1), 0);
  const timespec now{0, 0};
  auto ask_masked = [&] {
    pollfd p{c.right, POLLIN, 0};
    return poll::poll(&p, 1, &now, &none, [&]() -> long {
      timespec copy = now;
      return ask_kernel(SYS_ppoll, &p, 1, &copy, &none, 8);
    });
  };
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  EXPECT_EQ(ask_masked(), 1);
  EXPECT_EQ(handled, 0);
  char byte;
  ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
  EXPECT_EQ(ask_masked(), -EINTR);
  nap_us(1);  // ThreadSanitizer keeps a signal until a call that it knows
  EXPECT_EQ(handled, 1);
  EXPECT_EQ(ask_masked(), 0);
  ::pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
  handled = 0;
  ::signal(SIGUSR1, SIG_DFL);
}

TEST_P(Poll, ManyStreamsInOneSet) {
  std::vector<Connection> connections;
  std::vector<pollfd> fds;
  for (int i = 0; i < 40; ++i) {
    connections.push_back(Connection::make());
    if (i % 2 == 0) {
      ASSERT_TRUE(ping_until_lifted(connections.back()));
    }
    fds.push_back(pollfd{connections.back().right, POLLIN, 0});
  }
  EXPECT_EQ(ask(fds.data(), fds.size(), 0), 0);
  for (const int i : {0, 1, 17, 38})
    ASSERT_EQ(do_send(connections[static_cast<size_t>(i)].left, "a", 1), 1);
  EXPECT_TRUE(eventually([&] { return ask(fds.data(), fds.size(), -1) == 4; }));
}

/// Several threads sleep on one stream for different things: each ring of the one doorbell reaches
/// who needs it.
TEST_P(Poll, SleepersOfOneStreamDoNotTakeEachOthersWakeUps) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  constexpr int kRounds = 300;
  std::thread writer([&] {
    std::string bytes(100'000, 'x');
    for (int i = 0; i < kRounds; ++i) {
      ASSERT_EQ(events(c.right, POLLOUT, -1) & POLLOUT, POLLOUT);
      const long r = do_send(c.right, bytes.data(), bytes.size(), MSG_DONTWAIT);
      ASSERT_TRUE(r > 0 || r == -EAGAIN) << r;
    }
  });
  std::thread echo([&] {  // drains what the writer sends, and pings the reader
    std::string bytes(100'000, 'x');
    for (int i = 0; i < kRounds; ++i) {
      ASSERT_EQ(do_send(c.left, "p", 1), 1);
      while (do_recv(c.left, bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
      }
      if (i % 8 == 0) nap_us(100);
    }
  });
  int got = 0;
  char buffer[64];
  while (got < kRounds) {
    ASSERT_EQ(events(c.right, POLLIN, -1), POLLIN);
    const long r = do_recv(c.right, buffer, sizeof(buffer), MSG_DONTWAIT);
    ASSERT_TRUE(r > 0 || r == -EAGAIN) << r;
    if (r > 0) got += static_cast<int>(r);
  }
  echo.join();
  // The writer may wait for room that nobody makes any more.
  std::atomic<bool> done{false};
  std::thread drain([&] {
    std::string bytes(100'000, 'x');
    while (!done) {
      while (do_recv(c.left, bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
      }
      nap_us(200);
    }
  });
  writer.join();
  done = true;
  drain.join();
}

RSOCK_WITH_AND_WITHOUT_SPINNING(Poll);

}  // namespace
}  // namespace rsock
