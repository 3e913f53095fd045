// A signal handler must always be able to tell that the thread it interrupted has the lock.

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
  if (!g_mutex.held_by_me()) {
    if (g_mutex.try_lock()) {
      g_mutex.unlock();
    } else {
      g_unrecognised.fetch_add(1);
    }
  } else {
    g_while_held.fetch_add(1);
  }
}

TEST(Mutex, IsRecognisedByAHandlerAtEveryInstruction) {
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
