// The end of a stream while the peer moves: what it has read must not come again, what it has not
// read must come. The test is the peer, and acts between two system calls of the library.

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

}  // namespace
}  // namespace rsock
