// fork, exec, spawn, exit: a stream that another process may use lives on TCP (D9).
//
// clang-format off
// | event         | before                                   | parent after    | child after                 |
// |---------------|------------------------------------------|-----------------|-----------------------------|
// | fork          | all set down, holders + 1, all locked    | unlocked        | locks made anew, no keeper  |
// | vfork, spawn  | what the child keeps is set down, pinned | nothing         | runs in our memory: nothing |
// | exec          | all set down and pinned, replays go out, | (failed) notes  | a new program takes over    |
// |               | notes for the new program (notes.h)      | of its own      | what it inherits            |
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
#include "core/stream/lineage.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"
#include "core/stream/stay.h"
#include "core/transport/shm/segment_pool.h"

namespace rsock::stream {
namespace {

using OwnProcess = bool (*)() noexcept;
constinit OwnProcess g_own_process = nullptr;

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

/// None of the program's, that is.
bool without_number(const Stream& s) noexcept {
  return s.adopted.load(std::memory_order_relaxed) || s.orphaned.load(std::memory_order_relaxed);
}

/// The parent's threads and keeper are not here: nobody is in the kernel, nobody holds a lock. A
/// channel that could not be let go of in time belongs to the parent.
void reset_in_child(Stream& s, void*) noexcept RSOCK_NO_TSA {
  s.inside.store(0, std::memory_order_relaxed);
  for (Mutex* m : {&s.tx.mutex, &s.rx.mutex, &s.watch_mutex}) m->reset_after_fork();
  drop_sleepers_in_child(s);
  holder_in_child(s);
  s.tx.gate.reset_after_fork();
  s.rx.gate.reset_after_fork();
  if (s.tx.barred) (void)s.tx.gate.take();  // the parent's parent still sends
  if (s.channel) {
    const bool adopted = without_number(s);
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
    s.strange.store(true, std::memory_order_relaxed);
  }
  if (s.lent != 0) {  // the kernel's instance is the parent's as well, and our registrations theirs
    s.lent = 0;
    pin_locked(s, kLentReason);
  }
  s.lift_asked.store(s.pinned.load(std::memory_order_relaxed), std::memory_order_relaxed);
  s.calls.store(0, std::memory_order_relaxed);
  // Bytes so far are the parent's to count.
  for (int i = 0; i < kPaths; ++i) {
    s.sent[i].store(0, std::memory_order_relaxed);
    s.received[i].store(0, std::memory_order_relaxed);
  }
  s.zero_copied.store(0, std::memory_order_relaxed);
  s.ever_lifted = 0;
  s.set_downs = 0;
}

/// Streams whose program closed them while a replay was owed, or while calls were inside: the
/// parent's keeper or threads finish them, on a number that we have inherited. As long as we hold
/// it the peer would get no FIN.
void drop_adopted_in_child() noexcept {
  for (SomeStreams some = find_streams(without_number); some.count != 0;
       some = find_streams(without_number)) {
    for (size_t i = 0; i < some.count; ++i) {
      Stream& s = *some.streams[i];
      s.adopted.store(false, std::memory_order_relaxed);
      s.orphaned.store(false, std::memory_order_relaxed);
      os::OwnedFd fd(s.fd.exchange(-1, std::memory_order_relaxed));
      release_stream(s, fd.get());
    }
  }
}

/// A stream came, or was lifted, while the others were set down: it has to be done as well.
struct Unready {
  bool found;
};

void find_unready(Stream& s, void* arg) noexcept RSOCK_NO_TSA {
  if (without_number(s)) return;
  const bool pinned = s.pinned.load(std::memory_order_relaxed);
  // Bytes of a peer that has ended stay where they are: nobody can put them on TCP.
  const bool lifted =
      s.channel &&
      (!s.tx.ring_done || (!s.rx.ring_done && s.channel->rx_turn().kind == TurnKind::kOpen &&
                           !s.peer_gone.load(std::memory_order_relaxed)));
  if ((s.holders == nullptr && !pinned) || lifted) static_cast<Unready*>(arg)->found = true;
}

/// Before this process, or a child that nobody sees, becomes another program: what that program
/// gets is out of every count. then(stream) for each of it.
template <typename Kept, typename Then>
void give_away_kept(Kept kept, Then then) noexcept {
  for (int fd = 0; fd <= FdTable::highest(); ++fd) {
    const FdKind kind = FdTable::kind(fd);
    if ((kind != FdKind::kStream && kind != FdKind::kEpoll) || !kept(fd)) continue;
    if (kind == FdKind::kEpoll) {
      give_instance_away();
    } else if (Stream* s = FdTable::stream(fd); s != nullptr) {
      give_away(*s);
      then(*s);
    }
  }
}

/// The new program has this number.
bool stays_open(int fd) noexcept {
  const auto flags = os::fcntl(fd, F_GETFD);
  return !flags || (*flags & FD_CLOEXEC) == 0;
}

void ask_again(Stream& s, void*) noexcept {
  s.lift_asked.store(s.pinned.load(std::memory_order_relaxed), std::memory_order_relaxed);
  s.calls.store(0, std::memory_order_relaxed);
}

}  // namespace

void set_own_process(bool (*own)() noexcept) noexcept { g_own_process = own; }
bool in_own_process() noexcept { return g_own_process == nullptr || g_own_process(); }

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
  make_lineage(live_streams());
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
  fill_lineage_locked();
}

