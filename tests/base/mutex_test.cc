// Whoever stands before the handlers must be able to tell, at every instruction, that the thread
// has a lock.

#include "core/base/mutex.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <thread>

namespace {

rsock::Mutex g_mutex;
std::atomic<int> g_signals{0};
std::atomic<int> g_while_held{0};
std::atomic<int> g_unrecognised{0};

void on_signal(int) {
  g_signals.fetch_add(1);
  // One thread uses the lock: who can't have it has interrupted the owner.
  if (rsock::thread_signals().depth != 0) {
    g_while_held.fetch_add(1);
  } else if (g_mutex.try_lock()) {
    g_mutex.unlock();
  } else {
    g_unrecognised.fetch_add(1);
  }
}

TEST(Mutex, HoldsHandlersAtEveryInstruction) {
  struct sigaction action {};
  action.sa_handler = on_signal;
  struct sigaction before {};
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  std::atomic<bool> done{false};
  const pthread_t target = pthread_self();
  std::thread sender([&] {
    while (!done.load()) pthread_kill(target, SIGUSR1);
  });
  // Nothing is done under the lock: nearly every signal meets a transition.
  while (g_signals.load() < 20000) {
    for (int i = 0; i < 1000; ++i) {
      g_mutex.lock();
      g_mutex.unlock();
    }
  }
  done.store(true);
  sender.join();
  sigaction(SIGUSR1, &before, nullptr);
  EXPECT_EQ(g_unrecognised.load(), 0);
  EXPECT_GT(g_while_held.load(), 0);
}

TEST(Mutex, LetsHandlersInAtTheLastUnlock) {
  rsock::Mutex inner;
  EXPECT_EQ(rsock::thread_signals().depth, 0);
  g_mutex.lock();
  inner.lock();
  EXPECT_FALSE(inner.try_lock());
  EXPECT_EQ(rsock::thread_signals().depth, 2);
  // As handlers.cc postpones: everything blocked, the signal pending.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct sigaction action {};
  action.sa_handler = on_signal;
  struct sigaction old {};
  sigaction(SIGUSR2, &action, &old);
  const int seen = g_signals.load();
  pthread_kill(pthread_self(), SIGUSR2);
  rsock::thread_signals().mask = 0;
  rsock::thread_signals().postponed = true;
  inner.unlock();
  EXPECT_EQ(g_signals.load(), seen);
  g_mutex.unlock();
  EXPECT_EQ(g_signals.load(), seen + 1);
  EXPECT_FALSE(rsock::thread_signals().postponed);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  sigaction(SIGUSR2, &old, nullptr);
}

TEST(Mutex, OfAnotherThreadIsNotMine) {
  rsock::Mutex mutex;
  mutex.lock();
  std::thread other([&] {
    EXPECT_FALSE(mutex.held_by_me());
    EXPECT_FALSE(mutex.try_lock());
  });
  other.join();
  EXPECT_TRUE(mutex.held_by_me());
  mutex.unlock();
  EXPECT_FALSE(mutex.held_by_me());
}

}  // namespace
