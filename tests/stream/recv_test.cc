// recv() at the edges: across the switch, at the end, with an error in between, for no bytes at
// all.

#include <sys/ioctl.h>

#include <thread>

#include "core/base/deadline.h"
#include "tests/stream/agreed.h"
#include "tests/stream/between.h"

namespace rsock {
namespace {

using namespace rsock::testing;

class Recv : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536"}); }
};

/// Ten bytes of a message on TCP, ninety behind them in the ring.
struct Split {
  Split() {
    for (size_t i = 0; i < sizeof(message); ++i) message[i] = static_cast<char>('!' + i);
    char byte;
    EXPECT_EQ(do_send(c.left, message, 10), 10);
    EXPECT_EQ(do_send(c.right, "w", 1), 1);  // worth lifting here too
    EXPECT_EQ(do_recv(c.left, &byte, 1), 1);
    Stream& s = *FdTable::stream(c.left);
    EXPECT_TRUE(eventually([&] { return sends_in_ring(s); }));
  }
  void send_rest() {
    EXPECT_EQ(do_send(c.left, message + 10, 90), 90);
    EXPECT_TRUE(sends_in_ring(*FdTable::stream(c.left)));
  }
  Connection c = Connection::make();
  char message[100];
};

// A program that peeks until its header is complete peeked for ever: ten bytes each time.
TEST_F(Recv, APeekSeesTheMessageOnBothSidesOfTheSwitch) {
  Split split;
  split.send_rest();
  char buffer[128];
  EXPECT_EQ(do_recv(split.c.right, buffer, sizeof(buffer), MSG_PEEK), 100);
  EXPECT_EQ(memcmp(buffer, split.message, 100), 0);
  EXPECT_EQ(do_recv(split.c.right, buffer, 50, MSG_PEEK), 50);
  EXPECT_EQ(do_recv(split.c.right, buffer, 100, MSG_PEEK | MSG_WAITALL), 100);
  EXPECT_EQ(do_recv(split.c.right, nullptr, 128, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT), 100);
  EXPECT_EQ(do_recv(split.c.right, buffer, 100, MSG_WAITALL), 100);
  EXPECT_EQ(memcmp(buffer, split.message, 100), 0);
}

TEST_F(Recv, APeekForAllWaitsAcrossTheSwitch) {
  Split split;
  char buffer[100] = {};
  long got = 0;
  std::thread reader([&] { got = do_recv(split.c.right, buffer, 100, MSG_PEEK | MSG_WAITALL); });
  nap_us(20'000);
  split.send_rest();
  reader.join();
  EXPECT_EQ(got, 100);
  EXPECT_EQ(memcmp(buffer, split.message, 100), 0);
}

TEST_F(Recv, APeekThatTruncatesTouchesNoBuffer) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_EQ(do_send(c.left, "hello", 5), 5);
  EXPECT_EQ(do_recv(c.right, nullptr, 3, MSG_PEEK | MSG_TRUNC), 3);
  EXPECT_EQ(do_recv(c.right, nullptr, 30, MSG_PEEK | MSG_TRUNC), 5);
  EXPECT_EQ(do_recv(c.right, nullptr, 2, MSG_TRUNC), 2);
  char buffer[8] = {};
  EXPECT_EQ(do_recv(c.right, buffer, 8), 3);
  EXPECT_STREQ(buffer, "llo");
}

TEST_F(Recv, ForNoBytesMeetsTheEnd) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  char byte;
  ASSERT_EQ(do_send(c.left, "x", 1), 1);
  EXPECT_EQ(do_recv(c.right, &byte, 0), 0) << "there is something";
  EXPECT_EQ(do_recv(c.right, &byte, 1), 1);
  EXPECT_EQ(do_recv(c.right, &byte, 0, MSG_DONTWAIT), -EAGAIN);
  ASSERT_EQ(do_shutdown(c.left, SHUT_WR), 0);
  EXPECT_EQ(do_recv(c.right, &byte, 0), 0);
  EXPECT_EQ(do_recv(c.right, &byte, 1), 0);
}

