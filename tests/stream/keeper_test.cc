// The keeper's own life: forks while it is at work, numbers that change hands while it asks about
// them, refusals that pass, and who may start it.
//
// os::set_door stands between core and the kernel and meddles where a test says so.

#include <dirent.h>
#include <linux/netlink.h>
#include <signal.h>
#include <sys/epoll.h>

#include <thread>

#include "core/base/clock.h"
#include "core/os/os.h"
#include "core/stream/keeper_loop.h"
#include "core/transport/shm/segment_pool.h"
#include "tests/stream/impostor.h"
#include "tests/stream/loopback.h"

namespace rsock {
namespace {

using namespace rsock::testing;

/// Called before a call of core's goes to the kernel; < 0 is the answer instead.
using Meddler = long (*)(long number, long a, long b, long c);
std::atomic<Meddler> g_meddler{nullptr};

long door(long number, long a, long b, long c, long d, long e, long f) noexcept {
  if (const Meddler meddler = g_meddler.load(std::memory_order_acquire)) {
    if (const long r = meddler(number, a, b, c); r < 0) return r;
  }
  return raw_syscall(number, a, b, c, d, e, f);
}

// Once, before any thread: the door is not made to change under a keeper.
[[maybe_unused]] const bool g_installed = (os::set_door(&door), true);

class Keeper : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536"}); }
  void TearDown() override {
    g_meddler = nullptr;
    stream::set_first_pause(10'000'000'000);
  }
};

std::string reason_of(int fd) {
  const char* reason = FdTable::stream(fd)->not_lifted.load();
  return reason != nullptr ? reason : "";
}

int keeper_threads() {
  int found = 0;
  DIR* dir = ::opendir("/proc/self/task");
  while (const dirent* entry = ::readdir(dir)) {
    std::ifstream name("/proc/self/task/" + std::string(entry->d_name) + "/comm");
    std::string text;
    if (std::getline(name, text) && text == "rsock-keeper") ++found;
  }
  ::closedir(dir);
  return found;
}

std::atomic<bool> g_at_work{false};

TEST_F(Keeper, AForkMeetsItWithNothingInTheMaking) {
  g_at_work = false;
  // It has a netlink socket open, and takes its time.
  g_meddler = [](long number, long, long, long c) -> long {
    if (number != SYS_sendto || c != 72) return 0;  // the size of a question to sock_diag
    g_at_work = true;
    nap_us(200'000);
    return 0;
  };
  Connection c = Connection::make();
  ASSERT_TRUE(echoes(c.left, c.right, 100));
  ASSERT_TRUE(eventually([] { return g_at_work.load(); }));
  const uint64_t limit = os::rlimit_nofile_soft();
  const int floor = static_cast<int>(std::min<uint64_t>(60'000, limit - limit / 4));
  ASSERT_NE(::fcntl(floor, F_GETFD), -1) << "that is where internal descriptors are";
  stream::before_fork();
  const pid_t child = ::fork();
  if (child == 0) {
    stream::after_fork_child();
    int internal = 0;
    for (int fd = floor; fd < floor + 256; ++fd) {
      if (::fcntl(fd, F_GETFD) != -1) ++internal;
    }
    _exit(internal);
  }
  stream::after_fork_parent(false);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  // The child's own: the end of the pipe by which its parent hears of its death (lineage.h).
  EXPECT_EQ(WEXITSTATUS(status), 1) << "the others are the parent's keeper's";
  g_meddler = nullptr;
}

TEST_F(Keeper, ForksInARowWhileItIsBusyEndWell) {
  std::vector<Connection> connections;
  for (int i = 0; i < 8; ++i) connections.push_back(Connection::make());
  for (int round = 0; round < 20; ++round) {
    for (Connection& c : connections) EXPECT_EQ(do_send(c.left, "x", 1), 1);
    stream::prepare_fork();
    stream::before_fork();
    const pid_t child = ::fork();
    if (child == 0) {
      stream::after_fork_child();
      Connection c = Connection::make();
      _exit(ping_until_lifted(c) ? 0 : 1);
    }
    stream::after_fork_parent(child < 0);
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  for (Connection& c : connections) {
    char bytes[64];
    size_t got = 0;
    while (got < 20) {
      const long r = do_recv(c.right, bytes, sizeof(bytes));
      ASSERT_GT(r, 0);
      got += static_cast<size_t>(r);
    }
    EXPECT_EQ(got, 20u);
  }
}

// --- a number that changes hands -----------------------------------------------------------------

int g_number = -1;  // a name of the stream that the keeper asks about
int g_other = -1;   // the connection that gets the number
std::atomic<bool> g_swapped{false};

long swap() {
  if (g_swapped.exchange(true)) return 0;
  close_fd(g_number);
  EXPECT_EQ(::dup2(g_other, g_number), g_number);
  return 0;
}

class ChangedHands : public Keeper, public ::testing::WithParamInterface<Meddler> {};

TEST_P(ChangedHands, NeverPutsTheChannelOfOneConnectionUnderAnother) {
  // The stream has two names, and the keeper's is the first. The other connection's peer looks for
  // its own other end, which is no stream.
  configure({"RSOCK_RING_BYTES=65536", "RSOCK_LIFT_CALLS=1000000", "RSOCK_LIFT_BYTES=1000000"});
  Connection c = Connection::make();
  Connection other = Connection::make(false, true);
  const int second = ::dup(c.left);
  stream::on_dup(c.left, second);
  Stream& s = *FdTable::stream(c.left);
  g_number = std::exchange(c.left, second);
  g_other = other.left;
  g_swapped = false;
  g_meddler = GetParam();
  configure({"RSOCK_RING_BYTES=65536"});
  ASSERT_EQ(do_send(c.left, "a", 1), 1);
  ASSERT_TRUE(eventually([] { return g_swapped.load(); }));
  ::send(other.left, "b", 1, 0);
  char byte = 0;
  ASSERT_EQ(do_recv(other.right, &byte, 1), 1);
  EXPECT_EQ(byte, 'b');
  EXPECT_TRUE(eventually([&] { return !reason_of(c.left).empty(); }));
  nap_us(50'000);
  EXPECT_FALSE(s.has_channel.load());
  EXPECT_FALSE(has_channel(other.right));
  ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
  EXPECT_EQ(byte, 'a');
  g_meddler = nullptr;
  ::close(g_number);
}

INSTANTIATE_TEST_SUITE_P(Moments, ChangedHands,
                         ::testing::Values(
                             [](long number, long a, long, long) -> long {
                               return number == SYS_getsockname && a == g_number ? swap() : 0;
                             },
                             [](long number, long a, long, long c) -> long {
                               return number == SYS_getsockopt && a == g_number && c == SO_COOKIE
                                          ? swap()
                                          : 0;
                             }));

// --- refusals ------------------------------------------------------------------------------------

TEST_F(Keeper, ARefusalThatPassesIsForgottenAfterAWhile) {
  // A parked segment of a former stream would be taken, and none made.
  (void)transport::tidy_segments(monotonic_ns() + 60'000'000'000);
  stream::set_first_pause(1'000'000);
  g_meddler = [](long number, long, long, long) -> long {
    return number == SYS_memfd_create ? -ENOMEM : 0;
  };
  Connection c = Connection::make();
  ASSERT_TRUE(echoes(c.left, c.right, 1000));
  const auto refused = [&] {
    const std::string no = "no memory for a channel";
    return reason_of(c.left) == no || reason_of(c.right) == no;
  };
  ASSERT_TRUE(eventually(refused));
  g_meddler = nullptr;
  EXPECT_TRUE(ping_until_lifted(c)) << "the same stream";
}

TEST_F(Keeper, ARefusalForGoodIsNotTriedAgain) {
  stream::set_first_pause(1'000'000);
  static std::atomic<int> questions;
  questions = 0;
  g_meddler = [](long number, long a, long, long) -> long {
    if (number != SYS_socket || a != AF_NETLINK) return 0;
    ++questions;
    return -EPERM;
  };
  Connection c = Connection::make(true, false);
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(do_send(c.left, "x", 1), 1);
    nap_us(1'000);
  }
  EXPECT_EQ(reason_of(c.left), "sock_diag refused");
  EXPECT_EQ(questions, 1);
}

TEST_F(Keeper, ACallerThatCannotBeAcceptedIsNoReasonToSpin) {
  static std::atomic<int> refused;
  refused = 0;
  g_meddler = [](long number, long, long, long) -> long {
    if (number != SYS_accept4) return 0;
    ++refused;
    return -EMFILE;
  };
  Connection c = connect_to_impostor(StreamIs::kCallee);
  ASSERT_EQ(do_send(c.left, "x", 1), 1);
  Impostor peer(c.right);
  ASSERT_TRUE(peer.call_up());
  EXPECT_TRUE(eventually([&] { return reason_of(c.left) == "no descriptor left"; }));
  nap_us(20'000);
  EXPECT_LE(refused, 2);
}

// --- what only the kernel does -------------------------------------------------------------------

TEST_F(Keeper, TimeStampsAskedForBeforeTheConnectionKeepItOnTcp) {
  for (const int name : {SO_TIMESTAMP_OLD, SO_TIMESTAMPNS_OLD, SO_TIMESTAMP_NEW, SO_TIMESTAMPNS_NEW,
                         SO_TIMESTAMPING_OLD, SO_TIMESTAMPING_NEW}) {
    configure({"RSOCK_LIFT_CALLS=1000000", "RSOCK_LIFT_BYTES=1000000"});
    Connection c = Connection::make();
    const int on = 1;  // of SO_TIMESTAMPING: TX_HARDWARE
    ASSERT_EQ(::setsockopt(c.left, SOL_SOCKET, name, &on, sizeof(on)), 0) << name;
    configure();
    ASSERT_TRUE(echoes(c.left, c.right, 1000));
    EXPECT_TRUE(eventually([&] { return reason_of(c.left) == "SO_TIMESTAMP"; })) << name;
  }
}

// --- RSOCK_PATH=rdma without a device ------------------------------------------------------------

TEST(NoDevice, IsOneWarningAndTcpGoesOn) {
  char name[] = "/tmp/rsock-keeper-log-XXXXXX";
  const int fd = ::mkstemp(name);
  ASSERT_GE(fd, 0);
  configure({"RSOCK_PATH=rdma", "RSOCK_LOG_FILE=" + std::string(name)});
  for (int i = 0; i < 3; ++i) {
    Connection c = Connection::make();
    EXPECT_TRUE(echoes(c.left, c.right, 100'000));
    EXPECT_TRUE(eventually([&] { return reason_of(c.left) == "no RDMA device"; }));
    EXPECT_TRUE(eventually([&] { return reason_of(c.right) == "no RDMA device"; }));
  }
  std::ifstream log(name);
  std::string line;
  int lines = 0;
  while (std::getline(log, line)) {
    EXPECT_NE(line.find("no RDMA device"), std::string::npos) << line;
    EXPECT_NE(line.find(" warn: "), std::string::npos) << line;
    ++lines;
  }
  EXPECT_EQ(lines, 1);
  ::close(fd);
  ::unlink(name);
}

TEST(NoDevice, UnderStrictTheConnectionFailsAtOnce) {
  configure({"RSOCK_PATH=rdma", "RSOCK_STRICT=1"});
  Connection c = Connection::make();
  EXPECT_TRUE(eventually([&] { return do_send(c.left, "x", 1) == -ECONNABORTED; }, 4'000));
}

// --- who may start it ----------------------------------------------------------------------------

TEST_F(Keeper, IsNotStartedByAThreadThatMayBeInASignalHandler) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer runs handlers at a time of its own, with nothing blocked";
#endif
  const pid_t child = ::fork();
  if (child == 0) {
    stream::after_fork_child();
    Connection c = Connection::make();
    static int in_handler = -1;
    static int sender;
    sender = c.left;
    ::signal(SIGUSR1, [](int) {
      const int saved_errno = errno;
      (void)do_send(sender, "x", 1);
      in_handler = keeper_threads();
      errno = saved_errno;
    });
    ::raise(SIGUSR1);
    const bool none_in_handler = in_handler == 0;
    (void)do_send(c.left, "x", 1);
    const bool one_after = eventually([] { return keeper_threads() == 1; });
    // A thread that blocks a signal for good gets there as well.
    _exit(none_in_handler && one_after ? 0 : 1 + none_in_handler);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(Keeper, IsStartedByThreadsThatAlwaysBlockSignals) {
  const pid_t child = ::fork();
  if (child == 0) {
    stream::after_fork_child();
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
    Connection c = Connection::make();
    _exit(ping_until_lifted(c) ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace rsock
