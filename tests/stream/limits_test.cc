// What the machine refuses: descriptors, memory, a system call that a sandbox forbids. The stream
// stays on TCP, says why, and every byte flows; when the refusal ends, other streams are lifted
// again.
//
// os::set_door stands between core and the kernel: one kind of call is refused, everything else
// passes.

#include <linux/netlink.h>
#include <sys/epoll.h>

#include <thread>

#include "core/os/os.h"
#include "core/stream/keeper_loop.h"
#include "core/transport/shm/segment_pool.h"
#include "tests/stream/loopback.h"

namespace rsock {
namespace {

using namespace rsock::testing;

/// Null: not this call. Else the errno that it gets.
using Refuses = int (*)(long number, long a, long b);
std::atomic<Refuses> g_refuses{nullptr};
std::atomic<int> g_refused{0};

long door_with_refusals(long number, long a, long b, long c, long d, long e, long f) noexcept {
  if (const Refuses refuses = g_refuses.load(std::memory_order_acquire)) {
    if (const int error = refuses(number, a, b); error != 0) {
      g_refused.fetch_add(1, std::memory_order_relaxed);
      return -error;
    }
  }
  return raw_syscall(number, a, b, c, d, e, f);
}

// Once, before any thread: the door is not made to change under a keeper.
[[maybe_unused]] const bool g_installed = (os::set_door(&door_with_refusals), true);

struct Limit {
  const char* name;
  Refuses refuses;
  const char* reason;
};
void PrintTo(const Limit& limit, std::ostream* out) { *out << limit.name; }

class Limits : public ::testing::TestWithParam<Limit> {
 protected:
  void SetUp() override {
    configure({"RSOCK_RING_BYTES=65536"});
    (void)transport::tidy_segments(UINT64_MAX);  // what an earlier stream left would do as well
  }
  void TearDown() override { g_refuses = nullptr; }
};

TEST_P(Limits, TheStreamStaysOnTcpWithTheReasonAndTheBytesFlow) {
  g_refused = 0;
  g_refuses.store(GetParam().refuses, std::memory_order_release);
  Connection c = Connection::make();
  Stream& left = *FdTable::stream(c.left);
  Stream& right = *FdTable::stream(c.right);
  EXPECT_TRUE(echoes(c.left, c.right, 10'000));
  EXPECT_TRUE(eventually([&] {
    for (const Stream* s : {&left, &right}) {
      const char* reason = s->not_lifted.load();
      if (reason != nullptr && std::string(reason) == GetParam().reason) return true;
    }
    return false;
  })) << "left: "
      << (left.not_lifted.load() ? left.not_lifted.load() : "-")
      << ", right: " << (right.not_lifted.load() ? right.not_lifted.load() : "-");
  EXPECT_GT(g_refused.load(), 0);
  EXPECT_FALSE(has_channel(c.left));
  EXPECT_FALSE(has_channel(c.right));
  EXPECT_TRUE(echoes(c.left, c.right, 300'000));
  EXPECT_EQ(left.sent[1].load() + right.sent[1].load(), 0u);

  g_refuses = nullptr;
  Connection later = Connection::make();
  EXPECT_TRUE(ping_until_lifted(later)) << "the next stream has a chance again";
  EXPECT_TRUE(echoes(later.left, later.right, 300'000));
}

constexpr Limit kLimits[] = {
    {"NoMemfd", [](long n, long, long) { return n == SYS_memfd_create ? ENOSYS : 0; },
     "no memory for a channel"},
    {"MemfdForbidden", [](long n, long, long) { return n == SYS_memfd_create ? EPERM : 0; },
     "no memory for a channel"},
    {"NoSpace", [](long n, long, long) { return n == SYS_ftruncate ? ENOSPC : 0; },
     "no memory for a channel"},
    {"NoDescriptor",
     [](long n, long a, long b) {
       return n == SYS_socket && a == AF_UNIX && (b & 0xf) == SOCK_STREAM ? EMFILE : 0;
     },
     "no descriptor left"},
    {"SockDiagForbidden",
     [](long n, long a, long) { return n == SYS_socket && a == AF_NETLINK ? EPERM : 0; },
     "sock_diag refused"},
    {"BindForbidden", [](long n, long, long) { return n == SYS_bind ? EACCES : 0; },
     "the rendezvous name is taken"},
    {"MappingRefused", [](long n, long, long) { return n == SYS_mmap ? ENOMEM : 0; },
     "no memory for a channel"},
};
INSTANTIATE_TEST_SUITE_P(Kernel, Limits, ::testing::ValuesIn(kLimits),
                         [](const ::testing::TestParamInfo<Limit>& info) {
                           return info.param.name;
                         });

/// The helper thread's own descriptors: a process is marked for good, so it happens in one that
/// ends.
struct Birth {
  const char* name;
  Refuses refuses;
};
void PrintTo(const Birth& birth, std::ostream* out) { *out << birth.name; }
class NoKeeper : public ::testing::TestWithParam<Birth> {};

TEST_P(NoKeeper, LeavesEveryStreamOnTcp) {
  const pid_t child = ::fork();
  if (child == 0) {
    stream::after_fork_child();  // of the former tests' keeper nothing is left here
    configure();
    g_refuses.store(GetParam().refuses, std::memory_order_release);
    Connection c = Connection::make();
    const bool flows = static_cast<bool>(echoes(c.left, c.right, 300'000));
    const char* reason = FdTable::stream(c.left)->not_lifted.load();
    const bool said = reason != nullptr && std::string(reason) == "no helper thread";
    _exit(flows && said && !has_channel(c.left) ? 0 : flows ? 2 : 3);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

constexpr Birth kBirths[] = {
    {"NoEpoll", [](long n, long, long) { return n == SYS_epoll_create1 ? EMFILE : 0; }},
    {"NoEventfd", [](long n, long, long) { return n == SYS_eventfd2 ? ENOSYS : 0; }},
    {"NoDatagramSocket",
     [](long n, long a, long) { return n == SYS_socket && a == AF_UNIX ? EAFNOSUPPORT : 0; }},
    {"NoEpollCtl", [](long n, long, long) { return n == SYS_epoll_ctl ? EPERM : 0; }},
    {"NoRandomness", [](long n, long, long) { return n == SYS_getrandom ? ENOSYS : 0; }},
};
INSTANTIATE_TEST_SUITE_P(Births, NoKeeper, ::testing::ValuesIn(kBirths),
                         [](const ::testing::TestParamInfo<Birth>& info) {
                           return info.param.name;
                         });

/// Lifted, and then the kernel refuses what the keeper needs to watch: no byte depends on it.
TEST(LimitsOfALiftedStream, NoDescriptorForASleepingPollIsSaidNotHidden) {
  configure({"RSOCK_SPIN_US=0"});
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  g_refuses = [](long n, long, long) { return n == SYS_eventfd2 ? EMFILE : 0; };
  std::thread sleeper([&] {  // a thread that never slept in poll before: it has no bell yet
    pollfd p{c.left, POLLIN, 0};
    const timespec limit{0, 1'000'000};
    const long r = poll::poll(&p, 1, &limit, nullptr, [] { return 0L; });
    EXPECT_TRUE(r == -ENOMEM || r == 0) << r;
  });
  sleeper.join();
  g_refuses = nullptr;
  EXPECT_TRUE(echoes(c.left, c.right, 100'000));
}

/// A full ring and nobody who reads, then a set-down: far more is owed than TCP takes.
size_t owe_a_replay(const Connection& c) {
  const int small = 4096;
  ::setsockopt(c.left, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
  const std::string bytes(1 << 20, 'x');
  size_t sent = 0;
  for (long r; (r = do_send(c.left, bytes.data(), bytes.size(), MSG_DONTWAIT)) > 0;)
    sent += static_cast<size_t>(r);
  stream::set_down(*FdTable::stream(c.left), "test");
  return sent;
}

/// What arrives until the end, and -ECONNRESET or 0.
std::pair<size_t, long> receive_all(int fd) {
  std::string bytes(1 << 16, '\0');
  size_t got = 0;
  long r;
  while ((r = do_recv(fd, bytes.data(), bytes.size())) > 0) got += static_cast<size_t>(r);
  return {got, r};
}

void refuse_copies() {
  g_refuses = [](long n, long, long b) {
    return n == SYS_fcntl && (b == F_DUPFD_CLOEXEC || b == F_DUPFD) ? EMFILE : 0;
  };
}

TEST(LimitsOfALiftedStream, ADescriptorTableWithoutRoomForAnAdoptedStreamLosesNothing) {
  configure({"RSOCK_RING_BYTES=1048576"});
  // Twice: the number that is kept for this is there again.
  for (int i = 0; i < 2; ++i) {
    Connection c = Connection::make();
    ASSERT_TRUE(ping_until_lifted(c));
    refuse_copies();
    const size_t sent = owe_a_replay(c);
    close_fd(std::exchange(c.left, -1));
    EXPECT_EQ(receive_all(c.right), std::pair(sent, 0L));
    EXPECT_TRUE(eventually([] { return stream::inside().reserve.load() >= 0; }));
    g_refuses = nullptr;
  }
}

TEST(LimitsOfALiftedStream, TheSecondStreamThatFindsNoDescriptorWaitsForItsReader) {
  configure({"RSOCK_RING_BYTES=1048576"});
  Connection first = Connection::make();
  Connection second = Connection::make();
  ASSERT_TRUE(ping_until_lifted(first));
  ASSERT_TRUE(ping_until_lifted(second));
  refuse_copies();
  const size_t of_first = owe_a_replay(first);
  const size_t of_second = owe_a_replay(second);
  close_fd(std::exchange(first.left, -1));
  std::thread reader([&] { EXPECT_EQ(receive_all(second.right), std::pair(of_second, 0L)); });
  close_fd(std::exchange(second.left, -1));
  reader.join();
  EXPECT_EQ(receive_all(first.right), std::pair(of_first, 0L));
  g_refuses = nullptr;
}

/// SO_LINGER over shared memory: what is in the ring is in the peer's memory, as acknowledged bytes
/// are; a replay is not.
TEST(LimitsOfALiftedStream, LingerWaitsForAReplayAndNotForTheReader) {
  configure({"RSOCK_RING_BYTES=1048576"});
  const linger twenty{1, 20};
  for (const bool set_down : {false, true}) {
    Connection c = Connection::make();
    ASSERT_TRUE(ping_until_lifted(c));
    size_t sent = 0;
    if (set_down) {
      sent = owe_a_replay(c);
    } else {
      const std::string bytes(100'000, 'x');
      sent = static_cast<size_t>(do_send(c.left, bytes.data(), bytes.size()));
    }
    ASSERT_EQ(::setsockopt(c.left, SOL_SOCKET, SO_LINGER, &twenty, sizeof(twenty)), 0);
    std::atomic<bool> reads{false};
    std::thread reader([&] {
      nap_us(set_down ? 500'000 : 3'000'000);
      reads = true;
      EXPECT_EQ(receive_all(c.right), std::pair(sent, 0L));
    });
    close_fd(std::exchange(c.left, -1));
    EXPECT_EQ(reads, set_down);
    reader.join();
  }
}

/// Nobody reads, nothing moves: the second one can't wait for ever, and does not end cleanly.
TEST(LimitsOfALiftedStream, WithoutADescriptorAndAReaderTheEndIsAReset) {
  configure({"RSOCK_RING_BYTES=1048576"});
  Connection first = Connection::make();
  Connection second = Connection::make();
  ASSERT_TRUE(ping_until_lifted(first));
  ASSERT_TRUE(ping_until_lifted(second));
  refuse_copies();
  const size_t of_first = owe_a_replay(first);
  (void)owe_a_replay(second);
  close_fd(std::exchange(first.left, -1));
  close_fd(std::exchange(second.left, -1));
  EXPECT_EQ(receive_all(second.right).second, -ECONNRESET);
  EXPECT_EQ(receive_all(first.right), std::pair(of_first, 0L));
  g_refuses = nullptr;
}

}  // namespace
}  // namespace rsock
