// fork, exec, spawn, exit: a stream that another process may use lives on TCP (D9).
//
// clang-format off
// | event         | before                                   | parent after    | child after                 |
// |---------------|------------------------------------------|-----------------|-----------------------------|
// | fork          | all set down, holders + 1, all locked    | unlocked        | locks made anew, no keeper  |
// | vfork, spawn  | all set down and pinned                  | nothing         | runs in our memory: nothing |
// | exec          | all set down and pinned                  | –               | a new program               |
// | exit          | replays that are owed go out, summary    | –               | –                           |
// clang-format on

#include <fcntl.h>

#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/holders.h"
#include "core/stream/keeper.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {
namespace {

/// Two forks of one process at once would trample on each other's holders.
Mutex g_fork;

/// Streams by descriptor, so that the work is done without the slab's lock.
template <typename F>
void for_each_descriptor(F f) noexcept {
  if (live_streams() == 0) return;
  for (int fd = 0; fd <= FdTable::highest(); ++fd) {
    Stream* s = FdTable::stream(fd);
    if (s != nullptr) f(*s, fd);
  }
}

void set_down_all(Reason reason, bool pinned) noexcept {
  // First all of them, then the waiting: the peers' keepers work side by side.
  for_each_descriptor([&](Stream& s, int) {
    const bool channel = pinned ? pin(s, reason) : s.has_channel.load(std::memory_order_acquire);
    if (channel) set_down(s, reason);
  });
  for_each_descriptor([&](Stream& s, int) { (void)set_down_and_wait(s, reason); });
}

/// The parent's threads and keeper are not here: nobody is in the kernel, nobody holds a lock. A
/// channel that could not be let go of in time belongs to the parent.
void reset_in_child(Stream& s, void*) noexcept RSOCK_NO_TSA {
  for (Mutex* m : {&s.tx.mutex, &s.rx.mutex, &s.watch_mutex}) m->reset_after_fork();
  s.tx.gate.reset_after_fork();
  s.rx.gate.reset_after_fork();
  if (s.channel) {
    s.channel = nullptr;
    s.has_channel.store(false, std::memory_order_relaxed);
    s.tx.state = TxState::kKernel;
    s.rx.state = RxState::kKernel;
    s.rx.await_replay.store(false, std::memory_order_relaxed);
    s.pinned.store(true, std::memory_order_relaxed);
    s.error.store(ECONNRESET, std::memory_order_relaxed);
    RSOCK_LOG(kError, "fd %d: unread bytes stayed with the parent process",
              s.fd.load(std::memory_order_relaxed));
  }
  s.lift_asked.store(s.pinned.load(std::memory_order_relaxed), std::memory_order_relaxed);
  s.calls.store(0, std::memory_order_relaxed);
  // Bytes so far are the parent's to count.
  for (int i = 0; i < kPaths; ++i) {
    s.sent[i].store(0, std::memory_order_relaxed);
    s.received[i].store(0, std::memory_order_relaxed);
  }
  s.ever_lifted = 0;
  s.set_downs = 0;
}

void pin_if_watched(Stream& s, void*) noexcept {
  MutexLock lock(s.watch_mutex);
  for (Watcher& w : s.watchers) {
    if (!w.survives_fork()) continue;
    s.pinned.store(true, std::memory_order_relaxed);
    s.not_lifted.store("in an epoll instance shared with a forked process",
                       std::memory_order_relaxed);
  }
}

void ask_again(Stream& s, void*) noexcept {
  s.lift_asked.store(s.pinned.load(std::memory_order_relaxed), std::memory_order_relaxed);
  s.calls.store(0, std::memory_order_relaxed);
}

}  // namespace

void prepare_fork() noexcept { set_down_all("fork", false); }

void before_fork() noexcept RSOCK_NO_TSA {
  g_fork.lock();
  // A kernel epoll instance that two processes share can't hold our registrations for one of them.
  if (live_streams() != 0) for_each_stream(pin_if_watched, nullptr);
  add_holder_to_all();  // first: from now on nothing is lifted
  set_down_all("fork", false);
  lock_all_streams(g_epoll_lock);
}

void after_fork_parent(bool failed) noexcept RSOCK_NO_TSA {
  unlock_all_streams(g_epoll_unlock);
  if (failed) remove_holder_from_all();
  for_each_stream(ask_again, nullptr);
  g_fork.unlock();
}

void after_fork_child() noexcept {
  g_fork.reset_after_fork();
  if (g_epoll_fork_child != nullptr) g_epoll_fork_child();
  slab_after_fork_child();
  Keeper::after_fork_child();
  counters_after_fork_child();
  for_each_stream(reset_in_child, nullptr);
}

void before_spawn() noexcept { set_down_all("a child process was spawned", true); }

void before_exec() noexcept {
  set_down_all("exec", true);
  write_summary_for_exec();
}

void before_exit() noexcept {
  constexpr int64_t kFlushNs = 2'000'000'000;
  for_each_descriptor([](Stream& s, int) {
    if (s.has_channel.load(std::memory_order_acquire)) {
      bool replaying = false;
      {
        MutexLock lock(s.tx.mutex);
        replaying = s.tx.state == TxState::kReplay;
      }
      if (replaying) (void)set_down_and_wait(s, "exit");
    }
  });
  Keeper::finish_adopted(kFlushNs);
  write_summary();
}

}  // namespace rsock::stream