// A stopped peer owes a replay; a call for no bytes, or one after SHUT_RD, is no lost byte.
TEST_F(Recv, ForNoBytesIsNoResetWhileAReplayIsOwed) {
  Agreed a;
  a.start_sending();
  a.publish(100);
  stream::set_down(a.stream(), "test");  // the peer does not answer
  ASSERT_EQ(::send(a.connection.right, "y", 1, 0), 1);
  char byte;
  ASSERT_NE(poll_one(a.fd(), POLLIN, 5000), 0);
  EXPECT_EQ(do_recv(a.fd(), &byte, 0), 0);
  EXPECT_EQ(do_recv(a.fd(), &byte, 1), 1);
  EXPECT_EQ(do_shutdown(a.fd(), SHUT_RD), 0);
  EXPECT_EQ(do_recv(a.fd(), &byte, 1), 0);
}

void reset_by(int fd) {
  const linger now{1, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  ::close(fd);
}

// The replay met the reset and kept the error; the bytes in the kernel's queue come before it.
TEST_F(Recv, AnErrorThatTheReplayMetComesAfterTheBytes) {
  Agreed a;
  a.lift_sending();
  ASSERT_EQ(do_send(a.fd(), "unread", 6), 6);
  stream::set_down(a.stream(), "test");
  ASSERT_EQ(::send(a.connection.right, "answer", 6, 0), 6);
  ASSERT_NE(poll_one(a.fd(), POLLIN, 5000), 0);
  a.stream().error.store(ECONNRESET);
  char buffer[16] = {};
  EXPECT_EQ(do_recv(a.fd(), buffer, sizeof(buffer)), 6);
  EXPECT_STREQ(buffer, "answer");
}

TEST_F(Recv, AResetThatAProbeMetIsKeptForTheProgram) {
  Agreed a;
  EXPECT_TRUE(eventually([&] { return a.to_stream().ready.load(std::memory_order_acquire) != 0; }));
  // The probe takes the error from the kernel; then the switch appears, with bytes in the ring.
  struct Arg {
    Agreed* agreed;
  } arg{&a};
  reset_by(std::exchange(a.connection.right, -1));
  nap_us(2000);
  Between race(
      Between::kAfter, [](const Call& c) { return c.number == SYS_recvfrom && c.c == 1; },
      [](void* p) {
        Agreed& agreed = *static_cast<Arg*>(p)->agreed;
        memcpy(agreed.ring_to_stream(), "bytes", 5);
        agreed.to_stream().start.store(1, std::memory_order_release);
        agreed.publish(5);
      },
      &arg);
  char buffer[16] = {};
  EXPECT_EQ(do_recv(a.fd(), buffer, sizeof(buffer)), 5);
  EXPECT_EQ(do_recv(a.fd(), buffer, sizeof(buffer)), -ECONNRESET);
}

// An event between the probe and the clearing of its flag was forgotten: FIN was never seen.
TEST_F(Recv, AnEndThatComesRightBehindTheProbeIsSeen) {
  Agreed a;
  a.start_sending();
  a.publish(1);
  char byte;
  ASSERT_TRUE(eventually([&] { return do_recv(a.fd(), &byte, 1, MSG_DONTWAIT) == 1; }));
  a.stream().tcp_event.store(true);
  Between race(
      Between::kAfter, [](const Call& c) { return c.number == SYS_recvfrom && c.c == 1; },
      [](void* p) {
        Agreed& agreed = *static_cast<Agreed*>(p);
        ::shutdown(agreed.connection.right, SHUT_WR);
        // What the keeper does at this moment.
        agreed.stream().tcp_event.store(true);
      },
      &a);
  EXPECT_EQ(do_recv(a.fd(), &byte, 1, MSG_DONTWAIT), -EAGAIN);
  EXPECT_TRUE(a.stream().tcp_event.load()) << "forgotten";
  EXPECT_NE(do_recv(a.fd(), &byte, 1, MSG_DONTWAIT), -EAGAIN);
}

TEST(Timeouts, OfThreeHundredYearsAreNoNegativeOnes) {
  EXPECT_EQ(socket_timeout_ns(timeval{INT64_MAX, 0}), INT64_MAX);
  EXPECT_EQ(socket_timeout_ns(timeval{10'000'000'000, 5}), INT64_MAX);
  EXPECT_EQ(socket_timeout_ns(timeval{2, 5}), 2'000'005'000);
  EXPECT_EQ(socket_timeout_ns(timeval{0, 0}), 0);
  EXPECT_EQ(socket_timeout_ns(timeval{-5, 0}), 1);
  const timespec never{INT64_MAX, 999'999'999};
  EXPECT_FALSE(Deadline::from_timeout(&never).passed());
}

}  // namespace
}  // namespace rsock
