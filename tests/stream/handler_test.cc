// A handler that runs while a call looks at the ring, before it sleeps, ends the call as it would
// have ended a wait in the kernel (signal(7)).

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "core/base/thread_signals.h"
#include "core/stream/keeper_loop.h"
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

  /// Signals this thread once `spinning` holds, and ends its wait in another way later: in most
  /// tests too late.
  template <typename Spinning, typename End>
  std::thread signal_once(Spinning spinning, End end, int after_ms = 20'000) {
    return std::thread([target = pthread_self(), spinning, end, after_ms, this] {
      EXPECT_TRUE(eventually(spinning));
      pthread_kill(target, SIGUSR1);
      for (int i = 0; i < after_ms / 10 && !over_.load(); ++i) usleep(10'000);
      end();
    });
  }

  /// A connection whose keeper has done all that it had to do after the lift: who spins lets go of
  /// the lock, and sleeps, for whoever else wants it.
  static Connection quiet() {
    Connection c = Connection::make();
    EXPECT_TRUE(ping_until_lifted(c));
    EXPECT_TRUE(eventually([] { return stream::inside().owing.load() == 0; }));
    return c;
  }

  /// What a recv on an idle lifted stream says.
  long recv_meanwhile(bool restart) {
    g_restart = restart;
    Connection c = quiet();
    Stream& s = *FdTable::stream(c.left);
    const auto spins = [&s] {  // it does so under its lock
      if (!s.rx.mutex.try_lock()) return true;
      s.rx.mutex.unlock();
      return false;
    };
    std::thread other = signal_once(
        spins, [&] { do_send(c.right, "x", 1); }, restart ? 1'000 : 20'000);
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
  Connection c = quiet();
  static char bulk[1 << 20];
  const auto& sent = FdTable::stream(c.left)->sent[static_cast<int>(stream::PathKind::kShm)];
  const uint64_t full = sent.load() + 65'536;
  std::thread other =
      signal_once([&] { return sent.load() >= full; },
                  [&] {
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
