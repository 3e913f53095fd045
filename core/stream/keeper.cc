#include "core/stream/keeper.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "core/base/clock.h"
#include "core/base/deadline.h"
#include "core/base/log.h"
#include "core/base/raw_syscall.h"
#include "core/os/os.h"
#include "core/stream/fd_table.h"
#include "core/stream/heat.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {
namespace {

constexpr uint64_t kSettleNs = 300'000'000;
constexpr uint64_t kSecondNs = 1'000'000'000;
constexpr uint64_t kLongestPauseNs = 300 * kSecondNs;
constinit uint64_t g_first_pause_ns = 10 * kSecondNs;

/// Of the first thread, when it ended.
uint64_t g_mask_at_end = 0;

constexpr size_t kStackBytes = 1 << 20;  // address space: touched pages only cost memory

/// Holds the object, and never runs its destructor.
union Storage {
  constexpr Storage() : inside{} {}
  ~Storage() {}
  KeeperInside inside;
};
constinit Storage g_storage;

bool open_kick_socket(KeeperState& k) noexcept {
  uint64_t random[2] = {};
  if (!os::getrandom(random, sizeof(random))) return false;
  k.kick_name = wire::keeper_name(random[0], random[1]);
  auto owned = os::make_internal(
      [] { return os::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!owned) return false;
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(k.kick_name, &address);
  if (!os::bind(owned->get(), reinterpret_cast<sockaddr*>(&address), len)) return false;
  k.kick = std::move(*owned);
  return true;
}

bool open_descriptors(KeeperState& k) noexcept {
  auto epoll = os::make_internal([] { return os::epoll_create(EPOLL_CLOEXEC); });
  if (!epoll) return false;
  k.epoll = std::move(*epoll);
  auto wake = os::make_internal([] { return os::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!wake) return false;
  k.wake = std::move(*wake);
  return open_kick_socket(k) &&
         keeper_watch(k.wake.get(), EPOLLIN, tagged(nullptr, KeeperTag::kWake)) &&
         keeper_watch(k.kick.get(), EPOLLIN, tagged(nullptr, KeeperTag::kKick));
}

/// A number for the day when the process has none. Without it, a close may have to wait.
void make_reserve(KeeperInside& in) noexcept {
  auto spare = os::dup_internal(in.state.wake.get());
  if (!spare) return;
  in.reserve_number.store(spare->get(), std::memory_order_relaxed);
  in.reserve.store(spare->release(), std::memory_order_release);  // pairs with adopt_locked()
}

/// pthread_create allocates and takes locks of libc's. In a signal handler that interrupted malloc
/// it would wait for ever, and a data call may be in one. A handler's signal is blocked while it
/// runs: so only a thread that blocks none is sure to be in no handler (but for SA_NODEFER). A
/// program may block signals in all its threads, so after a while any thread will do.
bool may_be_in_handler(KeeperInside& in) noexcept {
  constexpr int kPutOff = 64;
  uint64_t blocked = 0;
  raw_syscall(SYS_rt_sigprocmask, SIG_BLOCK, 0, reinterpret_cast<long>(&blocked), sizeof(blocked));
  return blocked != 0 && in.put_off.fetch_add(1, std::memory_order_relaxed) < kPutOff;
}

bool create_thread(void* (*run)(void*) noexcept, size_t stack) noexcept {
  constexpr uint64_t kGlibcs = uint64_t{3} << 31;  // 32 and 33: setuid needs them
  uint64_t old = 0;
  set_signal_mask(~kGlibcs, &old);
  // Thread-local storage counts against the stack size (glibc, allocate_stack): where the program's
  // does not leave enough, the default size is tried.
  bool created = false;
  for (int i = 0; i < 2 && !created; ++i) {
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    if (i == 0 && stack != 0) pthread_attr_setstacksize(&attr, stack);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    created = pthread_create(&thread, &attr, run, nullptr) == 0;
    pthread_attr_destroy(&attr);
  }
  set_signal_mask(old, nullptr);
  return created;
}

/// One thread does this, and no other waits for it, but for a fork: the child must not get
/// descriptors that nobody knows of.
bool start(KeeperInside& in) noexcept {
  MutexLock lock(in.mutex);
  if (!in.state.epoll) {
    if (!open_descriptors(in.state)) {
      in.state = KeeperState{};
      RSOCK_LOG(kWarn, "no descriptors for the helper thread: connections stay on TCP");
      return false;
    }
    make_reserve(in);
  }
  if (!create_thread(&keeper_main, kStackBytes)) {
    RSOCK_LOG(kWarn, "no helper thread can be started: connections stay on TCP");
    return false;
  }
  return true;
}

void push_request(KeeperInside& in, Stream& s) noexcept {
  if (s.in_queue.exchange(true, std::memory_order_seq_cst)) return;  // there already
  Stream* head = in.asked.load(std::memory_order_relaxed);
  do {
    s.next_asked.store(head, std::memory_order_relaxed);
    // seq_cst pairs with take_requests() (the link is seen) and with the store of kRunning: who
    // finds the keeper still starting has its request seen by the wake-up that follows.
  } while (!in.asked.compare_exchange_weak(head, &s, std::memory_order_seq_cst,
                                           std::memory_order_relaxed));
}

}  // namespace

KeeperInside& inside() noexcept { return g_storage.inside; }

void wake_keeper() noexcept {
  const uint64_t one = 1;
  (void)os::write(keeper().wake.get(), &one, sizeof(one));
}

bool keeper_watch(int fd, uint32_t events, uint64_t data) noexcept {
  return os::epoll_add(keeper().epoll.get(), fd, events, data).has_value();
}

void keeper_unwatch(int fd) noexcept {
  (void)os::epoll_ctl(keeper().epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void call_keeper() noexcept {
  // acq_rel pairs with the keeper's exchange before it looks at the calls: either it sees this one,
  // or this thread wakes it.
  if (!inside().called.exchange(true, std::memory_order_acq_rel)) wake_keeper();
}

uint64_t tagged(const void* object, KeeperTag tag) noexcept {
  return reinterpret_cast<uint64_t>(object) | static_cast<uint64_t>(tag);
}

void remember_attached(Stream& s, uint64_t nonce) noexcept {
  KeeperInside& in = inside();
  std::erase_if(in.attached, [&](const Attached& a) {
    return a.stream == &s || a.stream->channel_nonce != a.nonce ||
           !a.stream->has_channel.load(std::memory_order_acquire);
  });
  in.attached.push_back(Attached{&s, nonce});
  if (in.idle_at == UINT64_MAX) in.idle_at = 0;
  // The peer's READY comes with a kick. The queue of kicks is short (net.unix.max_dgram_qlen), and
  // channels come in crowds; a direction without traffic would never find out.
  in.settle_until = monotonic_ns() + kSettleNs;
  in.owing.store(1, std::memory_order_release);
  s.attempts = 0;
}

void ask_again_later(Stream& s, uint32_t generation, bool shared) noexcept {
  // Another process mostly closes its copy soon, and it costs little to see whether it has.
  constexpr uint64_t kSharedNs = 200'000'000;
  auto& later = inside().later;
  const uint64_t pause =
      shared ? std::min(kSharedNs, g_first_pause_ns)
             : std::min(kLongestPauseNs, g_first_pause_ns << std::min(s.attempts, 8u));
  if (!shared) ++s.attempts;
  // On whole seconds (of a long pause), so that many streams are one wake-up.
  uint64_t at = monotonic_ns() + pause;
  if (pause >= kSecondNs) at = (at / kSecondNs + 1) * kSecondNs;
  later.push_back(Due{&s, generation, at});
  std::push_heap(later.begin(), later.end());
}

void set_first_pause(uint64_t ns) noexcept { g_first_pause_ns = ns; }

void end_process() noexcept {
  inside().first_thread_left.store(false, std::memory_order_relaxed);
  const auto run = [](void*) noexcept -> void* {
    // The program's exit handlers run as in the thread that ended, not with every signal blocked.
    set_signal_mask(g_mask_at_end, nullptr);
    exit(0);  // NOLINT(concurrency-mt-unsafe): no other thread of the program is left
  };
  if (!create_thread(run, 0)) run(nullptr);
}

/// A signal handler that finds kStarting leaves its request to whom it interrupted.
static KeeperLife start_if_none(KeeperInside& in) noexcept {
  KeeperLife life = KeeperLife::kNone;
  if (in.life.compare_exchange_strong(life, KeeperLife::kStarting, std::memory_order_seq_cst)) {
    life = start(in) ? KeeperLife::kRunning : KeeperLife::kBroken;
    in.life.store(life, std::memory_order_seq_cst);
  }
  return life;
}

void Keeper::ask_for_lift(Stream& s) noexcept {
  KeeperInside& in = inside();
  if (!in_own_process()) {
    s.lift_asked.store(false, std::memory_order_seq_cst);
    return;
  }
  push_request(in, s);
  KeeperLife life = in.life.load(std::memory_order_seq_cst);
  if (life == KeeperLife::kNone) {
    if (may_be_in_handler(in)) {
      s.lift_asked.store(false, std::memory_order_seq_cst);  // the next call asks again
      return;
    }
    life = start_if_none(in);
  }
  if (life == KeeperLife::kRunning) wake_keeper();
  if (life == KeeperLife::kBroken)
    s.not_lifted.store("no helper thread", std::memory_order_relaxed);
}

namespace {
void send_kick_locked(const Stream& s, uint16_t lane) noexcept {
  uint8_t bytes[wire::kKickSize];
  wire::encode(wire::Kick{s.channel_nonce, lane}, bytes);
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(s.peer_kick, &address);
  (void)os::sendto(keeper().kick.get(), bytes, sizeof(bytes), MSG_DONTWAIT | MSG_NOSIGNAL,
                   reinterpret_cast<sockaddr*>(&address), len);
}
}  // namespace

void Keeper::kick_peer_locked(Stream& s) noexcept {
  if (s.peer_kick.size != 0) send_kick_locked(s, 0);  // else its words go by a line
  KeeperInside& in = inside();
  // Something may be owed to or by us now: the timer looks while that is so.
  if (in.owing.exchange(1, std::memory_order_acq_rel) == 0) wake_keeper();
}

void Keeper::offer_lane_locked(Stream& s) noexcept {
  const int direction = s.channel->tx_direction();
  if (s.peer_kick.size == 0 ||
      !s.channel->tx_offer_lane(wire::lane_name(s.channel_nonce, direction))) {
    return;
  }
  send_kick_locked(s, static_cast<uint16_t>(direction + 1));
}

void Keeper::watch_locked(Stream& s) noexcept {
  (void)keeper_watch(s.channel->wait_fd(), EPOLLRDHUP | EPOLLET, tagged(&s, KeeperTag::kDoorbell));
  (void)keeper_watch(s.fd.load(std::memory_order_relaxed), EPOLLIN | EPOLLRDHUP | EPOLLET,
                     tagged(&s, KeeperTag::kTcp));
}

void Keeper::unwatch_locked(Stream& s) noexcept {
  keeper_unwatch(s.fd.load(std::memory_order_relaxed));
  // release pairs with the keeper's timer.
  if (!inside().tidying.exchange(true, std::memory_order_acq_rel)) wake_keeper();
  // A sleeper may keep the channel for a while: its hang-up would be taken for that of the next
  // one.
  if (s.channel) keeper_unwatch(s.channel->wait_fd());
}

void Keeper::move_watch_locked(Stream& s, int fd) noexcept {
  if (s.channel) keeper_unwatch(s.fd.load(std::memory_order_relaxed));
  s.fd.store(fd, std::memory_order_relaxed);
  if (s.channel) {
    (void)keeper_watch(fd, EPOLLIN | EPOLLRDHUP | EPOLLET, tagged(&s, KeeperTag::kTcp));
  }
}

void Keeper::watch_for_room(Stream& s) noexcept {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = tagged(&s, KeeperTag::kTcp);
  (void)os::epoll_ctl(keeper().epoll.get(), EPOLL_CTL_MOD, s.fd.load(std::memory_order_relaxed),
                      &event);
}

void Keeper::detached(Stream& s) noexcept {
  s.calls.store(0, std::memory_order_relaxed);
  s.lift_asked.store(s.pinned.load(std::memory_order_relaxed), std::memory_order_release);
}

void Keeper::stop() noexcept {
  KeeperInside& in = inside();
  if (in.life.load(std::memory_order_seq_cst) != KeeperLife::kRunning) return;
  const Deadline deadline = Deadline::after_ns(kSecondNs);
  finish_adopted(kSecondNs);
  in.quit.store(true, std::memory_order_seq_cst);
  wake_keeper();
  // Its last word is not yet its end: the kernel counts it until it is gone.
  while (!deadline.passed()) {
    const int thread = in.thread.load(std::memory_order_acquire);
    if (thread != 0 && raw_syscall(SYS_tgkill, os::getpid(), thread, 0) == -ESRCH) return;
    timespec nap{0, 50'000};
    (void)os::ppoll(nullptr, 0, &nap, nullptr, 0);
  }
}

void Keeper::resume() noexcept {
  KeeperInside& in = inside();
  bool owing = in.adopted.load(std::memory_order_acquire) > 0;
  for_each_stream(
      [](Stream& s, void* o) {
        if (s.has_channel.load(std::memory_order_acquire)) *static_cast<bool*>(o) = true;
      },
      &owing);
  if (owing) start_if_none(in);
}

void Keeper::first_thread_ends() noexcept {
  raw_syscall(SYS_rt_sigprocmask, SIG_BLOCK, 0, reinterpret_cast<long>(&g_mask_at_end),
              sizeof(g_mask_at_end));  // published by the store below
  inside().first_thread_left.store(true, std::memory_order_seq_cst);
  if (inside().life.load(std::memory_order_seq_cst) == KeeperLife::kRunning) wake_keeper();
}

void Keeper::before_fork() noexcept RSOCK_NO_TSA {
  KeeperInside& in = inside();
  in.mutex.lock();
  // A child of a process that is in the loader finds its lists half built. But who forks may be a
  // constructor that the loader runs: it can't wait for ever.
  const Deadline deadline = Deadline::after_ns(kSecondNs);
  while (in.loading && !deadline.passed()) {
    in.mutex.unlock();
    timespec nap{0, 500'000};
    (void)os::ppoll(nullptr, 0, &nap, nullptr, 0);
    in.mutex.lock();
  }
}

void Keeper::after_fork_parent() noexcept RSOCK_NO_TSA { inside().mutex.unlock(); }

void Keeper::after_fork_child() noexcept {
  os::forget_making_internal();
  KeeperInside& in = inside();
  forget_attempts();
  forget_rdma_in_child();
  forget_heat();
  for (Stream* s = in.asked.load(std::memory_order_relaxed); s != nullptr;) {
    s->in_queue.store(false, std::memory_order_relaxed);
    s = s->next_asked.load(std::memory_order_relaxed);
  }
  // A thread of the parent's may have been on its way into the queue.
  for_each_stream(
      [](Stream& each, void*) { each.in_queue.store(false, std::memory_order_relaxed); }, nullptr);
  // The parent's descriptors are closed in this process; its thread is not here. The lists are
  // abandoned, not freed: malloc may be locked for ever in a child of _Fork.
  in.state.epoll.reset();
  in.state.wake.reset();
  in.state.kick.reset();
  os::OwnedFd(in.reserve.load(std::memory_order_relaxed)).reset();
  new (&in) KeeperInside;
}

}  // namespace rsock::stream
