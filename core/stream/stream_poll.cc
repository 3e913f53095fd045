// What poll(2) would say of a stream: the channel's part from its words, the rest from the kernel.
//
// The rules are tcp_poll()'s (net/ipv4/tcp.c): IN when there are bytes or the end; RDHUP and IN
// after FIN; HUP when both directions are over; OUT when a third of the room is free or our
// direction is over; ERR on an error.

#include <poll.h>
#include <sys/ioctl.h>

#include "core/os/os.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

constexpr short kIn = POLLIN | POLLRDNORM;
constexpr short kOut = POLLOUT | POLLWRNORM;

struct Halves {
  short events = 0;
  bool ask_kernel_in = false;   // the kernel's IN, RDHUP count
  bool ask_kernel_out = false;  // the kernel's OUT counts
  bool died_silently = false;   // no word in the channel about an end that TCP may tell of
  bool rx_shut = false;         // by the program: SHUT_RD
  bool end_unknown = false;     // TCP's end may be none: the word that explains it is on its way
};

/// FIN may have overtaken the word that explains it: recv() would wait for that (judge_kernel_end),
/// unless the program has shut this direction itself.
bool end_unknown_locked(Stream& s) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  return s.channel && !s.rx.shut && s.rx.await_replay.load(std::memory_order_relaxed) &&
         !end_known_locked(s);
}

bool nothing_queued(int fd) noexcept {
  const auto queued = os::ioctl_int(fd, FIONREAD);
  return queued && *queued == 0;
}

/// SO_RCVLOWAT: TCP's last bytes and the ring's first ones count together.
bool reaches_over_the_switch_locked(Stream& s, size_t low_water) noexcept
    RSOCK_REQUIRES(s.rx.mutex) {
  const auto queued = os::ioctl_int(s.fd.load(std::memory_order_relaxed), FIONREAD);
  return queued && static_cast<size_t>(*queued) + s.channel->rx_available() >= low_water;
}

void look_at_rx(Stream& s, Halves* h) noexcept {
  MutexLock lock(s.rx.mutex);
  h->rx_shut = s.rx.shut;
  const size_t low_water = s.low_water.load(std::memory_order_relaxed);
  if (s.rx.state == RxState::kTcp) {
    const auto start = s.channel->rx_start();
    if (start && *start == s.rx.offset.load(std::memory_order_relaxed)) {
      s.rx.state = RxState::kRing;
    } else {
      h->ask_kernel_in = true;  // which knows SO_RCVLOWAT
      if (low_water != 1 && start && reaches_over_the_switch_locked(s, low_water)) h->events |= kIn;
      return;
    }
  }
  if (s.rx.state == RxState::kKernel) {
    h->ask_kernel_in = true;
    h->died_silently = s.peer_gone.load(std::memory_order_acquire) &&
                       !s.rx.fin_seen.load(std::memory_order_relaxed);
    h->end_unknown = end_unknown_locked(s);
    return;
  }
  Channel& ch = *s.channel;
  // Fewer than SO_RCVLOWAT: only if no more can come (tcp_stream_is_readable()).
  if (ch.rx_available() >= low_water) {
    h->events |= kIn;
    return;
  }
  const Turn turn = ch.rx_turn();
  const bool event = s.tcp_event.load(std::memory_order_acquire);
  const bool gone = s.peer_gone.load(std::memory_order_acquire);
  if (s.rx.shut) {
    h->events |= kIn | POLLRDHUP;
    h->ask_kernel_in = true;  // HUP, if the other side of ours is shut as well
  }
  if (ch.rx_failed()) h->events |= kIn;  // recv() will say ECONNRESET
  if (turn.kind == TurnKind::kOpen && !event && !gone) return;
  if (ch.rx_available() != 0) {
    h->events |= kIn;
    return;
  }
  // A death is told by the line: until then there is nothing to read.
  if (turn.kind == TurnKind::kOpen && !ch.decides_alone() && !gone && !s.rx.shut) return;
  h->died_silently = turn.kind == TurnKind::kOpen;
  // Drained or recalled: from here on the kernel knows.
  if (turn.kind != TurnKind::kOpen || gone) leave_ring_locked(s, turn.kind);
  h->ask_kernel_in = true;
}

