// What a fork made is gone: the stream is lifted again, and not a moment earlier.

#include "core/stream/lineage.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>

#include <optional>

#include "core/stream/holders.h"
#include "tests/stream/forking.h"

namespace rsock::stream {
namespace {

using namespace rsock::testing;

/// Linked into a stream as an item of an epoll instance is.
struct Item : Watcher {
  bool survives_fork() const noexcept override { return true; }
  void on_maybe_ready(Stream&) noexcept override {}
  void on_path_changed(Stream&) noexcept override {}
  void on_closed(Stream&) noexcept override {}
};

class Lineages : public ::testing::Test {
 protected:
  void SetUp() override {
    configure({"RSOCK_RING_BYTES=65536"});
    ASSERT_EQ(::pipe2(go_, O_CLOEXEC), 0);
    made_.emplace(Connection::make());
    c_ = {made_->left, made_->right};
    ASSERT_TRUE(ping_until_lifted(*made_));
  }
  void TearDown() override {
    ::close(go_[0]);
    ::close(go_[1]);
  }
  void set_cloexec(int flag) {
    for (const int fd : {c_.left, c_.right}) ASSERT_EQ(::fcntl(fd, F_SETFD, flag), 0);
  }
  Stream& left() { return *FdTable::stream(c_.left); }
  /// In a child: until the parent says so.
  void await() {
    char byte;
    (void)!::read(go_[0], &byte, 1);
  }
  void go() { ASSERT_EQ(::write(go_[1], "x", 1), 1); }
  [[noreturn]] static void die() {
    ask_kernel(SYS_exit_group, 0);
    __builtin_unreachable();
  }
  void expect_on_tcp() {
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(echoes(c_.left, c_.right, 10'000));
    EXPECT_FALSE(has_channel(c_.left));
    EXPECT_FALSE(sole_holder(left()));
  }
  /// As the stream's traffic would after a while: a try that failed is not repeated at once.
  bool lifted_again() {
    return eventually([&] {
      left().lift_asked = left().pinned.load();
      FdTable::stream(c_.right)->lift_asked = FdTable::stream(c_.right)->pinned.load();
      char byte;
      for (auto [from, to] : {std::pair{c_.left, c_.right}, std::pair{c_.right, c_.left}}) {
        if (do_send(from, "x", 1) != 1 || do_recv(to, &byte, 1) != 1) return false;
      }
      return sends_in_ring(left()) && sends_in_ring(*FdTable::stream(c_.right));
    });
  }

  std::optional<Connection> made_;
  struct {
    int left, right;
  } c_;
  int go_[2];
};

TEST_F(Lineages, AChildThatDiesWithoutAWordIsTakenOff) {
  const pid_t child = fork_with_hooks();
  if (child == 0) await(), die();
  EXPECT_EQ(watched_lineages(), 1);
  expect_on_tcp();
  go();
  wait_for(child);
  EXPECT_TRUE(lifted_again());
  EXPECT_TRUE(echoes(c_.left, c_.right, 100'000));
  EXPECT_TRUE(eventually([] { return watched_lineages() == 0; }));
}

TEST_F(Lineages, AChildThatClosedBeforeItDiesIsNotTakenOffTwice) {
  const pid_t first = fork_with_hooks();
  if (first == 0) await(), die();
  const pid_t second = fork_with_hooks();
  if (second == 0) {
    close_fd(c_.left);
    close_fd(c_.right);
    die();
  }
  wait_for(second);
  EXPECT_TRUE(eventually([] { return watched_lineages() == 1; }));
  expect_on_tcp();
  go();
  wait_for(first);
  EXPECT_TRUE(lifted_again());
}

TEST_F(Lineages, AnotherProgramThatDoesNotGetTheStreamIsNoHolder) {
  set_cloexec(FD_CLOEXEC);
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    before_exec();
    ::execlp("sleep", "sleep", "60", nullptr);
    die();
  }
  EXPECT_TRUE(lifted_again());
  EXPECT_EQ(::kill(child, 0), 0) << "while it runs";
  ::kill(child, SIGKILL);
  wait_for(child);
}

TEST_F(Lineages, AnotherProgramThatGetsTheStreamKeepsItOnTcp) {
  set_cloexec(0);
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    before_exec();
    ::execlp("true", "true", nullptr);
    die();
  }
  wait_for(child);
  EXPECT_TRUE(eventually([] { return watched_lineages() == 0; }));
  expect_on_tcp();  // it may have given its copy to anybody
}

TEST_F(Lineages, AChildThatPassesItsCopyOnKeepsItOnTcp) {
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    give_away(left());
    die();
  }
  wait_for(child);
  EXPECT_TRUE(eventually([] { return watched_lineages() == 0; }));
  EXPECT_FALSE(sole_holder(left()));
  EXPECT_TRUE(sole_holder(*FdTable::stream(c_.right))) << "that one is the child's no more";
}

TEST_F(Lineages, AChildThatPassesItsCopyOnAndClosesIt) {
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    give_away(left());
    close_fd(c_.left);
    close_fd(c_.right);
    die();
  }
  wait_for(child);
  EXPECT_TRUE(eventually([] { return watched_lineages() == 0; }));
  expect_on_tcp();
}

TEST_F(Lineages, TheOneInTheMiddleClosesFirst) {
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    const pid_t grandchild = fork_with_hooks();
    if (grandchild == 0) await(), die();
    close_fd(c_.left);
    close_fd(c_.right);
    wait_for(grandchild);
    look_at_lineages();
    die();
  }
  nap_us(20'000);
  expect_on_tcp();
  go();
  wait_for(child);
  EXPECT_TRUE(lifted_again());
  EXPECT_EQ(left().holders->count.load(), 1u);
}

TEST_F(Lineages, TheChildrenOfTheChildBelongToIt) {
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    if (fork_with_hooks() == 0) await(), die();
    die();
  }
  wait_for(child);
  nap_us(20'000);
  expect_on_tcp();
  EXPECT_EQ(watched_lineages(), 1);
  go();
  EXPECT_TRUE(lifted_again());
}

TEST_F(Lineages, AGrandchildThatIsTakenOffByItsParentIsNotTakenOffByTheFirst) {
  int told[2];
  ASSERT_EQ(::pipe(told), 0);
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    const pid_t grandchild = fork_with_hooks();
    if (grandchild == 0) die();
    wait_for(grandchild);
    // Taken off here: a thread looks at it, as the keeper would.
    look_at_lineages();
    (void)!::write(told[1], "x", 1);
    await();
    die();
  }
  char byte;
  ASSERT_EQ(::read(told[0], &byte, 1), 1);
  expect_on_tcp();
  EXPECT_EQ(left().holders->count.load(), 2u) << "the parent and the child";
  go();
  wait_for(child);
  EXPECT_TRUE(lifted_again());
  EXPECT_EQ(left().holders->count.load(), 1u);
  ::close(told[0]);
  ::close(told[1]);
}

TEST_F(Lineages, AFailedForkLeavesNoTrace) {
  prepare_fork();
  before_fork();
  after_fork_parent(/*failed=*/true);
  EXPECT_EQ(watched_lineages(), 0);
  EXPECT_EQ(left().lent, 0u);
  EXPECT_TRUE(lifted_again());
}

TEST_F(Lineages, AStreamInASharedEpollInstanceWaitsForTheChildsEnd) {
  Item item;
  {
    MutexLock lock(left().watch_mutex);
    left().watchers.push_back(item);
  }
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    // Its copy is closed, but the instance still has the stream.
    const bool pinned = left().pinned;
    close_fd(c_.left);
    close_fd(c_.right);
    await();
    _exit(pinned ? 0 : 1);
  }
  EXPECT_TRUE(eventually([&] { return sole_holder(left()); }));
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(echoes(c_.left, c_.right, 10'000));
  EXPECT_FALSE(has_channel(c_.left));
  EXPECT_FALSE(left().pinned);
  go();
  EXPECT_EQ(wait_for(child), 0) << "the child's own stream stays on TCP";
  EXPECT_TRUE(lifted_again());
  MutexLock lock(left().watch_mutex);
  left().watchers.erase(left().watchers.iterator_to(item));
}

// accept, fork, close: whose children live long.
TEST_F(Lineages, StreamsThatAreClosedAreNotWaitedFor) {
  made_.reset();
  pid_t children[3 * kMostLineages / 2];
  for (pid_t& child : children) {
    Connection c = Connection::make();
    child = fork_with_hooks();
    if (child == 0) await(), die();
    close_fd(std::exchange(c.left, -1));
    close_fd(std::exchange(c.right, -1));
  }
  EXPECT_LE(watched_lineages(), kMostLineages / 2);
  for (size_t i = 0; i < std::size(children); ++i) go();
  for (const pid_t child : children) wait_for(child);
}

}  // namespace
}  // namespace rsock::stream
