// Setting down when the other end is not there, does not read, or has ended: bounded waits, and
// every byte or an error.

#include <sys/sendfile.h>

#include <fstream>
#include <iterator>
#include <thread>

#include "core/base/clock.h"
#include "core/stream/hand_over.h"
#include "tests/base/faults.h"
#include "tests/stream/agreed.h"
#include "tests/stream/between.h"
#include "tests/stream/forking.h"

namespace rsock {
namespace {

using namespace rsock::testing;

class SetDown : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=1048576"}); }
};

double seconds_since(uint64_t began) { return static_cast<double>(monotonic_ns() - began) * 1e-9; }

/// All that `from` takes without blocking. With small kernel buffers a replay of it does not fit
/// TCP.
std::string fill(const Connection& c) {
  const int small = 16 * 1024;  // the receiver's window is small at first, and grows as it reads
  ::setsockopt(c.left, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
  std::string bytes(1 << 20, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + (i >> 9));
  size_t sent = 0;
  for (long r; sent < bytes.size() &&
               (r = do_send(c.left, bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT)) > 0;) {
    sent += static_cast<size_t>(r);
  }
  bytes.resize(sent);
  return bytes;
}

std::string read_all(int fd, size_t n) {
  std::string in(n, '\0');
  size_t got = 0;
  for (long r; got < n && (r = do_recv(fd, in.data() + got, n - got)) > 0;) {
    got += static_cast<size_t>(r);
  }
  in.resize(got);
  return in;
}

// --- a peer that is gone or has ended
// -------------------------------------------------------------

// The freeze asked a dead peer for a replay: ECONNRESET where Linux gives the bytes and the end.
TEST_F(SetDown, UnreadBytesOfAPeerThatDiedStayReadable) {
  configure({"RSOCK_RING_BYTES=65536"});
  Agreed a;
  a.start_sending();
  memcpy(a.ring_to_stream(), "last words", 10);
  a.publish(10);
  a.peer.hang_up();
  ::shutdown(a.connection.right, SHUT_WR);
  keep_over_exec(a.fd());
  const uint64_t began = monotonic_ns();
  stream::before_spawn();
  EXPECT_TRUE(FdTable::stream(a.fd())->pinned);
  EXPECT_LT(seconds_since(began), 0.5) << "nobody is left to wait for";
  char buffer[16] = {};
  EXPECT_EQ(do_recv(a.fd(), buffer, sizeof(buffer)), 10);
  EXPECT_STREQ(buffer, "last words");
  EXPECT_EQ(do_recv(a.fd(), buffer, sizeof(buffer)), 0);
}

TEST_F(SetDown, AnEndThatNobodyCameForIsLetGoOf) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  close_fd(std::exchange(c.left, -1));  // the other end keeps a stale connection in its pool
  const uint64_t began = monotonic_ns();
  const pid_t child = fork_with_hooks();
  char byte;
  if (child == 0) _exit(do_recv(c.right, &byte, 1) == 0 ? 0 : 1);
  EXPECT_LT(seconds_since(began), 0.5);
  EXPECT_EQ(wait_for(child), 0) << "the child reads the end too";
  EXPECT_EQ(do_recv(c.right, &byte, 1), 0);
}

TEST_F(SetDown, UnreadBytesBehindAnEndDoNotDelayAFork) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_EQ(do_send(c.left, "request", 7), 7);
  close_fd(std::exchange(c.left, -1));
  const uint64_t began = monotonic_ns();
  const pid_t child = fork_with_hooks();
  if (child == 0) _exit(0);
  EXPECT_LT(seconds_since(began), 0.5);
  EXPECT_EQ(wait_for(child), 0);
  EXPECT_EQ(read_all(c.right, 7), "request");
  char byte;
  EXPECT_EQ(do_recv(c.right, &byte, 1), 0);
}

// --- a peer that does not read
// --------------------------------------------------------------------

// fork waited for its own replay without a limit.
TEST_F(SetDown, AForkWaitsForItsOwnReplayOneSecondAndTheChildSendsNothingInTheMiddleOfIt) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const std::string sent = fill(c);
  ASSERT_GT(sent.size(), 500'000u);
  const uint64_t began = monotonic_ns();
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    const bool barred = do_send(c.left, "child", 5) == -ECONNRESET &&
                        do_send(c.left, "child", 5, MSG_DONTWAIT) == -ECONNRESET;
    _exit(barred ? 0 : 1);
  }
  EXPECT_LT(seconds_since(began), 1.5);
  EXPECT_EQ(wait_for(child), 0);
  EXPECT_EQ(do_send(c.left, "x", 1, MSG_DONTWAIT), -EAGAIN) << "the replay comes first";
  EXPECT_EQ(read_all(c.right, sent.size()), sent);
  EXPECT_TRUE(echoes(c.left, c.right, 1000));
}