void look_at_tx(Stream& s, Halves* h) noexcept {
  MutexLock lock(s.tx.mutex);
  if (s.tx.state == TxState::kRing) (void)obey_tx_turn_locked(s);
  if (s.tx.state == TxState::kReplay) (void)flush_replay_locked(s);
  switch (s.tx.state) {
    case TxState::kKernel:
      h->ask_kernel_out = true;
      break;
    case TxState::kReplay:
      break;
    case TxState::kRing:
      // The same third by which the receiver wakes us (Channel::rx_read).
      if (const size_t third = tx_bound_locked(s) / 3;
          tx_room_locked(s, third) >= third || s.channel->tx_failed() || s.tx.shut) {
        h->events |= kOut;
      } else {
        note_full_locked(s);
      }
      break;
  }
}

}  // namespace

short ready_events(Stream& s, int fd, short interest) noexcept {
  Halves h;
  look_at_rx(s, &h);
  if ((interest & kOut) != 0) {
    look_at_tx(s, &h);
  }
  short events = h.events;
  if (s.error.load(std::memory_order_relaxed) != 0) events |= POLLERR | kIn | kOut;
  if (s.zero_copies.pending()) events |= POLLERR;
  if (h.rx_shut) {
    // Over a queue pair our FIN waits for an answer, and with it the kernel's word on both.
    MutexLock lock(s.tx.mutex);
    if (s.tx.shut) events |= POLLHUP | POLLRDHUP;
  }
  const bool tcp_spoke = s.tcp_event.load(std::memory_order_acquire);
  if (h.ask_kernel_in || h.ask_kernel_out || tcp_spoke) {
    short k = os::poll_now(fd, static_cast<short>(interest | POLLRDHUP));
    // While the ring holds bytes the kernel's end of stream comes after them, but Linux reports
    // RDHUP and IN together as soon as FIN has arrived, so they may be passed on; HUP says that
    // nothing can be sent either.
    if (!h.ask_kernel_in) k = static_cast<short>(k & ~(POLLIN | POLLRDNORM));
    if (!h.ask_kernel_out) k = static_cast<short>(k & ~kOut);
    if (h.end_unknown && (k & POLLRDHUP) != 0 && (k & POLLERR) == 0 && nothing_queued(fd)) {
      k = static_cast<short>(k & ~(kIn | POLLRDHUP | POLLHUP));
    }
    if ((k & POLLRDHUP) != 0 && h.died_silently) {
      judge_unread(s);
      if (s.error.load(std::memory_order_relaxed) != 0) k |= POLLERR | POLLHUP | kOut;
    }
    events = static_cast<short>(events | k);
  }
  return static_cast<short>(events & (interest | POLLERR | POLLHUP | POLLNVAL));
}

short kernel_part(Stream& s, short interest) noexcept {
  short part = 0;
  {
    MutexLock lock(s.tx.mutex);
    if (s.tx.state == TxState::kKernel) part |= interest & kOut;
  }
  MutexLock lock(s.rx.mutex);
  if (s.rx.state == RxState::kRing) return part;
  // FIN is there, and would end every sleep, but ready_events() does not believe it before the word
  // that explains it, which rings the doorbell. (What else TCP has to say, the keeper hears.)
  const int fd = s.fd.load(std::memory_order_relaxed);
  if (end_unknown_locked(s) && os::poll_now(fd, POLLRDHUP) != 0 && nothing_queued(fd)) return part;
  return static_cast<short>(part | (interest & (kIn | POLLRDHUP)));
}

std::shared_ptr<Channel> channel_of(Stream& s) noexcept {
  MutexLock lock(s.rx.mutex);
  return s.channel;
}

void arm_for_poll(Channel& channel, short interest) noexcept {
  if ((interest & (POLLIN | POLLRDNORM | POLLRDHUP | POLLPRI)) != 0 || interest == 0) {
    channel.rx_arm(transport::Sleep::kDoorbell);
  }
  if ((interest & kOut) != 0) channel.tx_arm(transport::Sleep::kDoorbell);
}

}  // namespace rsock::stream
