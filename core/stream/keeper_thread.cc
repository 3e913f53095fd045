// What the keeper's thread does: events, requests, timers.

#include <fcntl.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/base/clock.h"
#include "core/base/config.h"
#include "core/base/inside.h"
#include "core/base/log.h"
#include "core/base/raw_syscall.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/heat.h"
#include "core/stream/holders.h"
#include "core/stream/keeper.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/lineage.h"
#include "core/stream/moves.h"
#include "core/transport/shm/segment_pool.h"

namespace rsock::stream {
namespace {

constexpr int64_t kStrictNs = 5'000'000'000;
constexpr uint64_t kLastThreadCheckNs = 100'000'000;
constexpr uint64_t kOwedCheckNs = 10'000'000;  // a lost kick costs at most this long

bool owes(Stream& s) noexcept {
  if (!s.has_channel.load(std::memory_order_acquire)) return false;
  if (s.rx.await_replay.load(std::memory_order_acquire)) return true;
  MutexLock lock(s.tx.mutex);
  // Called back from a lost path: attend() times the answer (TCP_USER_TIMEOUT).
  if (s.tx.state == TxState::kRing && s.path_failed_ns != 0) return true;
  return s.tx.state == TxState::kReplay;
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
  if ((events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) tend_after_hang_up(s);
}

void join_lane(Stream& s, uint64_t nonce, int direction) noexcept {
  MutexLock lock(s.rx.mutex);
  if (s.channel != nullptr && s.channel_nonce == nonce && s.channel->tx_direction() != direction) {
    s.channel->rx_join_lane(wire::lane_name(nonce, direction));
  }
}

void on_kicks() noexcept {
  KeeperInside& in = inside();
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
      if (in.attached[j].nonce != kick->nonce) continue;
      Stream& s = *in.attached[j].stream;  // both ends of a channel may live in this process
      if (kick->lane != 0) {
        join_lane(s, kick->nonce, kick->lane - 1);
      } else {
        tend(s);
      }
    }
  }
}

/// RSOCK_STRICT: what is not lifted by then fails. Nothing to wait for where no path can be had:
/// what RDMA there is shows soon (fail_strict_now()).
uint64_t strict_deadline() noexcept {
  return config().allow_shm || config().allow_rdma ? monotonic_ns() + kStrictNs : 0;
}

void on_wake() noexcept {
  uint64_t count;
  (void)os::read(keeper().wake.get(), &count, sizeof(count));
}

void take_requests() noexcept {
  KeeperInside& in = inside();
  // acquire pairs with the push in ask_for_lift(): the links are there.
  Stream* s = in.asked.exchange(nullptr, std::memory_order_seq_cst);
  while (s != nullptr) {
    Stream* const next = s->next_asked.load(std::memory_order_relaxed);
    // Before the look at the stream: one that is recycled and asks anew from here on is queued
    // anew.
    s->in_queue.exchange(false, std::memory_order_seq_cst);
    const uint32_t generation = s->generation.load(std::memory_order_acquire);
    if (s->lift_asked.load(std::memory_order_seq_cst) && generation % 2 != 0) {
      if (config().strict && !config().allow_tcp) {
        in.strict.push_back(Due{s, generation, strict_deadline()});
      }
      start_attempt(*s, generation);
    }
    s = next;
  }
}

uint64_t run_strict_timers(uint64_t now) noexcept {
  KeeperInside& in = inside();
  uint64_t next = UINT64_MAX;
  std::erase_if(in.strict, [&](const Due& st) {
    Stream& s = *st.stream;
    if (!s.owned_by(st.generation)) return true;
    if (now < st.at) {
      next = std::min(next, st.at);
      return false;
    }
    // A stream that only received on its channel, and has let go of it, was lifted as well.
    if (!s.ever_attached && !s.has_channel.load(std::memory_order_acquire)) {
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

uint64_t run_later_timers(uint64_t now) noexcept {
  auto& later = inside().later;
  while (!later.empty() && later.front().at <= now) {
    const Due due = later.front();
    std::pop_heap(later.begin(), later.end());
    later.pop_back();
    Stream& s = *due.stream;
    if (s.owned_by(due.generation) && !s.has_channel.load(std::memory_order_acquire)) {
      s.lift_asked.store(s.pinned.load(std::memory_order_relaxed), std::memory_order_release);
    }
  }
  return later.empty() ? UINT64_MAX : later.front().at;
}

uint64_t run_owed_timers(uint64_t now) noexcept {
  KeeperInside& in = inside();
  if (in.owing.load(std::memory_order_acquire) == 0) return UINT64_MAX;
  const bool settling = now < in.settle_until;
  int owing = 0;
  for (size_t i = 0; i < in.attached.size(); ++i) {
    Stream& s = *in.attached[i].stream;
    if (s.channel_nonce != in.attached[i].nonce) continue;
    if (settling) notice_ready(s);
    // acquire pairs with the release in maybe_detach().
    if (s.set_down_due.exchange(false, std::memory_order_acq_rel)) set_down(s, kSpawned);
    if (s.detach_due.exchange(false, std::memory_order_acq_rel) || owes(s)) tend(s);
    if (owes(s)) ++owing;
  }
  if (settling) ++owing;
  in.owing.store(owing, std::memory_order_release);
  return owing != 0 ? now + kOwedCheckNs : UINT64_MAX;
}

/// Segments of channels that went wait for another use, not for long.
uint64_t run_tidy_timer(uint64_t now) noexcept {
  constexpr uint64_t kEveryNs = 1'000'000'000;
  constexpr int kRounds = 10;  // at least: the channel goes a little after we hear of it
  KeeperInside& in = inside();
  if (!in.tidying.load(std::memory_order_acquire)) return UINT64_MAX;
  if (in.tidy_at == 0) in.tidy_at = now + kEveryNs;
  if (now < in.tidy_at) return in.tidy_at;
  if (transport::tidy_segments(now) || ++in.tidy_rounds < kRounds) {
    in.tidy_at = now + kEveryNs;
    return in.tidy_at;
  }
  in.tidy_at = 0;
  in.tidy_rounds = 0;
  in.tidying.store(false, std::memory_order_release);
  return UINT64_MAX;
}

void dispatch(const epoll_event& event) noexcept {
  const uint64_t tag = event.data.u64 & 7;
  void* object = reinterpret_cast<void*>(event.data.u64 & ~uint64_t{7});
  switch (static_cast<KeeperTag>(tag)) {
    case KeeperTag::kWake:
      return on_wake();
    case KeeperTag::kKick:
      return on_kicks();
    case KeeperTag::kTcp:
      return on_tcp_event(*static_cast<Stream*>(object), event.events);
    case KeeperTag::kDoorbell:
      return on_doorbell_event(*static_cast<Stream*>(object), event.events);
    case KeeperTag::kAttempt:
      return on_attempt_event(object, event.events);
    case KeeperTag::kSource:
      return static_cast<KeeperSource*>(object)->on_event(event.events);
  }
}

/// Whether this is the last thread, but for the first one, which has ended and waits for us: its
/// process id and state come first in the line, the number of threads is the 20th word (proc(5)).
bool last_thread() noexcept {
  char text[512];
  const auto fd =
      os::make_internal([] { return os::open("/proc/self/stat", O_RDONLY | O_CLOEXEC, 0); });
  if (!fd) return false;
  const auto n = os::read(fd->get(), text, sizeof(text) - 1);
  if (!n) return false;
  text[*n] = '\0';
  const char* word = strrchr(text, ')');  // the name may hold anything
  if (word == nullptr || word[1] != ' ' || word[2] != 'Z') return false;
  for (int i = 2; i < 20 && word != nullptr; ++i) word = strchr(word + 1, ' ');
  return word != nullptr && strtol(word + 1, nullptr, 10) == 2;
}

/// After pthread_exit of the first thread: whether it is time to end the process.
bool is_last_thread() noexcept {
  KeeperInside& in = inside();
  return in.first_thread_left.load(std::memory_order_acquire) &&
         in.adopted.load(std::memory_order_acquire) == 0 && last_thread();
}

uint64_t run_timers(uint64_t now) noexcept {
  // In this order: strict streams hear at once of paths that can't be had.
  return std::min(
      {run_attempt_timers(now), run_rdma_timers(now), run_heat_timer(now), run_idle_timer(now),
       run_strict_timers(now), run_later_timers(now), run_owed_timers(now), run_tidy_timer(now),
       run_full_timer(now), run_lane_timer(now),
       inside().first_thread_left.load(std::memory_order_acquire) ? now + kLastThreadCheckNs
                                                                  : UINT64_MAX});
}

/// To the point where stop() waits for the kernel only.
void* end_thread() noexcept {
  KeeperInside& in = inside();
  in.quit.store(false, std::memory_order_relaxed);
  in.life.store(KeeperLife::kNone, std::memory_order_seq_cst);
  return nullptr;
}

}  // namespace

/// The keeper closes in the program's place, and must not wait there as SO_LINGER asks a closing
/// thread to. (While another process holds the socket its close ends nothing, and the option is
/// not ours.)
static void close_without_waiting(const Stream& s) noexcept {
  const linger never{};
  if (!sole_holder(s)) return;
  (void)os::setsockopt(s.fd.load(std::memory_order_relaxed), SOL_SOCKET, SO_LINGER, &never,
                       sizeof(never));
}

void finish_if_adopted(Stream& s, bool lingers) noexcept {
  if (!s.adopted.load(std::memory_order_acquire)) return;
  int fd = -1;
  std::shared_ptr<Channel> channel;
  {
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    if (!s.adopted.load(std::memory_order_relaxed) || s.awaited) return;
    if (s.tx.state != TxState::kKernel) return;
    if (!lingers) close_without_waiting(s);
    s.adopted.store(false, std::memory_order_relaxed);
    if (s.rx.state != RxState::kKernel) finish_rx_locked(s);
    channel = take_channel_locked(s);
    fd = s.fd.exchange(-1, std::memory_order_relaxed);
  }
  if (channel) channel->wake_local();  // threads that still wait meet `closed`
  unlink_watchers(s);                  // one may have come while the program closed it
  release_stream(s, fd);
  inside().adopted.fetch_sub(1, std::memory_order_release);
  Keeper::give_back(fd);
}

void tend(Stream& s) noexcept {
  attend(s);
  finish_if_adopted(s);
}

void tend_after_hang_up(Stream& s) noexcept {
  {
    // The news may be older than the channel that is there now: it is asked once more.
    MutexLock lock(s.rx.mutex);
    if (!s.channel || !s.channel->peer_let_go()) return;
  }
  s.tcp_event.store(true, std::memory_order_release);
  // Before the program's threads may see it: they would call back what the dead has not read, and
  // put it on a connection that its kernel is about to end.
  judge_unread(s);
  {
    MutexLock lock(s.rx.mutex);
    if (!s.channel) return;  // taken meanwhile; only this thread attaches another
    s.peer_gone.store(true, std::memory_order_release);
  }
  tend(s);
}

void fail_strict_now(Stream& s, uint32_t generation) noexcept {
  for (Due& due : inside().strict) {
    if (due.stream == &s && due.generation == generation) due.at = 0;
  }
}

void* keeper_main(void*) noexcept {
  KeeperInside& in = inside();
  raw_syscall(SYS_prctl, PR_SET_NAME, reinterpret_cast<long>("rsock-keeper"));
  in.thread.store(static_cast<int>(raw_syscall(SYS_gettid)), std::memory_order_release);
  uint64_t next = 0;  // what a former thread left may be due
  {
    MutexLock lock(in.mutex);
    watch_lineages();
  }
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
    const auto n = os::epoll_pwait2(in.state.epoll.get(), events, 64, timeout, nullptr, 0);
    if (!n && n.error() != EINTR) return nullptr;
    bool look = false;
    bool last = false;
    {
      MutexLock lock(in.mutex);
      const InsideLibrary guard;  // what rdma-core opens and closes is none of the program's
      for (int i = 0; n && i < *n; ++i) dispatch(events[i]);
      if (in.quit.load(std::memory_order_seq_cst)) return end_thread();
      take_line_calls();
      take_requests();
      tidy_lineages();
      next = run_timers(monotonic_ns());
      look = begin_look_for_rdma();
      last = is_last_thread();
    }
    if (last) end_process();
    if (!look) continue;
    {
      const InsideLibrary guard;
      look_for_rdma();
    }
    MutexLock lock(in.mutex);
    end_look_for_rdma();
    next = 0;
  }
}

}  // namespace rsock::stream
