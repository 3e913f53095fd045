#include "core/stream/keeper.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>

#include <algorithm>
#include <new>
#include <vector>

#include "core/base/log.h"
#include "core/base/raw_syscall.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/deadline.h"
#include "core/stream/holders.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

constexpr int64_t kStrictNs = 5'000'000'000;
constexpr uint64_t kOwedCheckNs = 10'000'000;  // a lost kick costs at most this long

struct Asked {
  Stream* stream;
  uint32_t generation;
};
struct Attached {
  Stream* stream;
  uint64_t nonce;
};
struct Strict {
  Stream* stream;
  uint32_t generation;
  uint64_t deadline;
};

/// Never destroyed: the thread may outlive main().
struct Inside {
  Mutex mutex;
  bool running RSOCK_GUARDED_BY(mutex) = false;
  bool broken RSOCK_GUARDED_BY(mutex) = false;  // could not be started: everything stays on TCP
  std::vector<Asked> asked RSOCK_GUARDED_BY(mutex);
  KeeperState state;
  // Keeper thread only:
  std::vector<Attached> attached;
  std::vector<Strict> strict;
  std::atomic<int> adopted{0};
  std::atomic<int> owing{0};  // streams that wait for a replay, either way (a hint for the timer)
};

Inside* g_inside_ptr = nullptr;
Mutex g_birth;

Inside& inside() noexcept {
  MutexLock lock(g_birth);
  if (g_inside_ptr == nullptr) g_inside_ptr = new Inside;
  return *g_inside_ptr;
}

uint64_t tagged(const void* object, KeeperTag tag) noexcept {
  return reinterpret_cast<uint64_t>(object) | static_cast<uint64_t>(tag);
}

bool add(int fd, uint32_t events, uint64_t data) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  return os::epoll_ctl(keeper().epoll.get(), EPOLL_CTL_ADD, fd, &event).has_value();
}

bool open_kick_socket(KeeperState& k) noexcept {
  uint64_t random[2] = {};
  if (!os::getrandom(random, sizeof(random))) return false;
  k.kick_name = wire::keeper_name(random[0], random[1]);
  const auto fd = os::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (!fd) return false;
  auto owned = os::raise(*fd);
  if (!owned) return false;
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(k.kick_name, &address);
  if (!os::bind(owned->get(), reinterpret_cast<sockaddr*>(&address), len)) return false;
  k.kick = std::move(*owned);
  return true;
}

bool open_descriptors(KeeperState& k) noexcept {
  const auto ep = os::epoll_create(EPOLL_CLOEXEC);
  if (!ep) return false;
  auto epoll = os::raise(*ep);
  if (!epoll) return false;
  k.epoll = std::move(*epoll);
  const auto ev = os::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (!ev) return false;
  auto wake = os::raise(*ev);
  if (!wake) return false;
  k.wake = std::move(*wake);
  return open_kick_socket(k) && add(k.wake.get(), EPOLLIN, tagged(nullptr, KeeperTag::kWake)) &&
         add(k.kick.get(), EPOLLIN, tagged(nullptr, KeeperTag::kKick));
}

void wake_keeper() noexcept {
  const uint64_t one = 1;
  (void)os::write(keeper().wake.get(), &one, sizeof(one));
}

// --- what the thread does ---

bool owes(Stream& s) noexcept {
  if (!s.has_channel.load(std::memory_order_acquire)) return false;
  if (s.rx.await_replay.load(std::memory_order_acquire)) return true;
  MutexLock lock(s.tx.mutex);
  return s.tx.state == TxState::kReplay;
}

/// An adopted stream whose replay is done, or hopeless: the descriptor closes, FIN goes out.
void finish_if_adopted(Stream& s) noexcept {
  if (!s.adopted.load(std::memory_order_acquire)) return;
  int fd = -1;
  {
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    if (s.tx.state == TxState::kReplay) return;
    s.adopted.store(false, std::memory_order_relaxed);
    if (s.rx.state != RxState::kKernel) finish_rx_locked(s);
    (void)take_channel_locked(s);
    fd = s.fd.exchange(-1, std::memory_order_relaxed);
  }
  os::OwnedFd(fd).reset();
  release_stream(s);
  inside().adopted.fetch_sub(1, std::memory_order_release);
}

