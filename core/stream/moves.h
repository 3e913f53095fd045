// Moving directions between TCP and a channel: the steps of PROTOCOL.md, one function each.
//
// Suffix _locked: the caller holds the mutex of that direction. Others take what they need.
// Thread safety: program threads and the keeper call these alike; the locks decide.
#pragma once

#include <algorithm>
#include <optional>

#include "core/stream/fd_table.h"
#include "core/stream/stream.h"

namespace rsock::stream {

// --- stream_lift.cc ---
/// Puts a freshly agreed channel under s, if s is still what it was, and its socket the one with
/// this cookie. Keeper only. False: refused (closed, pinned, or used without our seeing it); the
/// channel is dropped by the caller.
bool attach(Stream& s, uint32_t generation, uint64_t cookie, std::shared_ptr<Channel> channel,
            uint64_t nonce, const wire::SocketName& peer_kick) noexcept;
/// Looks whether the peer is ready for what we send. Whoever leaves the kernel last switches.
void notice_ready_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex);
/// The same, and switches if it can.
void notice_ready(Stream& s) noexcept;
/// Receiver: promises that no reader can miss the switch, if none is in the kernel now.
void try_ready(Stream& s) noexcept;
/// Sender: fixes N and goes on in the ring, if the peer is ready and nobody is in the kernel.
void try_switch_tx(Stream& s) noexcept;
/// tcpi_state, of include/net/tcp_states.h.
inline constexpr int kEstablished = 1;
inline constexpr int kCloseWait = 8;
/// How many of the program's bytes TCP has carried so far, whoever moved them: for a stream that
/// this process has not seen from its start. Nothing: not known just now, or it has ended.
std::optional<uint64_t> kernel_received(int fd) noexcept;
std::optional<uint64_t> kernel_sent(const Stream& s, int fd) noexcept;
/// A data call on TCP moved n bytes (n <= 0: none): asks for a lift when the stream is worth it.
void note_traffic(Stream& s) noexcept;
/// Descriptor flags, timeouts and limits as the kernel has them: they may have been set before we
/// looked.
void read_options(Stream& s, int fd) noexcept;
/// The program's next call has to fail under RSOCK_STRICT. Returns 0 or ECONNABORTED.
int strict_error(Stream& s) noexcept;

/// Adds to a counter of a direction that is managed: only the holder of its lock writes it then,
/// and a read-modify-write would cost more than the rest of a small message.
inline void count_managed(std::atomic<uint64_t>& counter, uint64_t n) noexcept {
  counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
}

/// What SO_SNDBUF and the path leave of the ring.
inline size_t tx_bound_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  const size_t ring = s.channel->capacity();
  const size_t bound =
      std::min(s.send_bound.load(std::memory_order_relaxed), s.channel->tx_window());
  return bound >= ring ? ring : std::max(bound, s.channel->tx_least_bound());
}

/// Channel::tx_room() within it.
inline size_t tx_room_locked(Stream& s, size_t want) noexcept RSOCK_REQUIRES(s.tx.mutex) {
  const size_t closed = s.channel->capacity() - tx_bound_locked(s);
  const size_t room = s.channel->tx_room(want + closed);
  return room > closed ? room - closed : 0;
}

/// The program allows this call to wait.
inline bool may_wait(const Stream& s, int flags) noexcept {
  return (flags & MSG_DONTWAIT) == 0 && !s.nonblocking.load(std::memory_order_relaxed);
}

/// An error that is owed to the program, handed out once. 0: none.
inline int take_error(Stream& s) noexcept {
  if (__builtin_expect(s.error.load(std::memory_order_relaxed) == 0, 1)) return 0;
  s.error_told.store(true, std::memory_order_release);  // pairs with end_that_was_none()
  return s.error.exchange(0, std::memory_order_acq_rel);
}
/// The kernel's answer to the program: of a connection that failed it is told once, by whichever of
/// us finds it.
inline void note_told(Stream& s, long result) noexcept {
  if (__builtin_expect(result == -ECONNRESET || result == -ETIMEDOUT, 0)) {
    s.error_told.store(true, std::memory_order_release);  // as above
  }
}

