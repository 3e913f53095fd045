#include "core/stream/hand_over.h"

#include <poll.h>

#include <algorithm>

#include "core/base/cancel_off.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/bell_sleep.h"
#include "core/stream/fd_table.h"

namespace rsock::stream {
namespace {

/// What still keeps the stream from being the kernel's alone.
struct Owed {
  bool ours = false;
  bool theirs = false;
};

Owed owed(Stream& s) noexcept {
  Owed o;
  {
    MutexLock lock(s.tx.mutex);
    o.ours = s.tx.state == TxState::kReplay;
    // Called back, and the peer has not said yet where it is.
    o.theirs = s.tx.state == TxState::kRing && !s.peer_gone.load(std::memory_order_acquire);
  }
  MutexLock lock(s.rx.mutex);
  // A peer that is gone gives nothing any more.
  o.theirs |= s.channel && s.rx.await_replay.load(std::memory_order_relaxed) &&
              !s.channel->rx_replayed() && !s.peer_gone.load(std::memory_order_acquire);
  return o;
}

/// Grows: most waits are short, and a long one should cost nothing.
class Nap {
 public:
  explicit Nap(long longest_ns) noexcept : longest_(longest_ns) {}
  /// fd >= 0: room in TCP ends it.
  void take(int fd) noexcept {
    pollfd room{fd, POLLOUT, 0};
    timespec t{0, now_};
    (void)os::ppoll(&room, fd >= 0 ? 1 : 0, &t, nullptr, 0);
    now_ = std::min(now_ * 5 / 4, longest_);
  }

 private:
  long now_ = 100'000;
  long longest_;
};

}  // namespace

HandOver set_down_and_wait(Stream& s, Reason reason, const Patience& patience) noexcept {
  if (!s.has_channel.load(std::memory_order_acquire)) return HandOver::kDone;
  const uint32_t generation = s.generation.load(std::memory_order_acquire);
  set_down(s, reason);
  Nap nap(2'000'000);
  for (;;) {
    attend(s);
    // Closed meanwhile: what is owed is the keeper's, and the object may be another connection.
    if (!s.owned_by(generation) || s.closed.load(std::memory_order_relaxed)) return HandOver::kDone;
    if (!s.has_channel.load(std::memory_order_acquire)) return HandOver::kDone;
    const Owed o = owed(s);
    if (!o.ours && !o.theirs) {
      maybe_detach(s);  // the last word may have come after attend() looked
      return s.has_channel.load(std::memory_order_acquire) ? HandOver::kBytesHere : HandOver::kDone;
    }
    if (patience.since != nullptr && patience.since->broken())
      return o.ours ? HandOver::kOurs : HandOver::kTheirs;
    const bool wait =
        (o.ours && !patience.ours.passed()) || (o.theirs && !patience.theirs.passed());
    if (!wait) {
      RSOCK_LOG(kWarn, "fd %d: %s: %s", s.fd.load(std::memory_order_relaxed), reason,
                o.ours ? "the peer does not read, our bytes are not out yet"
                       : "the peer has not given back its bytes in time");
      return o.ours ? HandOver::kOurs : HandOver::kTheirs;
    }
    nap.take(o.ours ? s.fd.load(std::memory_order_relaxed) : -1);
  }
}

long wait_until_kernel_sends_locked(Stream& s, Deadline deadline,
                                    const HandlerWatch& since) noexcept {
  // Who waits here is in a call that is no cancellation point, or can't be left before its end.
  const CancelOff whole;
  const uint32_t generation = s.generation.load(std::memory_order_acquire);
  const bool closed = s.closed.load(std::memory_order_relaxed);
  while (s.channel && s.tx.state != TxState::kKernel) {
    std::shared_ptr<Channel> channel = s.channel;
    const uint32_t bell = channel->tx_bell();
    channel->tx_arm(transport::Sleep::kFutex);
    (void)obey_tx_turn_locked(s);
    if (s.tx.lied || channel->tx_failed()) return -EPROTO;
    if (s.tx.state == TxState::kReplay) (void)flush_replay_locked(s);
    if (s.tx.state == TxState::kKernel) break;
    timespec storage;
    const long e = sleep_on_bell(s.tx.mutex, std::move(channel), &Channel::tx_sleep, bell,
                                 deadline.for_futex(&storage, true), since);
    if (!s.owned_by(generation) || s.closed.load(std::memory_order_relaxed) != closed) {
      return -EBADF;  // another thread closed it
    }
    if (e != 0) return s.tx.state == TxState::kKernel ? 0 : e;
  }
  return 0;
}

/// Of what was published: not in the kernel yet (kReplay), or not in the peer's memory (kRing). Two
/// counts that can't be compared: a peer that froze us may want more than was under way.
struct Unsent {
  TxState state = TxState::kKernel;
  uint64_t bytes = 0;
};

static Unsent unsent_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  if (!s.channel || s.tx.state == TxState::kKernel) return {};
  if (s.tx.state == TxState::kReplay) {
    return {TxState::kReplay, s.channel->tx_tail() - s.tx.replay_next};
  }
  return {TxState::kRing, s.channel->tx_undelivered()};
}

