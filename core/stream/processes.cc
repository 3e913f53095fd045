// fork, exec, spawn, exit: a stream that another process may use lives on TCP (D9).
//
// clang-format off
// | event         | before                                   | parent after    | child after                 |
// |---------------|------------------------------------------|-----------------|-----------------------------|
// | fork          | all set down, holders + 1, all locked    | unlocked        | locks made anew, no keeper  |
// | vfork, spawn  | all set down and pinned                  | nothing         | runs in our memory: nothing |
// | exec          | all set down and pinned, replays go out  | –               | a new program               |
// | exit          | replays that are owed go out, summary    | –               | –                           |
// clang-format on
//
// Waits: one limit a call, for all streams together (hand_over.h). What is left then stays with the
// parent's keeper, and the child can't send on such a stream. exit and exec leave nobody behind:
// their replays have as long as they make progress.

#include <fcntl.h>

#include <algorithm>

#include "core/base/log.h"
#include "core/os/os.h"
#include "core/os/owned_fd.h"
#include "core/stream/counters.h"
#include "core/stream/hand_over.h"
#include "core/stream/holders.h"
#include "core/stream/keeper.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"
#include "core/transport/shm/segment_pool.h"

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

void set_down_all(Reason reason, bool pinned, const Patience& patience) noexcept {
  // First all of them, then the waiting: the peers' keepers work side by side.
  for_each_descriptor([&](Stream& s, int) {
    const bool channel = pinned ? pin(s, reason) : s.has_channel.load(std::memory_order_acquire);
    if (channel) set_down(s, reason);
  });
  for_each_descriptor([&](Stream& s, int) { (void)set_down_and_wait(s, reason, patience); });
}

/// prepare_fork() and before_fork() are one call to the program: one limit for both.
thread_local uint64_t t_fork_until_ns __attribute__((tls_model("initial-exec"))) = 0;

/// Adopted streams have no number in the table: only the keeper knows that they still send.
void finish_adopted() noexcept {
  uint64_t before = 0;
  do {
    before = replayed_bytes();
    const Deadline stuck = Deadline::after_ns(kStuckNs);
    Keeper::finish_adopted(kStuckNs);
    if (!stuck.passed()) return;
  } while (replayed_bytes() != before);
}

