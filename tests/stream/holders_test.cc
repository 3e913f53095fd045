// A stream that two processes hold lives on TCP; the one that is left may lift it again.

#include "core/stream/holders.h"

#include <thread>

#include "core/base/deadline.h"
#include "tests/stream/forking.h"

namespace rsock::stream {
namespace {

using namespace rsock::testing;

class Holders : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536"}); }
};

TEST_F(Holders, AStreamThatNeverMetAForkIsOursAlone) {
  Connection c = Connection::make();
  EXPECT_TRUE(sole_holder(*FdTable::stream(c.left)));
  drop_holder(*FdTable::stream(c.left), c.left);
  EXPECT_TRUE(sole_holder(*FdTable::stream(c.left)));
}

TEST_F(Holders, CountUpAndDown) {
  Connection c = Connection::make();
  Stream& s = *FdTable::stream(c.left);
  add_holder_to_all();
  EXPECT_FALSE(sole_holder(s));
  add_holder_to_all();
  remove_holder_from_all();
  EXPECT_FALSE(sole_holder(s));
  remove_holder_from_all();
  EXPECT_TRUE(sole_holder(s));
}

TEST_F(Holders, AFailedForkLeavesTheStreamLiftable) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  prepare_fork();
  before_fork();
  after_fork_parent(/*failed=*/true);
  EXPECT_FALSE(has_channel(c.left));
  EXPECT_TRUE(ping_until_lifted(c));
}

TEST_F(Holders, AStreamInTwoProcessesStaysOnTcpUntilOneLetsGo) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    char byte;
    (void)!::read(go[0], &byte, 1);
    const bool shared = !sole_holder(*FdTable::stream(c.left));
    close_fd(c.left);
    close_fd(c.right);
    _exit(shared ? 0 : 1);
  }
  EXPECT_FALSE(has_channel(c.left));
  EXPECT_FALSE(sole_holder(*FdTable::stream(c.left)));
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(echoes(c.left, c.right, 10'000));
  EXPECT_FALSE(has_channel(c.left));
  ASSERT_EQ(::write(go[1], "x", 1), 1);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(sole_holder(*FdTable::stream(c.left)));
  EXPECT_TRUE(echoes(c.left, c.right, 100'000));
  ::close(go[0]);
  ::close(go[1]);
}

TEST_F(Holders, ParentAndChildTakeTurnsOnOneStreamWithoutLosingAByte) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  // Unread bytes in both rings when the processes part.
  ASSERT_EQ(do_send(c.left, "first ", 6), 6);
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    const bool ok = do_send(c.left, "second ", 7) == 7;
    _exit(ok ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(do_send(c.left, "third", 5), 5);
  char buffer[32] = {};
  EXPECT_EQ(do_recv(c.right, buffer, 18, MSG_WAITALL), 18);
  EXPECT_STREQ(buffer, "first second third");
}

/// The counters' memory went with the last stream that pointed into it, while others were still
/// getting theirs: the fork of a busy server crashed.
TEST_F(Holders, StreamsThatCloseWhileAForkCountsThem) {
  std::atomic<bool> over{false};
  std::vector<std::thread> closers;
  for (int i = 0; i < 3; ++i) {
    closers.emplace_back([&] {
      while (!over) Connection::make();
    });
  }
  const Deadline limit = Deadline::after_ns(1'500'000'000);
  while (!limit.passed()) {
    add_holder_to_all();
    remove_holder_from_all();
  }
  over = true;
  for (std::thread& t : closers) t.join();
}

}  // namespace
}  // namespace rsock::stream
