// close, dup, fcntl, fdopen, and what processes do to descriptors, over a core that only remembers.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/close_range.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "core/base/inside.h"
#include "tests/preload/fake_core.h"

namespace rsock {
namespace {

using fake::calls;
using stream::FdKind;
using stream::FdTable;
using testing::ElementsAre;
using testing::IsEmpty;

bool is_open(int fd) { return syscall(SYS_fcntl, fd, F_GETFD) >= 0; }
std::string line(const char* call, int a) { return fake::line("%s %d", call, a); }
std::string line(const char* call, int a, int b) { return fake::line("%s %d %d", call, a, b); }

class Descriptors : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    // Forks concern us once a TCP socket has been seen.
    ::close(::socket(AF_INET, SOCK_STREAM, 0));
  }
  void SetUp() override {
    fake::reset();
    ASSERT_EQ(::pipe(pipe_), 0);
    // Numbers of our own, far from what the test framework uses.
    ours_ = ::fcntl(pipe_[0], F_DUPFD, 100);
    FdTable::set(ours_, FdKind::kStream, fake::fake_stream());
  }
  void TearDown() override {
    fake::reset();
    ::close(pipe_[0]), ::close(pipe_[1]), ::close(ours_);
  }
  int pipe_[2];
  int ours_;
};

TEST_F(Descriptors, CloseAsksTheCoreFirst) {
  EXPECT_EQ(::close(ours_), 0);
  EXPECT_FALSE(is_open(ours_));
  EXPECT_THAT(calls(), ElementsAre(line("before_close", ours_)));
}

TEST_F(Descriptors, AnInternalOneIsNotThereForTheProgram) {
  FdTable::set(ours_, FdKind::kInternal);
  EXPECT_EQ(::close(ours_), -1);
  EXPECT_EQ(errno, EBADF);
  EXPECT_EQ(::fcntl(ours_, F_GETFD), -1);
  EXPECT_EQ(errno, EBADF);
  EXPECT_EQ(::dup2(pipe_[0], ours_), -1);
  EXPECT_EQ(errno, EBADF);
  EXPECT_TRUE(is_open(ours_) || errno == EBADF);
  EXPECT_THAT(calls(), IsEmpty());
  const InsideLibrary guard;  // a library that works for us may close it
  EXPECT_EQ(::close(ours_), 0);
}

TEST_F(Descriptors, Dup2OntoALiveStreamClosesItFirst) {
  EXPECT_EQ(::dup2(pipe_[0], ours_), ours_);
  EXPECT_THAT(calls(), ElementsAre(line("before_close", ours_)));
}

