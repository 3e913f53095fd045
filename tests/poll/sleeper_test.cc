// Threads that sleep in poll(2) with streams, and what becomes of their watchers and bells.

#include "core/poll/waiter.h"

#include <setjmp.h>
#include <signal.h>

#include <thread>

#include "tests/poll/door.h"
#include "tests/stream/loopback.h"

namespace rsock {
namespace {

using namespace rsock::testing;

class Sleepers : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536", "RSOCK_SPIN_US=0"}); }
};

bool watched(int fd) {
  Stream& s = *FdTable::stream(fd);
  MutexLock lock(s.watch_mutex);
  return !s.watchers.empty();
}

/// Its thread is the parent's: the child's lists named its stack.
TEST_F(Sleepers, AForkedChildKnowsNoneOfTheParentsSleepers) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  std::thread sleeper([&] { EXPECT_EQ(poll_one(c.right, POLLIN), POLLIN); });
  ASSERT_TRUE(eventually([&] { return watched(c.right); }));
  // The set-down before the fork wakes it; it goes on sleeping in the kernel, or is back with a
  // watcher. A stream that is pinned by a second sleeper would hide the difference: so hold it
  // here.
  poll::Sleeper& mine = poll::Sleeper::mine();
  const poll::Sleeper::Visit visit(mine);
  ASSERT_NE(mine.link(*FdTable::stream(c.right)), nullptr);
  EXPECT_EQ(in_forked_child([&] { return !watched(c.right); }), 0);
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  sleeper.join();
}

TEST_F(Sleepers, AForkedChildMakesABellOfItsOwn) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  EXPECT_EQ(poll_one(c.right, POLLIN, 1), 0);
  const int bell = poll::Sleeper::mine().fd();
  ASSERT_GE(bell, 0);
  EXPECT_EQ(in_forked_child(
                [&] { return poll::Sleeper::mine().fd() == -1 && ::fcntl(bell, F_GETFD) == -1; }),
            0);
  EXPECT_EQ(poll::Sleeper::mine().fd(), bell);
  EXPECT_GE(::fcntl(bell, F_GETFD), 0);
}

thread_local sigjmp_buf away;

[[gnu::noinline]] void overwrite_the_stack() {
  char bytes[64 * 1024];
  memset(bytes, 0xa5, sizeof(bytes));
  asm volatile("" : : "r"(bytes) : "memory");
}

/// poll() may be left by siglongjmp: POSIX says so of handlers that interrupt a safe function.
TEST_F(Sleepers, AHandlerMayJumpOutOfPoll) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  struct sigaction action {};
  action.sa_handler = [](int) { siglongjmp(away, 1); };
  ASSERT_EQ(::sigaction(SIGUSR1, &action, nullptr), 0);
  std::atomic<bool> jumped{false};
  std::atomic<bool> woken{false};
  std::thread sleeper([&] {
    if (sigsetjmp(away, 1) == 0) {
      (void)poll_one(c.right, POLLIN);
    } else {
      overwrite_the_stack();
      jumped = true;
      EXPECT_TRUE(eventually([&] { return woken.load(); }));
      EXPECT_EQ(poll_one(c.right, POLLPRI, 1), 0);
      EXPECT_FALSE(watched(c.right));
    }
  });
  ASSERT_TRUE(eventually([&] { return watched(c.right); }));
  nap_us(20'000);  // it is in the kernel
  ASSERT_EQ(::pthread_kill(sleeper.native_handle(), SIGUSR1), 0);
  ASSERT_TRUE(eventually([&] { return jumped.load(); }));
  stream::wake_waiters(*FdTable::stream(c.right));
  woken = true;
  sleeper.join();
  ::signal(SIGUSR1, SIG_DFL);
}

TEST_F(Sleepers, AThreadThatEndsAfterAJumpLeavesNoWatcher) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  std::thread([&] {
    // As siglongjmp leaves it: linked, and the visit never ended.
    ASSERT_NE(poll::Sleeper::mine().link(*FdTable::stream(c.right)), nullptr);
    ASSERT_TRUE(watched(c.right));
  }).join();
  EXPECT_FALSE(watched(c.right));
}

/// The handler's poll unlinks what the interrupted one had linked; that one starts again.
TEST_F(Sleepers, AHandlerMayPollInsideAPoll) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  poll::Sleeper& mine = poll::Sleeper::mine();
  const poll::Sleeper::Visit outer(mine);
  ASSERT_NE(mine.link(*FdTable::stream(c.right)), nullptr);
  EXPECT_EQ(poll_one(c.right, POLLIN, 1), 0);
  pollfd bell{mine.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&bell, 1, 0), 1) << "the outer call has to look again";
}

long no_eventfd(long nr, long a, long b, long c, long d, long e, long f) noexcept {
  return nr == SYS_eventfd2 ? -EMFILE : raw_syscall(nr, a, b, c, d, e, f);
}

TEST_F(Sleepers, WithoutADescriptorForABellPollStillWakes) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const OtherDoor door(&no_eventfd);
  std::thread([&] {
    EXPECT_EQ(poll_one(c.right, POLLIN, 30), 0);
    std::thread peer([&] {
      nap_us(30'000);
      ASSERT_EQ(do_send(c.left, "a", 1), 1);
    });
    EXPECT_EQ(poll_one(c.right, POLLIN, 20'000), POLLIN);
    peer.join();
    char byte;
    ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
    peer = std::thread([&] {  // news of this process only
      nap_us(30'000);
      ASSERT_EQ(do_shutdown(c.right, SHUT_RD), 0);
    });
    EXPECT_NE(poll_one(c.right, POLLIN | POLLRDHUP, 20'000), 0);
    peer.join();
  }).join();
}

}  // namespace
}  // namespace rsock