void after_fork_parent(bool failed) noexcept RSOCK_NO_TSA {
  lineage_in_parent(failed);
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
  lineage_in_child();
  forget_stays_in_child();
  for_each_stream(reset_in_child, nullptr);
  drop_adopted_in_child();
}

void after_daemon() noexcept { parent_is_gone(); }

void before_spawn(bool (*copied)(int fd)) noexcept {
  // FD_CLOEXEC on each of its numbers: the new program does not get it, and until then the child
  // is between two lines of libc's. What a child of vfork does before it execs meets our entries
  // (leave_to_child()).
  const auto kept = [copied](int fd) {
    return stays_open(fd) || (copied != nullptr && copied(fd));
  };
  const Patience patience = Patience::at_most(kHandOverNs);
  give_away_kept(kept, [](Stream& s) {
    if (pin(s, kSpawned)) set_down(s, kSpawned);
  });
  for_each_descriptor([&](Stream& s, int) {
    if (s.pinned.load(std::memory_order_relaxed)) (void)set_down_and_wait(s, kSpawned, patience);
  });
}

void leave_to_child(int fd) noexcept {
  Stream* s = FdTable::stream(fd);
  if (s == nullptr) return;
  give_away(*s);
  if (!pin(*s, kSpawned)) return;
  // By the keeper: what this child has closed, or put at the stream's number, is in its own table.
  // release pairs with the keeper's exchange.
  s->set_down_due.store(true, std::memory_order_release);
  Keeper::leave_to_keeper();
  const Deadline deadline = Deadline::after_ns(kHandOverNs);
  while (s->has_channel.load(std::memory_order_acquire) && !deadline.passed()) {
    timespec nap{0, 100'000};
    (void)os::ppoll(nullptr, 0, &nap, nullptr, 0);
  }
}

/// The new program would write in the middle of our replay: better that it hears of a reset.
static void reset_what_is_not_out() noexcept {
  for_each_descriptor([](Stream& s, int fd) {
    if (!s.has_channel.load(std::memory_order_acquire)) return;
    if (!stays_open(fd)) return;  // the peer finds the end in the memory
    MutexLock lock(s.tx.mutex);
    if (s.tx.state != TxState::kKernel) abort_connection(fd);
  });
}

/// The new program may take it over: whoever else has it is known, and this process used it in no
/// way that nobody sees. What the program asked of the kernel's socket is looked at when it is to
/// be lifted.
static bool may_be_taken_over(int fd) noexcept {
  const Stream* const s = FdTable::stream(fd);
  if (s == nullptr || fd >= kMostInherited) return false;
  return !s->strange.load(std::memory_order_relaxed);
}

static bool keeps_an_instance() noexcept {
  for (int fd = 0; fd <= FdTable::highest(); ++fd) {
    if (FdTable::kind(fd) == FdKind::kEpoll && stays_open(fd)) return true;
  }
  return false;
}

void before_exec() noexcept {
  const Deadline theirs = Deadline::after_ns(kHandOverNs);
  // Before all are pinned: what the new program can't know of, or not find. One that watches them
  // in an instance which it inherits would not hear of what comes over a channel.
  const bool watched = keeps_an_instance();
  give_away_kept([=](int fd) { return stays_open(fd) && (watched || !may_be_taken_over(fd)); },
                 [](Stream&) {});
  settle_lineages();
  set_down_all(kExec, true, Patience{theirs, Deadline::after_ns(0), nullptr});
  finish_own_replays(kStuckNs);
  reset_what_is_not_out();
  finish_adopted();
  for_each_descriptor([](Stream& s, int fd) {
    if (stays_open(fd)) leave_by_exec(s, fd);
  });
  write_summary_for_exec();
}

void after_failed_exec() noexcept {
  for_each_descriptor([](Stream& s, int) { come_back_from_exec(s); });
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

void before_thread_exit() noexcept { Keeper::stop(); }

void first_thread_ends() noexcept { Keeper::first_thread_ends(); }

void before_exit() noexcept {
  finish_remote_streams(kStuckNs);
  finish_own_replays(kStuckNs);
  let_go_of_remote_streams();
  finish_adopted();
  write_summary();
}

}  // namespace rsock::stream