// --- lane_watch.cc ---
/// The channel has passed a piece of a file, which it keeps for a replay; or it is full with less
/// than a ring.
void watch_lane(Stream& s) noexcept;

// --- stream_down.cc, stream_fail.cc ---
/// The peer froze our direction at channel offset x, or is gone: [x, tail) must go to TCP first.
void begin_replay_locked(Stream& s, uint64_t x) noexcept RSOCK_REQUIRES(s.tx.mutex);
/// Moves replay bytes into TCP without blocking. True: the direction is the kernel's again.
bool flush_replay_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex);
/// Bytes that replays of this process have put into TCP so far: progress, for who waits for it.
uint64_t replayed_bytes() noexcept;
/// Looks at the turn of our sending direction and obeys it. True: state may have changed.
bool obey_tx_turn_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex);
void finish_tx_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex);
void finish_rx_locked(Stream& s) noexcept RSOCK_REQUIRES(s.rx.mutex);
/// Receiver: the direction is over in the ring because of `turn` (or because the peer is gone); the
/// kernel goes on.
void leave_ring_locked(Stream& s, TurnKind turn) noexcept RSOCK_REQUIRES(s.rx.mutex);
/// Moves both directions towards TCP: recalls ours, freezes the peer's. Never blocks; what is owed
/// afterwards (a replay either way, bytes to drain) goes on by itself. To wait for it: hand_over.h.
void set_down(Stream& s, Reason reason) noexcept;
/// Takes the channel from the stream and hangs up for the peer; the caller lets it die, or wakes
/// its sleepers first.
std::shared_ptr<Channel> take_channel_locked(Stream& s) noexcept
    RSOCK_REQUIRES(s.tx.mutex, s.rx.mutex);
/// Lets go of the channel once neither direction needs it.
void maybe_detach(Stream& s) noexcept;
/// What the keeper does after a kick, a hang-up or a TCP event: obeys every word it finds.
void attend(Stream& s) noexcept;
/// The peer died, or let go of the channel. With bytes of ours unread its kernel would have sent
/// RST (tcp_close()), but the bytes were in the ring, so it sent FIN: says what TCP would have
/// said.
void judge_unread(Stream& s) noexcept;
/// Receiver, after the peer has gone: nothing of what it published in the channel is missing.
bool all_received_locked(Stream& s) noexcept RSOCK_REQUIRES(s.rx.mutex);
/// Receiver: TCP's end can be judged. Over a line FIN may overtake the word about it, and what has
/// arrived over the path until then need not be all that was published.
bool end_known_locked(Stream& s) noexcept RSOCK_REQUIRES(s.rx.mutex);
/// Why a stream whose channel failed has to be reset.
Reason failure_of(Stream& s) noexcept;
/// The peer broke the protocol, or went with bytes of ours that nobody counted: both directions
/// fail with ECONNRESET, and the kernel's stream is reset. Nothing happens if that was done before,
/// or the stream is closed.
void fail_stream(Stream& s, Reason reason, int error = ECONNRESET) noexcept;
/// Bytes came that the program has not read, and the kernel does not know of them.
bool unread_in_channel_locked(Stream& s) noexcept RSOCK_REQUIRES(s.rx.mutex);
/// close() with unread bytes, or SO_LINGER 0, resets the connection: RFC 1122 4.2.2.13,
/// tcp_close().
void make_close_reset(int fd) noexcept;
/// RST to the peer, and nothing to read or send any more.
void abort_connection(int fd) noexcept;

/// Why a stream that a new program has stays on TCP.
inline constexpr Reason kSpawned = "a child process was spawned";