void tend(Stream& s) noexcept {
  attend(s);
  finish_if_adopted(s);
}

void on_tcp_event(Stream& s, uint32_t events) noexcept {
  if (!s.has_channel.load(std::memory_order_acquire)) return;
  if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) {
    // release pairs with the acquire in recv: whoever is woken below finds the flag.
    s.tcp_event.store(true, std::memory_order_release);
  }
  tend(s);
}

void on_doorbell_event(Stream& s, uint32_t events) noexcept {
  if ((events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) == 0) return;
  {
    // The event may be older than the channel that is there now: the doorbell is asked once more.
    MutexLock lock(s.rx.mutex);
    if (!s.channel || !peer_hung_up(*s.channel)) return;
    s.peer_gone.store(true, std::memory_order_release);
  }
  s.tcp_event.store(true, std::memory_order_release);
  judge_unread(s);
  tend(s);
}

void on_kicks() noexcept {
  Inside& in = inside();
  for (int i = 0; i < 64; ++i) {
    uint8_t bytes[64];
    const auto got = os::recv(in.state.kick.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (!got) return;
    const auto kick = wire::decode_kick(bytes, *got);
    if (!kick) {
      count_refusal(kick.error().reason);
      continue;
    }
    for (size_t j = 0; j < in.attached.size(); ++j) {
      if (in.attached[j].nonce == kick->nonce) {
        tend(*in.attached[j].stream);  // both ends of a channel may live in this process
      }
    }
  }
}

void on_asked() noexcept {
  Inside& in = inside();
  uint64_t count;
  (void)os::read(in.state.wake.get(), &count, sizeof(count));
  std::vector<Asked> asked;
  {
    MutexLock lock(in.mutex);
    asked.swap(in.asked);
  }
  for (const Asked& a : asked) {
    if (config().strict && !config().allow_tcp) {
      in.strict.push_back(Strict{a.stream, a.generation, monotonic_ns() + kStrictNs});
    }
    start_attempt(*a.stream, a.generation);
  }
}

uint64_t run_strict_timers(uint64_t now) noexcept {
  Inside& in = inside();
  uint64_t next = UINT64_MAX;
  std::erase_if(in.strict, [&](const Strict& st) {
    Stream& s = *st.stream;
    if (!s.owned_by(st.generation)) return true;
    if (now < st.deadline) {
      next = std::min(next, st.deadline);
      return false;
    }
    if (s.ever_lifted == 0 && !s.has_channel.load(std::memory_order_acquire)) {
      const Reason reason = s.not_lifted.load(std::memory_order_relaxed);
      RSOCK_LOG(kError, "RSOCK_STRICT: fd %d is not lifted: %s",
                s.fd.load(std::memory_order_relaxed),
                reason != nullptr ? reason : "the peer has not answered");
      s.strict_failed.store(true, std::memory_order_release);
      // close() passes through the locks before the number can be another connection's.
      MutexLock tx(s.tx.mutex);
      MutexLock rx(s.rx.mutex);
      if (s.owned_by(st.generation) && !s.closed.load(std::memory_order_relaxed)) {
        // Wakes whoever sits in the kernel with it; its next call fails.
        (void)os::shutdown(s.fd.load(std::memory_order_relaxed), SHUT_RDWR);
      }
    }
    return true;
  });
  return next;
}

uint64_t run_owed_timers(uint64_t now) noexcept {
  Inside& in = inside();
  if (in.owing.load(std::memory_order_acquire) == 0) return UINT64_MAX;
  int owing = 0;
  for (size_t i = 0; i < in.attached.size(); ++i) {
    Stream& s = *in.attached[i].stream;
    if (s.channel_nonce != in.attached[i].nonce) continue;
    if (owes(s)) tend(s);
    if (owes(s)) ++owing;
  }
  in.owing.store(owing, std::memory_order_release);
  return owing != 0 ? now + kOwedCheckNs : UINT64_MAX;
}

void dispatch(const epoll_event& event) noexcept {
  const uint64_t tag = event.data.u64 & 7;
  void* object = reinterpret_cast<void*>(event.data.u64 & ~uint64_t{7});
  switch (static_cast<KeeperTag>(tag)) {
    case KeeperTag::kWake:
      return on_asked();
    case KeeperTag::kKick:
      return on_kicks();
    case KeeperTag::kTcp:
      return on_tcp_event(*static_cast<Stream*>(object), event.events);
    case KeeperTag::kDoorbell:
      return on_doorbell_event(*static_cast<Stream*>(object), event.events);
    case KeeperTag::kAttempt:
      return on_attempt_event(object, event.events);
  }
}

void* thread_main(void*) noexcept {
  prctl(PR_SET_NAME, "rsock-keeper");
  uint64_t next = UINT64_MAX;
  for (;;) {
    epoll_event events[64];
    timespec storage;
    const timespec* timeout = nullptr;
    if (next != UINT64_MAX) {
      const uint64_t now = monotonic_ns();
      const uint64_t left = next > now ? next - now : 0;
      storage = {static_cast<time_t>(left / 1'000'000'000u),
                 static_cast<long>(left % 1'000'000'000u)};
      timeout = &storage;
    }
    const auto n = os::epoll_pwait2(keeper().epoll.get(), events, 64, timeout, nullptr, 0);
    if (!n && n.error() != EINTR) return nullptr;
    for (int i = 0; n && i < *n; ++i) dispatch(events[i]);
    const uint64_t now = monotonic_ns();
    next = std::min({run_attempt_timers(now), run_strict_timers(now), run_owed_timers(now)});
  }
}

bool start_locked(Inside& in) noexcept RSOCK_REQUIRES(in.mutex) {
  if (in.running) return true;
  if (in.broken) return false;
  if (!in.state.epoll && !open_descriptors(in.state)) {
    in.state = KeeperState{};
    in.broken = true;
    RSOCK_LOG(kWarn, "no descriptors for the helper thread: connections stay on TCP");
    return false;
  }
  sigset_t all;
  sigset_t old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);  // leaves glibc's own signals alone (setuid needs them)
  pthread_attr_t attr;
  pthread_attr_init(&attr);
  pthread_attr_setstacksize(&attr, 256 * 1024);
  pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  in.running = pthread_create(&thread, &attr, &thread_main, nullptr) == 0;
  if (!in.running) {
    // A program with much thread-local storage: it counts against the stack size, and EINVAL is the
    // answer (glibc, allocate_stack). The default size has room for it.
    pthread_attr_destroy(&attr);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    in.running = pthread_create(&thread, &attr, &thread_main, nullptr) == 0;
  }
  pthread_attr_destroy(&attr);
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  if (!in.running) {
    in.broken = true;
    RSOCK_LOG(kWarn, "no helper thread can be started: connections stay on TCP");
  }
  return in.running;
}

}  // namespace

KeeperState& keeper() noexcept { return inside().state; }

void remember_attached(Stream& s, uint64_t nonce) noexcept {
  Inside& in = inside();
  std::erase_if(in.attached, [&](const Attached& a) {
    return a.stream == &s || a.stream->channel_nonce != a.nonce ||
           !a.stream->has_channel.load(std::memory_order_acquire);
  });
  in.attached.push_back(Attached{&s, nonce});
}

void Keeper::ask_for_lift(Stream& s) noexcept {
  Inside& in = inside();
  {
    MutexLock lock(in.mutex);
    if (!start_locked(in)) {
      s.not_lifted.store("no helper thread", std::memory_order_relaxed);
      return;
    }
    in.asked.push_back(Asked{&s, s.generation.load(std::memory_order_relaxed)});
  }
  wake_keeper();
}

void Keeper::kick_peer(Stream& s) noexcept {
  if (s.peer_kick.size == 0) return;
  uint8_t bytes[wire::kKickSize];
  wire::encode(wire::Kick{s.channel_nonce}, bytes);
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(s.peer_kick, &address);
  (void)os::sendto(keeper().kick.get(), bytes, sizeof(bytes), MSG_DONTWAIT | MSG_NOSIGNAL,
                   reinterpret_cast<sockaddr*>(&address), len);
  Inside& in = inside();
  // Something may be owed to or by us now: the timer looks while that is so.
  if (in.owing.exchange(1, std::memory_order_acq_rel) == 0) wake_keeper();
}

void Keeper::watch_locked(Stream& s) noexcept {
  (void)add(s.channel->wait_fd(), EPOLLRDHUP | EPOLLET, tagged(&s, KeeperTag::kDoorbell));
  (void)add(s.fd.load(std::memory_order_relaxed), EPOLLIN | EPOLLRDHUP | EPOLLET,
            tagged(&s, KeeperTag::kTcp));
}

void Keeper::unwatch_locked(Stream& s) noexcept {
  (void)os::epoll_ctl(keeper().epoll.get(), EPOLL_CTL_DEL, s.fd.load(std::memory_order_relaxed),
                      nullptr);
  // A sleeper may keep the channel for a while: its hang-up would be taken for that of the next
  // one.
  if (s.channel) {
    (void)os::epoll_ctl(keeper().epoll.get(), EPOLL_CTL_DEL, s.channel->wait_fd(), nullptr);
  }
}

void Keeper::move_watch_locked(Stream& s, int fd) noexcept {
  if (s.channel) {
    (void)os::epoll_ctl(keeper().epoll.get(), EPOLL_CTL_DEL, s.fd.load(std::memory_order_relaxed),
                        nullptr);
  }
  s.fd.store(fd, std::memory_order_relaxed);
  if (s.channel) {
    (void)add(fd, EPOLLIN | EPOLLRDHUP | EPOLLET, tagged(&s, KeeperTag::kTcp));
  }
}

void Keeper::watch_for_room(Stream& s) noexcept {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = tagged(&s, KeeperTag::kTcp);
  (void)os::epoll_ctl(keeper().epoll.get(), EPOLL_CTL_MOD, s.fd.load(std::memory_order_relaxed),
                      &event);
}

bool Keeper::adopt_locked(Stream& s, int fd) noexcept {
  const auto copy = os::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (!copy) return false;
  auto high = os::raise(*copy);
  if (!high) return false;
  move_watch_locked(s, high->release());
  watch_for_room(s);
  s.adopted.store(true, std::memory_order_release);
  inside().adopted.fetch_add(1, std::memory_order_release);
  inside().owing.store(1, std::memory_order_release);
  wake_keeper();
  return true;
}

void Keeper::detached(Stream& s) noexcept {
  s.calls.store(0, std::memory_order_relaxed);
  s.lift_asked.store(s.pinned.load(std::memory_order_relaxed), std::memory_order_release);
}

void Keeper::finish_adopted(int64_t limit_ns) noexcept {
  {
    MutexLock lock(g_birth);
    if (g_inside_ptr == nullptr) return;
  }
  const Deadline deadline = Deadline::after_ns(limit_ns);
  while (inside().adopted.load(std::memory_order_acquire) > 0 && !deadline.passed()) {
    timespec nap{0, 500'000};
    (void)os::ppoll(nullptr, 0, &nap, nullptr, 0);
  }
}

void Keeper::after_fork_child() noexcept {
  g_birth.reset_after_fork();
  if (g_inside_ptr == nullptr) return;
  forget_attempts();
  // The parent's descriptors: closed in this process; its thread is not here. The old object is
  // abandoned, not destroyed: the dead thread may have been inside its vectors.
  g_inside_ptr->state.epoll.reset();
  g_inside_ptr->state.wake.reset();
  g_inside_ptr->state.kick.reset();
  g_inside_ptr = nullptr;
}

}  // namespace rsock::stream