bool kernel_sends_in_the_end_locked(Stream& s, int64_t stuck_ns) noexcept {
  for (;;) {
    const Unsent before = unsent_locked(s);
    const Deadline stuck = Deadline::after_ns(stuck_ns);
    long e = -EINTR;
    while (e == -EINTR) e = wait_until_kernel_sends_locked(s, stuck, HandlerWatch());
    if (e == 0) return true;
    const Unsent now = unsent_locked(s);
    const bool moved = now.state != before.state || now.bytes < before.bytes;
    if (e != -EAGAIN || !moved) return false;
  }
}

bool set_down_and_wait(Stream& s, Reason reason) noexcept {
  return set_down_and_wait(s, reason, Patience::at_most(kHandOverNs)) == HandOver::kDone;
}

/// f(stream, fd) for every descriptor of a stream with a channel, where this thread may take the
/// locks: a signal handler may end the process in the middle of a send, and that stream is as it is.
template <typename F>
static void for_each_lifted(F f) noexcept {
  const auto visit = [&](Stream& s, int fd) {
    if (!s.has_channel.load(std::memory_order_acquire)) return;
    if (s.tx.mutex.held_by_me() || s.rx.mutex.held_by_me()) return;
    f(s, fd);
  };
  for (int fd = 0; fd <= FdTable::highest() && live_streams() != 0; ++fd) {
    if (Stream* s = FdTable::stream(fd); s != nullptr) visit(*s, fd);
  }
  // And those that were closed while calls are inside: they have a number of ours, and no entry.
  const SomeStreams orphans = find_streams(
      [](const Stream& s) noexcept { return s.orphaned.load(std::memory_order_acquire); });
  for (size_t i = 0; i < orphans.count; ++i) {
    Stream& s = *orphans.streams[i];
    visit(s, s.fd.load(std::memory_order_relaxed));
  }
}

/// A process that ends takes its queue pairs with it: what it has published must be in the peers'
/// memory before, and its last words on the way. Bytes that have not arrived yet, of all streams.
static uint64_t end_remote_streams(int* waiting) noexcept {
  uint64_t under_way = 0;
  *waiting = 0;
  for_each_lifted([&](Stream& s, int) {
    MutexLock lock(s.tx.mutex);
    if (!s.channel || s.channel->decides_alone() || s.tx.state != TxState::kRing) return;
    (void)s.channel->tx_end();
    (void)obey_tx_turn_locked(s);
    if (s.tx.state != TxState::kRing || s.tx.lied) return;
    ++*waiting;
    under_way += s.channel->tx_undelivered();
  });
  return under_way;
}

/// With bytes unread the kernel, which does not know of them, resets.
void let_go_of_remote_streams() noexcept {
  for_each_lifted([](Stream& s, int fd) {
    MutexLock tx(s.tx.mutex);
    MutexLock rx(s.rx.mutex);
    if (!s.channel || s.channel->decides_alone()) return;
    if (unread_in_channel_locked(s)) make_close_reset(fd);
    s.channel->let_go();
  });
}

void finish_remote_streams(int64_t stuck_ns) noexcept {
  Nap nap(10'000'000);
  uint64_t before = UINT64_MAX;
  Deadline stuck = Deadline::after_ns(stuck_ns);
  for (;;) {
    int waiting = 0;
    uint64_t now = end_remote_streams(&waiting);
    if (waiting == 0) return;
    now += static_cast<uint64_t>(waiting);  // neither grows: their sum tells of both
    if (now != before) {
      before = now;
      stuck = Deadline::after_ns(stuck_ns);
    } else if (stuck.passed()) {
      RSOCK_LOG(kWarn, "the peer does not answer: bytes may be lost with this process");
      return;
    }
    nap.take(-1);
  }
}

/// One try for every descriptor. The number of one that still has bytes to send, or -1.
static int push_replays() noexcept {
  int waiting = -1;
  for_each_lifted([&](Stream& s, int fd) {
    MutexLock lock(s.tx.mutex);
    // The peer may have frozen us this instant, and the keeper not have looked yet.
    (void)obey_tx_turn_locked(s);
    if (s.tx.state == TxState::kReplay && !flush_replay_locked(s)) waiting = fd;
  });
  return waiting;
}

void finish_own_replays(int64_t stuck_ns) noexcept {
  Nap nap(10'000'000);
  uint64_t before = replayed_bytes();
  Deadline stuck = Deadline::after_ns(stuck_ns);
  for (;;) {
    const int fd = push_replays();
    if (fd < 0) return;
    const uint64_t now = replayed_bytes();
    if (now != before) {
      before = now;
      stuck = Deadline::after_ns(stuck_ns);
    } else if (stuck.passed()) {
      RSOCK_LOG(kWarn, "fd %d: the peer does not read: bytes are lost with this process", fd);
      return;
    }
    nap.take(fd);
  }
}

}  // namespace rsock::stream