TEST_F(SetDown, ASpawnWaitsOneSecondForAllStreamsTogether) {
  std::vector<Connection> all;
  std::vector<std::string> sent;
  for (int i = 0; i < 3; ++i) {
    all.push_back(Connection::make());
    ASSERT_TRUE(ping_until_lifted(all.back()));
    sent.push_back(fill(all.back()));
    keep_over_exec(all.back().left);
  }
  const uint64_t began = monotonic_ns();
  stream::before_spawn();
  EXPECT_GT(seconds_since(began), 0.9) << "the replays don't fit TCP";
  EXPECT_LT(seconds_since(began), 1.8);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(read_all(all[i].right, sent[i].size()), sent[i]);
}

TEST_F(SetDown, ASpawnLeavesAloneWhatTheNewProgramDoesNotGet) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  stream::before_spawn();
  EXPECT_TRUE(has_channel(c.left));
  EXPECT_TRUE(has_channel(c.right));
  keep_over_exec(c.right);
  stream::before_spawn();
  EXPECT_FALSE(has_channel(c.right));
  EXPECT_TRUE(FdTable::stream(c.right)->pinned);
  EXPECT_FALSE(FdTable::stream(c.left)->pinned);
  Connection d = Connection::make();
  ASSERT_TRUE(ping_until_lifted(d));
  static int copied;
  copied = d.left;
  stream::before_spawn([](int fd) { return fd == copied; });
  EXPECT_FALSE(has_channel(d.left));
  EXPECT_TRUE(FdTable::stream(d.left)->pinned);
  EXPECT_FALSE(FdTable::stream(d.right)->pinned);
}

TEST_F(SetDown, AnotherNumberWithoutTheFlagIsEnoughForASpawn) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  stream::before_spawn();
  EXPECT_TRUE(has_channel(c.left));
  const int copy = ::dup(c.left);
  stream::on_dup(c.left, copy);
  stream::before_spawn();
  EXPECT_FALSE(has_channel(c.left));
  close_fd(copy);
}

TEST_F(SetDown, AChildOfVforkSetsDownAndTheKeeperLetsGo) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_EQ(do_send(c.right, "unread", 6), 6);
  // As seen from a child that has our memory and descriptors of its own.
  static thread_local bool own = true;
  stream::set_own_process([]() noexcept { return own; });
  own = false;
  stream::leave_to_child(c.left);
  own = true;
  stream::set_own_process(nullptr);
  EXPECT_FALSE(has_channel(c.left));
  char buffer[8] = {};
  EXPECT_EQ(::recv(c.left, buffer, sizeof(buffer), 0), 6) << "by a program without the library";
  EXPECT_STREQ(buffer, "unread");
}

TEST_F(SetDown, ACallThatNeedsTheKernelDoesNotWaitWithoutBlocking) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const std::string sent = fill(c);
  set_nonblocking(c.left);
  const uint64_t began = monotonic_ns();
  EXPECT_EQ(stream::pin_to_tcp(c.left, "test"), EAGAIN);
  EXPECT_EQ(do_send(c.left, "!", 1, MSG_OOB), -EAGAIN) << "it would overtake the replay";
  EXPECT_LT(seconds_since(began), 1.0);
  EXPECT_EQ(read_all(c.right, sent.size()), sent);
  EXPECT_TRUE(eventually([&] { return stream::pin_to_tcp(c.left, "test") == 0; }));
}

TEST_F(SetDown, AnExitWaitsAsLongAsThePeerReads) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const std::string sent = fill(c);
  stream::set_down(*FdTable::stream(c.left), "test");
  std::string got;
  std::thread reader([&] {  // slower than any fixed limit, never stuck
    while (got.size() < sent.size()) {
      nap_us(50'000);
      std::string piece(sent.size() / 60, '\0');
      const long r = do_recv(c.right, piece.data(), piece.size());
      if (r <= 0) break;
      got.append(piece.data(), static_cast<size_t>(r));
    }
  });
  stream::before_exit();
  {
    Stream& s = *FdTable::stream(c.left);
    MutexLock lock(s.tx.mutex);
    EXPECT_NE(s.tx.state, stream::TxState::kReplay);
  }
  reader.join();
  EXPECT_EQ(got, sent);
}

