// A handler that runs while a call looks at the ring, before it sleeps, ends the call as it would
// have ended a wait in the kernel (signal(7)).

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "core/base/thread_signals.h"
#include "tests/stream/loopback.h"

namespace rsock::testing {
namespace {

std::atomic<bool> g_restart{false};

/// As preload/handlers.cc counts.
void on_signal(int) {
  ++thread_signals().ran;
  if (!g_restart.load()) ++thread_signals().broke;
}

class Handler : public ::testing::Test {
 protected:
  void SetUp() override {
    // So long a spin that the signal meets it.
    configure({"RSOCK_RING_BYTES=65536", "RSOCK_SPIN_US=400000"});
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;  // the kernel's part of it is not what is tested
    sigaction(SIGUSR1, &action, &before_);
  }
  void TearDown() override { sigaction(SIGUSR1, &before_, nullptr); }

  /// Signals this thread in 100 ms, and ends its wait in another way 3 s later.
  template <typename End>
  std::thread signal_soon(End end) {
    return std::thread([target = pthread_self(), end, this] {
      usleep(100'000);
      pthread_kill(target, SIGUSR1);
      for (int i = 0; i < 300 && !over_.load(); ++i) usleep(10'000);
      end();
    });
  }

  /// What a recv on an idle lifted stream says.
  long recv_meanwhile(bool restart) {
    g_restart = restart;
    Connection c = Connection::make();
    EXPECT_TRUE(ping_until_lifted(c));
    std::thread other = signal_soon([&] { do_send(c.right, "x", 1); });
    char byte;
    const long r = do_recv(c.left, &byte, 1);
    over_ = true;
    other.join();
    return r;
  }

  std::atomic<bool> over_{false};
  struct sigaction before_ {};
};

TEST_F(Handler, EndsARecvThatWasSpinning) { EXPECT_EQ(recv_meanwhile(false), -EINTR); }

TEST_F(Handler, DoesNotEndARecvThatRestarts) { EXPECT_EQ(recv_meanwhile(true), 1); }

TEST_F(Handler, EndsASendThatWasSpinningWithWhatItTook) {
  g_restart = true;  // bytes were taken: the count is the answer, whatever SA_RESTART says
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  static char bulk[1 << 20];
  std::thread other = signal_soon([&] {
    static char sink[sizeof(bulk)];
    for (size_t got = 0; got < sizeof(bulk);) {
      const long r = do_recv(c.right, sink, sizeof(sink), over_ ? MSG_DONTWAIT : 0);
      if (r <= 0) break;
      got += static_cast<size_t>(r);
    }
  });
  const long r = do_send(c.left, bulk, sizeof(bulk));
  over_ = true;
  other.join();
  EXPECT_GT(r, 0);
  EXPECT_LT(r, static_cast<long>(sizeof(bulk)));
}

}  // namespace
}  // namespace rsock::testing