/// The parent's threads and keeper are not here: nobody is in the kernel, nobody holds a lock. A
/// channel that could not be let go of in time belongs to the parent.
void reset_in_child(Stream& s, void*) noexcept RSOCK_NO_TSA {
  for (Mutex* m : {&s.tx.mutex, &s.rx.mutex, &s.watch_mutex}) m->reset_after_fork();
  drop_sleepers_in_child(s);
  s.tx.gate.reset_after_fork();
  s.rx.gate.reset_after_fork();
  if (s.tx.barred) (void)s.tx.gate.take();  // the parent's parent still sends
  if (s.channel) {
    const bool adopted = s.adopted.load(std::memory_order_relaxed);
    // Bytes of ours that are not on TCP yet are the parent's to send, and so is what follows them.
    // A gate that is never given back keeps everybody from the kernel.
    if (s.tx.state != TxState::kKernel && !adopted) s.tx.barred = s.tx.gate.take();
    const bool unread = !s.rx.ring_done || s.rx.await_replay.load(std::memory_order_relaxed);
    if (unread && !adopted) {
      s.error.store(ECONNRESET, std::memory_order_relaxed);
      RSOCK_LOG(kError, "fd %d: unread bytes stayed with the parent process",
                s.fd.load(std::memory_order_relaxed));
    }
    s.channel = nullptr;  // our copy, without a word to the peer
    s.has_channel.store(false, std::memory_order_relaxed);
    s.doorbell_fd.store(-1, std::memory_order_relaxed);
    s.tx.state = TxState::kKernel;
    s.rx.state = RxState::kKernel;
    s.rx.await_replay.store(false, std::memory_order_relaxed);
    s.pinned.store(true, std::memory_order_relaxed);
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

/// Streams whose program closed them while a replay was owed: the parent's keeper finishes them, on
/// a number that we have inherited. As long as we hold it the peer would get no FIN.
struct Adopted {
  static constexpr size_t kMax = 64;
  Stream* streams[kMax];
  size_t count;
};

void find_adopted(Stream& s, void* arg) noexcept {
  auto* a = static_cast<Adopted*>(arg);
  if (s.adopted.load(std::memory_order_relaxed) && a->count < Adopted::kMax) {
    a->streams[a->count++] = &s;
  }
}

void drop_adopted_in_child() noexcept {
  Adopted a;
  do {
    a.count = 0;
    for_each_stream(find_adopted, &a);
    for (size_t i = 0; i < a.count; ++i) {
      Stream& s = *a.streams[i];
      s.adopted.store(false, std::memory_order_relaxed);
      os::OwnedFd(s.fd.exchange(-1, std::memory_order_relaxed)).reset();
      release_stream(s);
    }
  } while (a.count == Adopted::kMax);
}

/// A stream came, or was lifted, while the others were set down: it has to be done as well.
struct Unready {
  bool found;
};

void find_unready(Stream& s, void* arg) noexcept RSOCK_NO_TSA {
  if (s.adopted.load(std::memory_order_relaxed)) return;
  const bool pinned = s.pinned.load(std::memory_order_relaxed);
  // Bytes of a peer that has ended stay where they are: nobody can put them on TCP.
  const bool lifted =
      s.channel &&
      (!s.tx.ring_done || (!s.rx.ring_done && s.channel->rx_turn().kind == TurnKind::kOpen &&
                           !s.peer_gone.load(std::memory_order_relaxed)));
  if ((s.holders == nullptr && !pinned) || lifted) static_cast<Unready*>(arg)->found = true;
}

/// A kernel epoll instance that two processes share can't hold our registrations for one of them.
void pin_if_watched_locked(Stream& s, void*) noexcept RSOCK_NO_TSA {
  for (Watcher& w : s.watchers) {
    if (!w.survives_fork()) continue;
    s.pinned.store(true, std::memory_order_relaxed);
    s.not_lifted.store("in an epoll instance shared with a forked process",
                       std::memory_order_relaxed);
    w.on_shared_locked();
  }
}

void ask_again(Stream& s, void*) noexcept {
  s.lift_asked.store(s.pinned.load(std::memory_order_relaxed), std::memory_order_relaxed);
  s.calls.store(0, std::memory_order_relaxed);
}

}  // namespace

void prepare_fork() noexcept {
  t_fork_until_ns = monotonic_ns() + kHandOverNs;
  set_down_all("fork", false, Patience::at_most(kHandOverNs));
}

void before_fork() noexcept RSOCK_NO_TSA {
  constexpr int64_t kLeastNs = 20'000'000;  // for what was lifted since prepare_fork()
  const uint64_t now = monotonic_ns();
  const int64_t left = t_fork_until_ns == 0    ? kHandOverNs
                       : t_fork_until_ns > now ? static_cast<int64_t>(t_fork_until_ns - now)
                                               : 0;
  t_fork_until_ns = 0;
  const Patience patience = Patience::at_most(std::max(left, kLeastNs));
  g_fork.lock();
  add_holder_to_all();  // first: from now on none of them is lifted
  for (int i = 0;; ++i) {
    set_down_all("fork", false, patience);
    Keeper::before_fork();  // not earlier: the peers' answers are its work
    lock_all_streams(g_epoll_lock.get());
    transport::lock_segments();  // last: channels park them under a stream's locks
    Unready unready{false};
    for_each_stream_locked(find_unready, &unready);
    if (!unready.found || i == 3 || patience.theirs.passed()) break;
    transport::unlock_segments();
    unlock_all_streams(g_epoll_unlock.get());
    Keeper::after_fork_parent();
    add_holder_to_all(/*fresh_only=*/true);
  }
  // Last: other threads add to their instances until everything is locked.
  for_each_stream_locked(pin_if_watched_locked, nullptr);
}

void after_fork_parent(bool failed) noexcept RSOCK_NO_TSA {
  transport::unlock_segments();
  unlock_all_streams(g_epoll_unlock.get());
  Keeper::after_fork_parent();
  if (failed) remove_holder_from_all();
  for_each_stream(ask_again, nullptr);
  g_fork.unlock();
}

void after_fork_child() noexcept {
  g_fork.reset_after_fork();
  g_epoll_fork_child();
  slab_after_fork_child();
  transport::segments_after_fork_child();
  Keeper::after_fork_child();
  counters_after_fork_child();
  for_each_stream(reset_in_child, nullptr);
  drop_adopted_in_child();
}

void before_spawn() noexcept {
  set_down_all("a child process was spawned", true, Patience::at_most(kHandOverNs));
}

/// The new program would write in the middle of our replay: better that it hears of a reset.
static void reset_what_is_not_out() noexcept {
  for_each_descriptor([](Stream& s, int fd) {
    if (!s.has_channel.load(std::memory_order_acquire)) return;
    const auto flags = os::fcntl(fd, F_GETFD);
    if (!flags || (*flags & FD_CLOEXEC) != 0) return;  // the peer finds the end in the memory
    MutexLock lock(s.tx.mutex);
    if (s.tx.state != TxState::kKernel) abort_connection(fd);
  });
}

void before_exec() noexcept {
  const Deadline theirs = Deadline::after_ns(kHandOverNs);
  set_down_all("exec", true, Patience{theirs, Deadline::after_ns(0), nullptr});
  finish_own_replays(kStuckNs);
  reset_what_is_not_out();
  finish_adopted();
  write_summary_for_exec();
}

void before_sandbox() noexcept {
  set_down_all("a seccomp filter", true, Patience::at_most(kHandOverNs));
  Keeper::stop();
  write_summary();
}

void before_unshare() noexcept {
  set_down_all("unshare or setns", false, Patience::at_most(kHandOverNs));
  Keeper::stop();
  set_down_all("unshare or setns", false,
               Patience::at_most(kHandOverNs));  // what was lifted meanwhile
}

void after_unshare() noexcept { Keeper::resume(); }

void first_thread_ends() noexcept { Keeper::first_thread_ends(); }

void before_exit() noexcept {
  finish_remote_streams(kStuckNs);
  finish_own_replays(kStuckNs);
  let_go_of_remote_streams();
  finish_adopted();
  write_summary();
}

}  // namespace rsock::stream