// The peer had sealed the direction an instant before, and exit looked only for what it had obeyed.
TEST_F(SetDown, AnExitObeysAFreezeThatNobodyHasLookedAtYet) {
  configure({"RSOCK_RING_BYTES=65536"});
  Agreed a;
  a.lift_sending();
  ASSERT_EQ(do_send(a.fd(), "unread", 6), 6);
  a.from_stream().head.fetch_or(wire::kHeadSealed, std::memory_order_seq_cst);  // and no kick
  stream::before_exit();
  char buffer[16] = {};
  EXPECT_EQ(::recv(a.connection.right, buffer, sizeof(buffer), MSG_DONTWAIT), 6);
  EXPECT_STREQ(buffer, "unread");
}

// --- kicks, descriptors, stacks
// -------------------------------------------------------------------

// Kicks are datagrams to a queue of ten. The peer's keeper never looked, and both waited for ever.
TEST_F(SetDown, ALostKickIsRepeated) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_EQ(do_send(c.right, "unread", 6), 6);
  static std::atomic<int> to_drop{0};
  to_drop = 3;
  Dropped kicks([](const Call& call) {
    return call.number == SYS_sendto && call.c == wire::kKickSize && to_drop.fetch_sub(1) > 0;
  });
  const uint64_t began = monotonic_ns();
  EXPECT_TRUE(stream::set_down_and_wait(*FdTable::stream(c.left), "test"));
  EXPECT_LT(seconds_since(began), 0.5);
  EXPECT_EQ(read_all(c.left, 6), "unread");
}

TEST_F(SetDown, ALostWordOfReadinessLeavesTheSenderOnTcpForAMomentOnly) {
  static std::atomic<bool> drop{true};
  Dropped kicks([](const Call& call) {
    return call.number == SYS_sendto && call.c == wire::kKickSize && drop.load();
  });
  Connection c = Connection::make();
  EXPECT_TRUE(ping_until_lifted(c));
}

TEST_F(SetDown, AForkedChildDoesNotHoldTheEndOfAStreamThatTheParentClosed) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const std::string sent = fill(c);
  stream::set_down(*FdTable::stream(c.left), "test");
  close_fd(std::exchange(c.left, -1));  // adopted by the keeper: the replay is not out
  int hold[2];
  ASSERT_EQ(::pipe(hold), 0);
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    ::close(hold[1]);
    ::close(c.right);
    char byte;
    (void)!::read(hold[0], &byte, 1);
    _exit(0);
  }
  EXPECT_EQ(read_all(c.right, sent.size()), sent);
  EXPECT_NE(poll_one(c.right, POLLIN, 5000), 0) << "no FIN while the child lives";
  char byte;
  EXPECT_EQ(do_recv(c.right, &byte, 1, MSG_DONTWAIT), 0);
  ::close(hold[1]);
  EXPECT_EQ(wait_for(child), 0);
  ::close(hold[0]);
}

/// A thread with as little stack as threads may have, and some for the test.
template <typename F>
void on_a_small_stack(F f) {
  pthread_attr_t attr;
  pthread_attr_init(&attr);
  ASSERT_EQ(pthread_attr_setstacksize(&attr, 32 * 1024), 0);
  pthread_t thread;
  ASSERT_EQ(pthread_create(
                &thread, &attr,
                [](void* arg) -> void* { return (*static_cast<F*>(arg))(), nullptr; }, &f),
            0);
  pthread_join(thread, nullptr);
}