TEST_F(Descriptors, ADup2ThatWillFailTouchesNothing) {
  EXPECT_EQ(::dup2(9999, ours_), -1);
  EXPECT_EQ(errno, EBADF);
  EXPECT_EQ(::dup3(pipe_[0], ours_, O_NONBLOCK), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(::dup3(ours_, ours_, 0), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(::dup2(ours_, ours_), ours_);
  EXPECT_THAT(calls(), IsEmpty());
}

TEST_F(Descriptors, EveryKindOfCopyIsNoted) {
  const int a = ::dup(ours_);
  const int b = ::dup2(ours_, 201);
  const int c = ::dup3(ours_, 202, O_CLOEXEC);
  const int d = ::fcntl(ours_, F_DUPFD, 203);
  const int e = ::fcntl(ours_, F_DUPFD_CLOEXEC, 203);
  EXPECT_THAT(calls(), ElementsAre(line("on_dup", ours_, a), line("on_dup", ours_, 201),
                                   line("on_dup", ours_, 202), line("on_dup", ours_, d),
                                   line("on_dup", ours_, e)));
  for (int fd : {a, b, c, d, e}) ::close(fd);
}

TEST_F(Descriptors, FlagsAreToldAfterTheyWereSet) {
  EXPECT_EQ(::fcntl(ours_, F_SETFL, O_NONBLOCK), 0);
  EXPECT_EQ(::fcntl(ours_, F_SETFD, FD_CLOEXEC), 0);
  EXPECT_THAT(calls(), ElementsAre(line("on_set_flags", O_NONBLOCK)));
}

TEST_F(Descriptors, CloseRangeLeavesOurOwnOut) {
  const int internal = ::fcntl(pipe_[0], F_DUPFD, 210);
  const int stream = ::fcntl(pipe_[0], F_DUPFD, 211);
  const int behind = ::fcntl(pipe_[0], F_DUPFD, 212);
  FdTable::set(internal, FdKind::kInternal);
  FdTable::set(stream, FdKind::kStream, fake::fake_stream());
  EXPECT_EQ(::close_range(210, ~0u, CLOSE_RANGE_CLOEXEC), 0);
  EXPECT_THAT(calls(), IsEmpty());
  EXPECT_EQ(::close_range(210, ~0u, 0), 0);
  EXPECT_FALSE(is_open(stream) || is_open(behind));
  EXPECT_THAT(calls(), ElementsAre(line("before_close", stream)));
  FdTable::clear(internal);
  EXPECT_TRUE(is_open(internal));
  ::close(internal);
  EXPECT_EQ(::close_range(5, 4, 0), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(Descriptors, ClosefromLeavesOurOwnOut) {
  const int internal = ::fcntl(pipe_[0], F_DUPFD, 220);
  const int behind = ::fcntl(pipe_[0], F_DUPFD, 221);
  FdTable::set(internal, FdKind::kInternal);
  ::closefrom(220);
  EXPECT_FALSE(is_open(behind));
  FdTable::clear(internal);
  EXPECT_TRUE(is_open(internal));
  ::close(internal);
}

TEST_F(Descriptors, FdopenPinsAndForgets) {
  FILE* file = ::fdopen(ours_, "r");
  ASSERT_NE(file, nullptr);
  EXPECT_EQ(FdTable::word(ours_), 0u);
  EXPECT_THAT(calls(),
              ElementsAre(line("pin_to_tcp", ours_) + " fdopen", line("before_close", ours_)));
  ::fclose(file);
}

TEST_F(Descriptors, SplicePinsBothEnds) {
  EXPECT_EQ(::splice(ours_, nullptr, pipe_[1], nullptr, 1, SPLICE_F_NONBLOCK), -1);
  EXPECT_THAT(calls(), ElementsAre(line("pin_to_tcp", ours_) + " splice"));
}

TEST_F(Descriptors, SendfileReachesTheCoreForAStream) {
  EXPECT_EQ(::sendfile(ours_, pipe_[0], nullptr, 3), -1);
  EXPECT_THAT(calls(), ElementsAre(line("sendfile", ours_, pipe_[0]) + " 3"));
}

// --- processes -------------------------------------------------------------------------------

void wait_for(pid_t pid) {
  int status = -1;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(Descriptors, ForkSetsDownFirstAndTakesTheLocksLast) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(0);
  wait_for(pid);
  const std::vector<std::string> all = calls();
  ASSERT_EQ(all.size(), 5u);
  EXPECT_THAT(std::vector<std::string>(all.begin(), all.begin() + 2),
              ElementsAre("prepare_fork", "before_fork"));
  EXPECT_THAT(
      std::vector<std::string>(all.begin() + 2, all.end()),
      testing::UnorderedElementsAre("after_fork_parent 0", "after_fork_child", "before_exit"));
}

TEST_F(Descriptors, AForkedChildMayChangeItsTable) {
  const pid_t pid = ::fork();
  if (pid == 0) ::close(ours_), ::_exit(0);
  wait_for(pid);
  EXPECT_THAT(calls(), testing::Contains(line("before_close", ours_)));
  EXPECT_NE(FdTable::word(ours_), 0u);  // ours is another memory
}

TEST_F(Descriptors, UnderscoreForkGoesWithoutHandlers) {
  const pid_t pid = ::_Fork();
  if (pid == 0) ::_exit(0);
  wait_for(pid);
  EXPECT_THAT(calls(), testing::UnorderedElementsAre("before_fork", "after_fork_parent 0",
                                                     "after_fork_child", "before_exit"));
}

TEST_F(Descriptors, AForkByNumberIsAFork) {
  const long pid = ::syscall(SYS_clone, SIGCHLD, 0L, 0L, 0L, 0L, 0L);
  if (pid == 0) ::_exit(0);
  wait_for(static_cast<pid_t>(pid));
  EXPECT_THAT(calls(), testing::UnorderedElementsAre("before_fork", "after_fork_parent 0",
                                                     "after_fork_child", "before_exit"));
}

TEST_F(Descriptors, CloneIsAForkUnlessMemoryIsShared) {
  alignas(16) static char stack[64 * 1024];
  int arg = 0;
  const auto body = [](void* value) { return *static_cast<int*>(value); };
  wait_for(::clone(body, stack + sizeof(stack), SIGCHLD, &arg));
  EXPECT_THAT(calls(), testing::IsSupersetOf({"before_fork", "after_fork_child"}));
  fake::reset();
  wait_for(::clone(body, stack + sizeof(stack), CLONE_VM | CLONE_VFORK | SIGCHLD, &arg));
  EXPECT_THAT(calls(), ElementsAre("before_spawn"));
}

TEST_F(Descriptors, AChildOfVforkChangesNothingOfOurs) {
  // volatile: the child runs on the same stack.
  volatile pid_t pid = ::vfork();
  if (pid == 0) {
    ::close(ours_);
    ::dup2(pipe_[0], 230);
    ::execl("/nonexistent/program", "program", nullptr);
    ::_exit(0);
  }
  wait_for(pid);
  EXPECT_THAT(calls(), ElementsAre("before_spawn"));
  EXPECT_NE(FdTable::word(ours_), 0u);
  EXPECT_TRUE(is_open(ours_) || FdTable::word(ours_) != 0);
}

TEST_F(Descriptors, ExecAndSpawnAreTold) {
  EXPECT_EQ(::execl("/nonexistent/program", "program", "one", "two", nullptr), -1);
  EXPECT_EQ(errno, ENOENT);
  pid_t pid;
  char name[] = "true";
  char* const argv[] = {name, nullptr};
  EXPECT_EQ(::posix_spawnp(&pid, "true", nullptr, nullptr, argv, environ), 0);
  wait_for(pid);
  EXPECT_EQ(::system("exit 0"), 0);
  EXPECT_EQ(::pclose(::popen("exit 0", "r")), 0);
  EXPECT_THAT(calls(), ElementsAre("before_exec", "after_failed_exec", "before_spawn",
                                   "before_spawn", "before_spawn"));
}

TEST_F(Descriptors, ASpawnWithActionsKnowsWhatTheyCopy) {
  posix_spawn_file_actions_t actions;
  ASSERT_EQ(::posix_spawn_file_actions_init(&actions), 0);
  ASSERT_EQ(::posix_spawn_file_actions_adddup2(&actions, ours_, 0), 0);
  pid_t pid;
  char name[] = "true";
  char* const argv[] = {name, nullptr};
  (void)::posix_spawnp(&pid, "true", &actions, nullptr, argv, environ);
  ::posix_spawn_file_actions_destroy(&actions);
  wait_for(pid);
  EXPECT_THAT(calls(), ElementsAre("before_spawn with copies"));
}

TEST_F(Descriptors, AChildOfVforkThatKeepsAStreamSaysSo) {
  volatile pid_t pid = ::vfork();
  if (pid == 0) {
    (void)::dup(pipe_[0]);
    (void)::dup2(ours_, 231);
    (void)::dup3(ours_, 232, O_CLOEXEC);
    (void)::dup(ours_);
    (void)::fcntl(ours_, F_DUPFD_CLOEXEC, 233);
    (void)::fcntl(ours_, F_DUPFD, 234);
    (void)::fcntl(ours_, F_SETFD, FD_CLOEXEC);
    (void)::fcntl(ours_, F_SETFD, 0);
    (void)::ioctl(ours_, FIONCLEX);
    ::_exit(0);
  }
  wait_for(pid);
  const std::string kept = "leave_to_child " + std::to_string(ours_);
  EXPECT_THAT(calls(),
              testing::AllOf(testing::Contains(kept).Times(7), testing::Contains("before_spawn")));
}

TEST_F(Descriptors, ExeclPassesItsArgumentsAndItsEnvironment) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    char variable[] = "X=7";
    char* const envp[] = {variable, nullptr};
    ::execle("/bin/sh", "sh", "-c", "test $1$X = 57", "sh", "5", nullptr, envp);
    ::_exit(1);
  }
  wait_for(pid);
}

TEST_F(Descriptors, EveryWayOutIsTold) {
  void (*const ways[])(int) = {::exit, ::_exit, ::_Exit, ::quick_exit,
                               [](int) { ::syscall(SYS_exit_group, 0L); }};
  for (auto* way : ways) {
    fake::reset();
    const pid_t pid = ::fork();
    if (pid == 0) way(0);
    wait_for(pid);
    EXPECT_THAT(calls(), testing::Contains("before_exit"));
  }
}

}  // namespace
}  // namespace rsock
