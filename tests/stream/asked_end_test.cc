// The end of a stream where it is a question to the peer (a queue pair): what close, SO_LINGER and
// recv do until the answer is there.

#include <signal.h>

#include <thread>

#include "core/base/clock.h"
#include "tests/stream/asking.h"

namespace rsock {
namespace {

using namespace rsock::testing;

/// Descriptors that the kernel refuses to make.
std::atomic<bool> g_no_descriptor{false};

long door(long number, long a, long b, long c, long d, long e, long f) noexcept {
  const bool makes = number == SYS_fcntl && (b == F_DUPFD_CLOEXEC || b == F_DUPFD);
  return makes && g_no_descriptor ? -EMFILE : raw_syscall(number, a, b, c, d, e, f);
}
[[maybe_unused]] const bool g_installed = (os::set_door(&door), true);

void set_linger(int fd, int seconds) {
  const linger l{1, seconds};
  ASSERT_EQ(::setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof(l)), 0);
}

class AskedEnd : public ::testing::Test {
 protected:
  void SetUp() override { configure_without_lifts(); }
  void TearDown() override { g_no_descriptor = false; }
};

TEST_F(AskedEnd, CloseReturnsAndFinWaitsForTheAnswer) {
  Asking a;
  Stream& s = a.left_stream();
  ASSERT_EQ(do_send(a.connection.left, "last", 4), 4);
  close_fd(std::exchange(a.connection.left, -1));
  EXPECT_TRUE(a.left->end_asked());
  char buffer[16];
  EXPECT_EQ(do_recv(a.connection.right, buffer, sizeof(buffer)), 4);
  EXPECT_EQ(poll_one(a.connection.right, POLLIN, 100), 0) << "FIN before the answer";
  a.left->answer_end();
  Asking::tend(s);
  EXPECT_EQ(do_recv(a.connection.right, buffer, sizeof(buffer)), 0);
}

/// The peer reads "last", then the end.
void expect_last_and_end(Asking& a) {
  char buffer[16];
  EXPECT_EQ(do_recv(a.connection.right, buffer, sizeof(buffer)), 4);
  EXPECT_EQ(do_recv(a.connection.right, buffer, sizeof(buffer)), 0);
}

TEST_F(AskedEnd, CloseWaitsWhereThereIsNoDescriptorForTheRest) {
  Asking a;
  ASSERT_EQ(do_send(a.connection.left, "last", 4), 4);
  std::thread peer([&] {
    nap_us(200'000);
    a.left->answer_end();
  });
  g_no_descriptor = true;
  const uint64_t began = monotonic_ns();
  close_fd(std::exchange(a.connection.left, -1));
  g_no_descriptor = false;
  EXPECT_GT(seconds_since(began), 0.15);
  peer.join();
  expect_last_and_end(a);
}

TEST_F(AskedEnd, CloseWithoutADescriptorEndsAlsoIfThePeerNeverAnswers) {
  Asking a;
  ASSERT_EQ(do_send(a.connection.left, "last", 4), 4);
  g_no_descriptor = true;
  const uint64_t began = monotonic_ns();
  close_fd(std::exchange(a.connection.left, -1));
  g_no_descriptor = false;
  EXPECT_LT(seconds_since(began), 10);
  char buffer[16];
  EXPECT_EQ(do_recv(a.connection.right, buffer, sizeof(buffer)), 4);
  EXPECT_EQ(::recv(a.connection.right, buffer, sizeof(buffer), 0), -1) << "a clean end";
  EXPECT_EQ(errno, ECONNRESET);
}

TEST_F(AskedEnd, LingerWaitsForTheAnswerAlsoWithoutBlocking) {
  for (const bool nonblocking : {false, true}) {
    Asking a;
    if (nonblocking) set_nonblocking(a.connection.left);
    set_linger(a.connection.left, 20);
    ASSERT_EQ(do_send(a.connection.left, "last", 4), 4);
    std::thread peer([&] {
      nap_us(300'000);
      a.left->answer_end();
    });
    const uint64_t began = monotonic_ns();
    close_fd(std::exchange(a.connection.left, -1));
    EXPECT_GT(seconds_since(began), 0.25);
    EXPECT_LT(seconds_since(began), 10);
    peer.join();
    expect_last_and_end(a);
  }
}

TEST_F(AskedEnd, LingerEndsWithItsTimeAndTheBytesStillGo) {
  Asking a;
  Stream& s = a.left_stream();
  set_linger(a.connection.left, 1);
  ASSERT_EQ(do_send(a.connection.left, "last", 4), 4);
  const uint64_t began = monotonic_ns();
  close_fd(std::exchange(a.connection.left, -1));
  EXPECT_GT(seconds_since(began), 0.95);
  EXPECT_LT(seconds_since(began), 1.9);
  a.left->answer_end();
  Asking::tend(s);
  expect_last_and_end(a);
}

void on_signal(int) {}

/// signal(7) does not name close; sk_stream_wait_close() ends with any signal, and close says 0.
TEST_F(AskedEnd, LingerEndsWithASignal) {
  Asking a;
  Stream& s = a.left_stream();
  struct sigaction act {};
  act.sa_handler = on_signal;
  act.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &act, nullptr);
  set_linger(a.connection.left, 30);
  ASSERT_EQ(do_send(a.connection.left, "last", 4), 4);
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    close_fd(std::exchange(a.connection.left, -1));
    closed = true;
  });
  EXPECT_TRUE(eventually([&] { return a.left->end_asked(); }));
  nap_us(50'000);
  EXPECT_FALSE(closed);
  EXPECT_TRUE(eventually([&] {
    pthread_kill(closer.native_handle(), SIGUSR1);
    return closed.load();
  }));
  closer.join();
  a.left->answer_end();
  Asking::tend(s);
}

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

TEST_F(AskedEnd, TheNumberIsFreeWhileACloseLingers) {
  Asking a;
  Stream& s = a.left_stream();
  const int adopted = stream::inside().adopted;
  set_linger(a.connection.left, 20);
  ASSERT_EQ(do_send(a.connection.left, "last", 4), 4);
  const int number = std::exchange(a.connection.left, -1);
  std::thread closer([&] { close_fd(number); });
  EXPECT_TRUE(eventually([&] { return !is_open(number); }));
  EXPECT_TRUE(FdTable::stream(number) == nullptr);
  EXPECT_EQ(stream::inside().adopted, adopted + 1) << "exit would not wait for it";
  EXPECT_TRUE(s.adopted) << "a forked child would keep it";
  Asking::tend(s);
  EXPECT_TRUE(s.adopted) << "the keeper leaves it to the thread that waits";
  a.left->answer_end();
  closer.join();
  EXPECT_EQ(stream::inside().adopted, adopted);
  expect_last_and_end(a);
}

TEST_F(AskedEnd, ACloseThatKeepsItsNumberKeepsOthersFromIt) {
  Asking a;
  Stream& s = a.left_stream();
  const int adopted = stream::inside().adopted;
  ASSERT_EQ(do_send(a.connection.left, "last", 4), 4);
  const int number = std::exchange(a.connection.left, -1);
  g_no_descriptor = true;
  std::thread closer([&] { close_fd(number); });
  EXPECT_TRUE(eventually([&] { return FdTable::kind(number) == stream::FdKind::kInternal; }));
  EXPECT_FALSE(stream::before_close(number)) << "EBADF";
  EXPECT_EQ(stream::inside().adopted, adopted + 1) << "exit would not wait for it";
  EXPECT_TRUE(s.adopted) << "a forked child would keep it";
  Asking::tend(s);
  EXPECT_TRUE(is_open(number));
  a.left->answer_end();
  closer.join();
  g_no_descriptor = false;
  EXPECT_FALSE(is_open(number));
  EXPECT_EQ(FdTable::word(number), 0u);
  EXPECT_EQ(stream::inside().adopted, adopted);
  expect_last_and_end(a);
}

TEST_F(AskedEnd, LingerEndsWithTheStream) {
  for (const bool no_descriptor : {false, true}) {
    Asking a;
    Stream& s = a.left_stream();
    set_linger(a.connection.left, 20);
    ASSERT_EQ(do_send(a.connection.left, "last", 4), 4);
    g_no_descriptor = no_descriptor;
    const uint64_t began = monotonic_ns();
    std::thread closer([&] { close_fd(std::exchange(a.connection.left, -1)); });
    EXPECT_TRUE(eventually([&] { return s.adopted.load(); }));
    stream::fail_stream(s, "test");
    closer.join();
    g_no_descriptor = false;
    EXPECT_LT(seconds_since(began), 10);
  }
}

TEST_F(AskedEnd, ANegativeLingerWaits) {
  Asking a;
  set_linger(a.connection.left, -1);
  ASSERT_EQ(do_send(a.connection.left, "last", 4), 4);
  std::thread peer([&] {
    nap_us(300'000);
    a.left->answer_end();
  });
  const uint64_t began = monotonic_ns();
  close_fd(std::exchange(a.connection.left, -1));
  EXPECT_GT(seconds_since(began), 0.25);
  peer.join();
}

TEST_F(AskedEnd, LingerOfNothingResets) {
  Asking a;
  set_linger(a.connection.left, 0);
  ASSERT_EQ(do_send(a.connection.left, "lost", 4), 4);
  close_fd(std::exchange(a.connection.left, -1));
  a.right->peer_leaves();
  {
    const MutexLock lock(stream::inside().mutex);
    stream::tend_after_hang_up(a.right_stream());
  }
  char buffer[16];
  EXPECT_EQ(do_recv(a.connection.right, buffer, sizeof(buffer)), 4) << "queued before RST";
  EXPECT_EQ(do_recv(a.connection.right, buffer, sizeof(buffer)), -ECONNRESET);
}

// --- a call that sends past us waits for the word where we are ---

void handle(int flags) {
  struct sigaction act {};
  act.sa_handler = on_signal;
  act.sa_flags = flags;
  sigaction(SIGUSR1, &act, nullptr);
}

/// The handlers that run are counted by the library (preload/handlers.cc), which is not here.
void on_counted_signal(int) {
  ++thread_signals().ran;
  ++thread_signals().broke;
}

TEST_F(AskedEnd, AHandlerWithRestartDoesNotEndThePinningCall) {
  handle(SA_RESTART);
  Asking a;
  ASSERT_EQ(do_send(a.connection.left, "sent", 4), 4);
  std::atomic<int> result{-1};
  std::thread caller([&] { result = stream::pin_to_tcp(a.connection.left, "test"); });
  // Past the time that a peer's keeper has to answer.
  nap_us(1'200'000);
  for (int i = 0; i < 20; ++i) {
    pthread_kill(caller.native_handle(), SIGUSR1);
    nap_us(5'000);
  }
  EXPECT_EQ(result, -1);
  stream::set_down(a.right_stream(), "test");
  EXPECT_TRUE(eventually([&] {
    Asking::tend(a.left_stream());
    return result == 0;
  }));
  caller.join();
}

TEST_F(AskedEnd, AHandlerWithoutRestartEndsThePinningCall) {
  struct sigaction act {};
  act.sa_handler = on_counted_signal;
  sigaction(SIGUSR1, &act, nullptr);
  Asking a;
  ASSERT_EQ(do_send(a.connection.left, "sent", 4), 4);
  std::atomic<int> result{-1};
  std::thread caller([&] { result = stream::pin_to_tcp(a.connection.left, "test"); });
  EXPECT_TRUE(eventually([&] {
    if (result == -1) pthread_kill(caller.native_handle(), SIGUSR1);
    return result != -1;
  }));
  EXPECT_EQ(result, EINTR);
  caller.join();
}

TEST_F(AskedEnd, ACloseEndsThePinningCall) {
  Asking a;
  ASSERT_EQ(do_send(a.connection.left, "sent", 4), 4);
  const int number = std::exchange(a.connection.left, -1);
  std::atomic<int> result{-1};
  std::thread caller([&] { result = stream::pin_to_tcp(number, "test"); });
  EXPECT_TRUE(eventually([&] { return a.left->recall_asked(); }));
  close_fd(number);
  EXPECT_TRUE(eventually([&] { return result == 0; }));
  caller.join();
}

// --- FIN overtakes the word that what was frozen is in the TCP stream
// -------------------------------

struct Overtaken : AskedEnd {
  /// Right has frozen what left sends, has all of it, and FIN; not the word.
  void SetUp() override {
    AskedEnd::SetUp();
    a = std::make_unique<Asking>();
    a->right->hold_replayed(true);
    stream::set_down(a->right_stream(), "test");
    Asking::tend(a->left_stream());
    ASSERT_EQ(do_shutdown(a->connection.left, SHUT_WR), 0);
    ASSERT_TRUE(eventually([&] {
      pollfd p{fd(), POLLRDHUP, 0};
      return ::poll(&p, 1, 0) == 1;
    }));
  }
  int fd() const { return a->connection.right; }
  std::unique_ptr<Asking> a;
  char byte = 0;
};

TEST_F(Overtaken, RecvWithATimeLimitSaysEagainInTime) {
  const timeval limit{0, 200'000};
  ASSERT_EQ(stream::setsockopt(
                *FdTable::stream(fd()), fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit),
                [&]() -> long {
                  return ::setsockopt(fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
                }),
            0);
  std::thread late([&] {  // a test that fails must end
    nap_us(1'500'000);
    a->right->hold_replayed(false);
  });
  const uint64_t began = monotonic_ns();
  EXPECT_EQ(do_recv(fd(), &byte, 1), -EAGAIN);
  EXPECT_LT(seconds_since(began), 1.4);
  late.join();
}

TEST_F(Overtaken, AHandlerWithoutRestartEndsTheWait) {
  struct sigaction act {};
  act.sa_handler = on_signal;
  sigaction(SIGUSR1, &act, nullptr);
  std::atomic<long> result{1};
  std::thread reader([&] { result = do_recv(fd(), &byte, 1); });
  nap_us(100'000);
  EXPECT_TRUE(eventually(
      [&] {
        if (result == 1) pthread_kill(reader.native_handle(), SIGUSR1);
        return result != 1;
      },
      4'000));
  EXPECT_EQ(result, -EINTR);
  a->right->hold_replayed(false);
  reader.join();
}

TEST_F(Overtaken, TheWaitEndsWithTheWord) {
  std::thread word([&] {
    nap_us(100'000);
    a->right->hold_replayed(false);
  });
  EXPECT_EQ(do_recv(fd(), &byte, 1), 0);
  word.join();
}

TEST_F(Overtaken, PollSaysReadableWhenRecvHasAnAnswer) {
  set_nonblocking(fd());
  EXPECT_EQ(do_recv(fd(), &byte, 1), -EAGAIN);
  EXPECT_EQ(poll_one(fd(), POLLIN | POLLRDHUP, 50), 0) << "a loop would turn for nothing";
  a->right->hold_replayed(false);
  EXPECT_EQ(poll_one(fd(), POLLIN, 1'000), POLLIN);
  EXPECT_EQ(do_recv(fd(), &byte, 1), 0);
}

/// A thread in poll() looks once more when another one has closed the stream, and its channel is
/// gone with the replay still owed.
TEST_F(Overtaken, PollLooksAtAStreamThatWasClosedMeanwhile) {
  Stream& s = a->right_stream();
  a->right->answer_end();  // our direction is over
  const int number = std::exchange(a->connection.right, -1);
  close_fd(number);
  ASSERT_FALSE(s.has_channel);
  (void)stream::ready_events(s, number, POLLIN);
}

TEST_F(Overtaken, PollSaysTheEndOfAShutDirectionAtOnce) {
  EXPECT_EQ(poll_one(fd(), POLLIN, 0), 0);
  ASSERT_EQ(do_shutdown(fd(), SHUT_RD), 0);
  EXPECT_EQ(poll_one(fd(), POLLIN, 0), POLLIN);
}

TEST_F(Overtaken, AReaderThatWaitsHearsThatTheStreamFailed) {
  Stream& s = a->right_stream();
  std::atomic<long> result{1};
  std::thread reader([&] { result = do_recv(fd(), &byte, 1); });
  nap_us(100'000);
  EXPECT_EQ(result, 1);
  stream::fail_stream(s, "test");
  EXPECT_TRUE(eventually([&] { return result != 1; }, 2'000));
  EXPECT_EQ(result, -ECONNRESET);
  a->right->hold_replayed(false);
  reader.join();
}

TEST_F(Overtaken, PollSleepsUntilTheWordIsThere) {
  const auto cpu_ns = [] {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1'000'000'000L + t.tv_nsec;
  };
  const long before = cpu_ns();
  EXPECT_EQ(poll_one(fd(), POLLIN | POLLRDHUP, 500), 0);
  EXPECT_LT(cpu_ns() - before, 100'000'000);
}

}  // namespace
}  // namespace rsock