TEST_F(SetDown, ASmallStackIsEnoughForSendfile) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const int file = ::memfd_create("file", MFD_CLOEXEC);
  const std::string bytes(200'000, 'f');
  ASSERT_EQ(::write(file, bytes.data(), bytes.size()), 200'000);
  long sent = 0;
  on_a_small_stack([&] {
    off_t at = 0;
    sent = stream::sendfile(*FdTable::stream(c.left), c.left, file, &at, bytes.size(),
                            [] { return -1L; });
  });
  EXPECT_EQ(sent, 200'000);
  EXPECT_EQ(read_all(c.right, bytes.size()), bytes);
  ::close(file);
}

/// A file on a real file system, of bytes that no shift of it repeats.
struct SentFile {
  explicit SentFile(size_t size) : bytes(size, '\0') {
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 7 + (i >> 9) + (i >> 17));
    char name[] = "/tmp/set_down_XXXXXX";
    fd = ::mkstemp(name);
    ::unlink(name);
    EXPECT_EQ(::write(fd, bytes.data(), size), static_cast<ssize_t>(size));
  }
  ~SentFile() { ::close(fd); }
  long send(int to, off_t at, size_t n) const {
    return stream::sendfile(*FdTable::stream(to), to, fd, &at, n, [] { return -1L; });
  }
  std::string bytes;
  int fd;
};

/// Lifts it, then sends and reads pieces until some go by reference: the lane comes by way of the
/// keeper.
bool passes_by_reference(const Connection& c, const SentFile& file) {
  if (!ping_until_lifted(c)) return false;
  constexpr size_t kPiece = 256 * 1024;
  const auto& passed = FdTable::stream(c.left)->zero_copied;
  const uint64_t before = passed;
  for (int i = 0; i < 1000 && passed == before; ++i) {
    const off_t at = i * 100;
    if (file.send(c.left, at, kPiece) != static_cast<long>(kPiece)) return false;
    if (read_all(c.right, kPiece) != file.bytes.substr(static_cast<size_t>(at), kPiece)) return false;
    ::usleep(100);
  }
  return passed != before;
}

TEST_F(SetDown, WhatWasPassedByReferenceIsReplayed) {
  Connection c = Connection::make();
  const SentFile file(2'000'000);
  ASSERT_TRUE(passes_by_reference(c, file));
  const uint64_t passed = FdTable::stream(c.left)->zero_copied;
  ASSERT_EQ(file.send(c.left, 4321, 300'000), 300'000);
  ASSERT_EQ(do_send(c.left, "between", 7), 7);
  ASSERT_EQ(file.send(c.left, 1'000'001, 300'000), 300'000);
  ASSERT_GT(FdTable::stream(c.left)->zero_copied, passed + 400'000);
  std::string expected =
      file.bytes.substr(4321, 300'000) + "between" + file.bytes.substr(1'000'001, 300'000);
  ASSERT_EQ(read_all(c.right, 1000), expected.substr(0, 1000));
  const pid_t child = fork_with_hooks();  // sets it down
  if (child == 0) _exit(0);
  EXPECT_EQ(wait_for(child), 0);
  EXPECT_EQ(read_all(c.right, expected.size() - 1000), expected.substr(1000));
}

/// A lane leaves less unread than a ring. Who stands still because of that gets the ring.
TEST_F(SetDown, APeerThatDoesNotReadLeavesTheSenderAllOfTheRing) {
  constexpr size_t kRing = 4 << 20;
  configure({"RSOCK_RING_BYTES=4194304"});
  Connection c = Connection::make();
  const SentFile file(2'000'000);
  ASSERT_TRUE(passes_by_reference(c, file));
  FdTable::stream(c.left)->nonblocking = true;
  std::string sent;
  const auto fill_up = [&] {
    long r;
    while ((r = file.send(c.left, 1234, 300'000)) > 0)
      sent += file.bytes.substr(1234, static_cast<size_t>(r));
    EXPECT_EQ(r, -EAGAIN);
  };
  fill_up();
  EXPECT_LT(sent.size(), kRing * 2 / 3);
  const uint64_t began = monotonic_ns();
  while (sent.size() < kRing * 2 / 3 && seconds_since(began) < 30) {
    ::usleep(10'000);
    fill_up();
  }
  EXPECT_GE(sent.size(), kRing * 2 / 3);
  EXPECT_EQ(read_all(c.right, sent.size()), sent);
}

TEST_F(SetDown, AFileThatThePeerHasReadIsKeptNoLonger) {
  Connection c = Connection::make();
  const SentFile file(2'000'000);
  ASSERT_TRUE(passes_by_reference(c, file));
  const auto is_kept = [] {
    std::ifstream maps("/proc/self/maps");
    const std::string all(std::istreambuf_iterator<char>(maps), {});
    return all.find("/tmp/set_down_") != std::string::npos;
  };
  ASSERT_EQ(file.send(c.left, 0, 300'000), 300'000);
  ASSERT_TRUE(is_kept());
  EXPECT_EQ(read_all(c.right, 300'000), file.bytes.substr(0, 300'000));
  const uint64_t began = monotonic_ns();
  while (is_kept() && seconds_since(began) < 30) ::usleep(10'000);
  EXPECT_FALSE(is_kept());
}

TEST_F(SetDown, WhatAFileHasLostSinceResetsTheConnection) {
  const test::FaultsRecovered faults;
  Connection c = Connection::make();
  const SentFile file(2'000'000);
  ASSERT_TRUE(passes_by_reference(c, file));
  const uint64_t passed = FdTable::stream(c.left)->zero_copied;
  ASSERT_EQ(file.send(c.left, 0, 300'000), 300'000);
  ASSERT_GT(FdTable::stream(c.left)->zero_copied, passed + 200'000);
  ASSERT_EQ(::ftruncate(file.fd, 100), 0);
  const pid_t child = fork_with_hooks();
  if (child == 0) _exit(0);
  EXPECT_EQ(wait_for(child), 0);
  char byte;
  EXPECT_EQ(do_recv(c.right, &byte, 1), -ECONNRESET) << "never a clean end, or other bytes";
  EXPECT_EQ(do_send(c.left, "x", 1), -ECONNRESET);
}

}  // namespace
}  // namespace rsock
