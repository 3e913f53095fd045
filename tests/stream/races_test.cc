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

/// What the program does in the middle of a lift, in a thread of its own: it may have to wait for
/// the lift's locks, so the lift goes on after a while.
struct Meanwhile {
  void (*act)(int fd);
  int fd = -1;
  std::atomic<bool> done{false};
  std::thread thread;

  static void start(void* arg) {
    auto* m = static_cast<Meanwhile*>(arg);
    m->thread = std::thread([m] {
      m->act(m->fd);
      m->done.store(true);
    });
    for (int i = 0; i < 100 && !m->done.load(); ++i) nap_us(1000);
  }
  ~Meanwhile() {
    if (thread.joinable()) thread.join();
  }
};

/// The lift looks at the flags twice: to see whether it is worth a try, and in the middle of
/// attach().
int g_left = -1;
std::atomic<int> g_looks{0};
void watch_lift_of(const Connection& c) {
  g_left = c.left;
  g_looks = 0;
}
bool is_attaching_left(const Call& c) {
  return c.number == SYS_fcntl && c.a == g_left && c.b == F_GETFL && g_looks.fetch_add(1) == 1;
}

/// Traffic both ways until the race that waits for it has been.
bool ping_until_raced(const Connection& c) {
  char byte;
  return eventually([&] {
    (void)do_send(c.left, "x", 1);
    (void)do_recv(c.right, &byte, 1);
    (void)do_send(c.right, "x", 1);
    (void)do_recv(c.left, &byte, 1);
    return Between::done();
  });
}

// splice and fdopen asked whether there is a channel while the keeper was about to attach one.
TEST_F(Races, APinDuringALiftLeavesThePlainStream) {
  Connection c = Connection::make();
  watch_lift_of(c);
  bool lifted_after_pin = true;
  Meanwhile pin{[](int fd) { (void)stream::pin_to_tcp(fd, "test"); }, c.left, {}, {}};
  Between race(Between::kAfter, is_attaching_left, Meanwhile::start, &pin);
  ASSERT_TRUE(ping_until_raced(c));
  ASSERT_TRUE(eventually([&] { return pin.done.load(); }));
  lifted_after_pin = has_channel(c.left);
  for (int i = 0; i < 20 && !lifted_after_pin; ++i) {
    nap_us(5000);
    lifted_after_pin = has_channel(c.left);
  }
  EXPECT_FALSE(lifted_after_pin);
  EXPECT_TRUE(echoes(c.left, c.right, 10'000));
}

TEST_F(Races, ONonblockSetDuringALiftIsNotForgotten) {
  Connection c = Connection::make();
  watch_lift_of(c);
  Meanwhile set{[](int fd) { set_nonblocking(fd); }, c.left, {}, {}};
  Between race(Between::kAfter, is_attaching_left, Meanwhile::start, &set);
  ASSERT_TRUE(ping_until_raced(c));
  ASSERT_TRUE(eventually([&] { return set.done.load() && has_channel(c.left); }));
  EXPECT_TRUE(FdTable::stream(c.left)->nonblocking.load());
}

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

// fail_stream() reset whatever connection had got the number meanwhile.
TEST_F(Races, AFailureThatComesAfterTheCloseHarmsNobody) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  Stream& s = *FdTable::stream(c.left);
  const int number = c.left;
  close_fd(std::exchange(c.left, -1));
  Connection next = Connection::make();
  ASSERT_TRUE(next.left == number || next.right == number);
  stream::fail_stream(s, "test");
  EXPECT_TRUE(echoes(next.left, next.right, 1000));
}

}  // namespace
}  // namespace rsock