/// Reasons that hold for this program only; the next one may lift it.
inline constexpr Reason kExec = "exec";
inline constexpr Reason kAtStdio = "at a number that stdio uses";
/// One that came to this program there: it is lifted once it has other numbers only.
inline bool is_at_stdio(const Stream& s) noexcept {
  return FdTable::stream(0) == &s || FdTable::stream(1) == &s || FdTable::stream(2) == &s;
}

/// TCP for good. Where nobody attaches a channel meanwhile: under both locks, or in a fork.
inline void pin_locked(Stream& s, Reason reason) noexcept {
  if (reason != kExec && reason != kAtStdio) s.strange.store(true, std::memory_order_relaxed);
  s.pinned.store(true, std::memory_order_release);
  s.not_lifted.store(reason, std::memory_order_relaxed);
}

// --- stream_options.cc ---
/// From now on s stays on TCP. Under both locks, as attach() looks at it: what this finds is final.
/// True: there is a channel, to be set down.
bool pin(Stream& s, Reason reason) noexcept;
/// Reads what SO_SNDBUF, SO_RCVLOWAT and TCP_USER_TIMEOUT have been set to. Any lock may be held.
void read_limits(Stream& s, int fd) noexcept;

// --- user_timeout.cc ---
/// A sender has to wait: room is news, and TCP_USER_TIMEOUT begins.
void note_full_locked(Stream& s) noexcept RSOCK_REQUIRES(s.tx.mutex);

// --- stream_counts.cc ---
/// What the peer's kernel takes beside what waits in ours: tcp_rmem[1] of most machines. A ring is
/// both buffers in one; of what lies in it, so much has arrived.
inline constexpr size_t kPeerHolds = 128 * 1024;
/// SIOCINQ.
long bytes_to_read(Stream& s, int fd) noexcept;
/// SIOCOUTQ, beyond what the kernel has.
long bytes_unsent(Stream& s) noexcept;
/// TCP_INFO that the kernel has filled in, `len` bytes of it: the counts of the program's bytes
/// move on, whatever carries them.
void correct_tcp_info(Stream& s, int fd, void* info, size_t len) noexcept;

// --- recv_steps.cc ---
/// One attempt to receive on a managed direction: bytes > 0, 0 at the end of the stream, -EAGAIN,
/// -errno, kRetryInKernel when the direction went back to the kernel, or kPeerDied: its process
/// ended without a word in the channel, and what it left unread decides what that means.
inline constexpr long kRetryInKernel = -100'000;
inline constexpr long kPeerDied = kRetryInKernel + 2;
long rx_try_locked(Stream& s, int fd, const iovec* iov, size_t n, size_t skip, size_t limit,
                   int flags) noexcept RSOCK_REQUIRES(s.rx.mutex);

/// Bytes that the program got out of the ring.
inline void count_taken_locked(Stream& s, size_t got) noexcept RSOCK_REQUIRES(s.rx.mutex) {
  count_managed(s.rx.offset, got);
  s.rx.off_tcp += got;
  count_managed(s.received[static_cast<int>(s.channel->kind())], got);
}

// --- stream_poll.cc ---
/// Events of <poll.h> among POLLIN, POLLOUT, POLLRDHUP, POLLPRI, POLLERR, POLLHUP (and the
/// RDNORM/WRNORM twins) that hold now for a stream with a channel. Takes the locks.
short ready_events(Stream& s, int fd, short interest) noexcept;
/// The part of `interest` that the kernel's socket answers for, because it carries that direction.
short kernel_part(Stream& s, short interest) noexcept;
/// The channel, kept alive for the caller; null if there is none.
std::shared_ptr<Channel> channel_of(Stream& s) noexcept;
/// Announces a sleeper on the channel's doorbell for the given interest; look again with
/// ready_events() before sleeping.
void arm_for_poll(Channel& channel, short interest) noexcept;

}  // namespace rsock::stream
