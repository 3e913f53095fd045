// What two threads do to one stream at the same instant, brought about on purpose.

#include <thread>

#include "tests/stream/between.h"

namespace rsock {
namespace {

using namespace rsock::testing;

class Races : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536"}); }
};

// A thread that leaves a blocking call by siglongjmp never gives its reference to the channel back.
TEST_F(Races, AClosedStreamHangsUpAlthoughSomebodyHoldsItsChannel) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const auto leaked = stream::channel_of(*FdTable::stream(c.left));
  ASSERT_NE(leaked, nullptr);
  close_fd(std::exchange(c.left, -1));
  static const char bytes[20'000] = {};
  long r = 0;
  EXPECT_TRUE(eventually([&] {
    r = do_send(c.right, bytes, sizeof(bytes), MSG_DONTWAIT);
    return r < 0 && r != -EAGAIN;
  })) << "the sender waits for room in a ring that nobody reads";
  EXPECT_TRUE(r == -EPIPE || r == -ECONNRESET) << r;
}

// The hang-up of a channel that a sleeper still holds was taken for that of its successor.
TEST_F(Races, AnOldChannelsHangUpIsNotTheNextOnes) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const auto held = stream::channel_of(*FdTable::stream(c.left));
  auto other = stream::channel_of(*FdTable::stream(c.right));
  stream::set_down(*FdTable::stream(c.left), "test");
  ASSERT_TRUE(eventually([&] { return !has_channel(c.left) && !has_channel(c.right); }));
  ASSERT_TRUE(ping_until_lifted(c));
  other.reset();
  nap_us(50'000);
  for (int fd : {c.left, c.right}) {
    EXPECT_FALSE(FdTable::stream(fd)->peer_gone.load());
    EXPECT_TRUE(sends_in_ring(*FdTable::stream(fd)));
  }
  EXPECT_TRUE(echoes(c.left, c.right, 100'000));
}

}  // namespace
}  // namespace rsock
