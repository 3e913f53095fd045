// The end of a stream while the peer moves: what it has read must not come again, what it has not
// read must come. The test is the peer, and acts between two system calls of the library.

#include "tests/poll/epoll.h"
#include "tests/stream/agreed.h"
#include "tests/stream/between.h"

namespace rsock {
namespace {

using namespace rsock::testing;

class End : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536"}); }
};

// The server shut down with bytes in the ring; before it looked at the doorbell the client read
// them, saw the end and let go of the channel. The bytes went out once more on TCP.
TEST_F(End, BytesThatThePeerReadBeforeItLetGoAreNotSentAgain) {
  Agreed a;
  a.lift_sending();
  ASSERT_EQ(do_send(a.fd(), "once", 4), 4);
  {
    Between look(
        Between::kBefore, [](const Call& c) { return c.number == SYS_ppoll; },
        [](void* arg) {
          auto& agreed = *static_cast<Agreed*>(arg);
          agreed.from_stream().head.store(wire::kHeadEnded | 4, std::memory_order_seq_cst);
          agreed.peer.hang_up();
        },
        &a);
    EXPECT_EQ(do_shutdown(a.fd(), SHUT_WR), 0);
  }
  char buffer[16];
  EXPECT_EQ(::recv(a.connection.right, buffer, sizeof(buffer), 0), 0) << "read once already";
}

TEST_F(End, BytesThatThePeerDidNotReadBeforeItLetGoAreSent) {
  Agreed a;
  a.lift_sending();
  ASSERT_EQ(do_send(a.fd(), "unread", 6), 6);
  {
    Between look(
        Between::kBefore, [](const Call& c) { return c.number == SYS_ppoll; },
        [](void* arg) {
          auto& agreed = *static_cast<Agreed*>(arg);
          agreed.from_stream().head.store(wire::kHeadEnded | 2, std::memory_order_seq_cst);
          agreed.peer.hang_up();
        },
        &a);
    EXPECT_EQ(do_shutdown(a.fd(), SHUT_WR), 0);
  }
  char buffer[16] = {};
  EXPECT_EQ(::recv(a.connection.right, buffer, sizeof(buffer), MSG_WAITALL), 4);
  EXPECT_STREQ(buffer, "read");
}

// A process that dies lets go of the channel a moment before its kernel sends FIN. In between an
// edge-triggered program heard that its stream was writable, which it knew, and once more when the
// channel was gone. Whatever waits, waits on: nothing has happened that TCP would tell of.
TEST_F(End, UntilTcpHasHeardOfTheEndNobodyDoes) {
  constexpr uint32_t kAll = EPOLLIN | EPOLLOUT | EPOLLRDHUP;
  Agreed a;
  a.start_sending();
  a.publish(1);
  char byte;
  ASSERT_TRUE(eventually([&] { return do_recv(a.fd(), &byte, 1, MSG_DONTWAIT) == 1; }));
  a.lift_sending();
  Epoll edge;
  ASSERT_EQ(edge.control(EPOLL_CTL_ADD, a.fd(), kAll | EPOLLET), 0);
  ASSERT_EQ(edge.wait_for(a.fd(), 0), EPOLLOUT) << "writable from the start";
  Epoll level;
  ASSERT_EQ(level.control(EPOLL_CTL_ADD, a.fd(), EPOLLIN | EPOLLRDHUP), 0);
  a.peer.hang_up();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(edge.wait_for(a.fd(), 20), 0u);
    EXPECT_EQ(level.wait_for(a.fd(), 20), 0u);
    EXPECT_EQ(poll_one(a.fd(), POLLIN | POLLRDHUP, 20), 0);
    EXPECT_EQ(do_recv(a.fd(), &byte, 1, MSG_DONTWAIT), -EAGAIN);
  }
  EXPECT_TRUE(eventually([&] { return a.stream().peer_gone.load(); }));
  timespec before, after;
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
  EXPECT_EQ(poll_one(a.fd(), POLLIN | POLLRDHUP, 300), 0);
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
  EXPECT_LT((after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1'000'000,
            100)
      << "it sleeps meanwhile";
  EXPECT_EQ(edge.wait_for(a.fd(), 20), 0u);
  ::shutdown(a.connection.right, SHUT_WR);
  EXPECT_EQ(edge.wait_for(a.fd(), 10'000), kAll);
  EXPECT_EQ(level.wait_for(a.fd(), 10'000), EPOLLIN | EPOLLRDHUP);
  EXPECT_EQ(poll_one(a.fd(), POLLIN | POLLRDHUP, 10'000), POLLIN | POLLRDHUP);
  EXPECT_EQ(do_recv(a.fd(), &byte, 1), 0);
  EXPECT_TRUE(eventually([&] { return !has_channel(a.fd()); })) << "and the channel goes";
}

}  // namespace
}  // namespace rsock
