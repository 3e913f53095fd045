// A fork against the library's first start in another thread: what was done before the fork is
// undone after it, and nothing else is. A program of its own: a process starts once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "preload/processes.h"
#include "preload/startup.h"
#include "tests/preload/fake_core.h"

namespace rsock::preload {
namespace {

using ::testing::Contains;
using ::testing::Not;
using ::testing::StartsWith;

TEST(ForkAndFirstStart, NothingIsUndoneThatWasNotDone) {
  fake::reset();
  ASSERT_FALSE(started());
  before_any_fork();
  std::thread other([] { (void)tracking(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(started()) << "nobody starts while a fork goes on";
  after_any_fork();
  other.join();
  EXPECT_TRUE(started());
  EXPECT_THAT(fake::calls(), Not(Contains(StartsWith("before_fork"))));
  EXPECT_THAT(fake::calls(), Not(Contains(StartsWith("after_fork"))));

  before_any_fork();
  after_any_fork();
  EXPECT_THAT(fake::calls(), Contains(StartsWith("before_fork")));
  EXPECT_THAT(fake::calls(), Contains(StartsWith("after_fork_parent")));
}

TEST(ForkAndFirstStart, AForkWithinAForkIsLeftAlone) {
  ASSERT_TRUE(tracking());
  before_any_fork();
  fake::reset();
  before_any_fork();  // a signal handler calls _Fork
  after_any_fork();
  EXPECT_THAT(fake::calls(), Not(Contains(StartsWith("before_fork"))));
  EXPECT_THAT(fake::calls(), Not(Contains(StartsWith("after_fork"))));
  after_any_fork();
  EXPECT_THAT(fake::calls(), Contains(StartsWith("after_fork_parent")));
}

}  // namespace
}  // namespace rsock::preload
