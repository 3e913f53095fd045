// The path interface: what a stream needs from a device, be it shared memory, a queue pair or a
// fake.
//
// Purpose. A Channel is one overlay path of one stream, both directions, between two ends that have
// agreed on it. It is an RC-QP-like pipe: a receive ring that the peer writes, credits (the
// consumed offset), an arm-and-wait primitive, and a few control words. The stream decides *when*
// bytes move to or from a channel; the channel only moves them. "tx" is what this end sends, "rx"
// what it receives.
//
// Ownership. A Channel belongs to one Stream (unique_ptr); it is destroyed with both of the
// stream's direction locks held. It may outlive the peer.
//
// Thread safety. tx_* calls are made under the stream's tx lock, rx_* calls under its rx lock;
// members marked "any thread" need no lock. Nothing here blocks except rx_sleep() and tx_sleep(),
// which are called WITHOUT locks by a caller that keeps the channel alive with a Pin.
//
// Offsets are bytes of this channel and direction; byte 0 is the first byte after the switch.
//
// Invariants.
//  1. head <= tail <= head + capacity, as each end sees its own word and the peer's last valid one.
//  A peer
//     word that breaks it fails the channel (rx_failed/tx_failed), it is never followed.
//  2. turn leaves kOpen once, by one atomic operation on the head word. Whoever loses obeys the
//  winner.
//  3. Once frozen at X the receiver delivers nothing beyond X from the channel (a release that
//  meets the
//     seal fails and its bytes do not count); the sender still holds [X, tail): tx_unread_spans().
//  4. A byte is visible to the receiver only when its tail covers it: trust the tail, never the
//  bytes.
//  5. Wake-ups are not lost: if arm is followed by a check that finds nothing, then whatever is
//  published
//     after that check rings. Spurious wake-ups are allowed everywhere.
//
// Back-pressure is a value: tx_write() returns 0 when the ring is full, rx_read() returns 0 when
// empty.
#pragma once

#include <sys/uio.h>
#include <time.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/base/result.h"
#include "core/wire/control_page.h"
#include "core/wire/rendezvous.h"

namespace rsock::transport {

using wire::Turn;
using wire::TurnKind;

enum class PathKind : uint8_t { kTcp = 0, kShm = 1, kRdma = 2, kFake = 3 };

/// How a waiter sleeps: on the channel's futex (blocking calls; restart rule of recv(2)), or on
/// wait_fd() inside poll, select or epoll.
enum class Sleep : uint32_t { kFutex = wire::kSleepFutex, kDoorbell = wire::kSleepDoorbell };

/// Bytes that are not in the program's memory: a file's.
class ByteSource {
 public:
  /// Puts its next bytes to `to`, `limit` at most. Less (or 0) when it has no more now, and done()
  /// from then on. Must not wait: it is asked under the stream's tx lock.
  virtual size_t gather(std::byte* to, size_t limit) noexcept = 0;
  virtual bool done() const noexcept = 0;
  /// Where its next byte lies, for who can fetch it himself and says so by skip(). -1: nowhere.
  virtual int file() const noexcept { return -1; }
  virtual off_t offset() const noexcept { return 0; }
  virtual void skip(size_t n) noexcept { (void)n; }
  /// As done(), asked before somebody waits for room: nobody waits to send nothing.
  virtual bool at_end() noexcept { return done(); }
  static constexpr bool faulted() noexcept { return false; }

 protected:
  ByteSource() = default;
  ~ByteSource() = default;
};

class Channel {
 public:
  /// Most bytes of tx_put() and rx_take(): what is published, and released, in one go.
  static constexpr size_t kShort = 16 * 1024;
  /// In place of a count: nothing was moved, because the first piece that would have been lies at a
  /// bad address (EFAULT).
  static constexpr size_t kFault = SIZE_MAX;

  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  virtual PathKind kind() const noexcept = 0;
  /// Bytes that a direction can hold; a power of two.
  virtual size_t capacity() const noexcept = 0;

  // --- sending
  // ------------------------------------------------------------------------------------
  /// Bytes that tx_write() would take now, 0..capacity. Goes to look at the peer's word only if it
  /// knows of fewer than `want`: the line is the peer's, and a look costs a cache miss.
  virtual size_t tx_room(size_t want = SIZE_MAX) noexcept = 0;
  /// A sender that lets fewer bytes than this be unread may wait for ever: the receiver does not
  /// tell of every byte that it has consumed.
  virtual size_t tx_least_bound() const noexcept { return 1; }
  /// Gathers up to `limit` bytes from iov[0..n), beginning `skip` bytes into it, publishes them and
  /// wakes a sleeping receiver. Returns the bytes taken; 0 when full; kFault.
  virtual size_t tx_write(const iovec* iov, size_t n, size_t skip, size_t limit) noexcept = 0;
  /// tx_write() of up to `limit` bytes that `from` puts into the ring itself. Returns the bytes
  /// taken; 0 when full or when there are none now. Every byte that was gathered is published.
  virtual size_t tx_fill(ByteSource& from, size_t limit) noexcept = 0;
  /// tx_fill() without a copy, where the path can: passes bytes of a file by reference. 0: it does
  /// not now, or not so few. What is passed is the file's, as with sendfile(2) on TCP: later changes
  /// may show, and a replay fails if the file has been cut meanwhile (tx_unread_spans() gives none).
  virtual size_t tx_pass(int file, off_t offset, size_t limit) noexcept {
    (void)file, (void)offset, (void)limit;
    return 0;
  }
  /// Before tx_pass() can do anything: waits under `name` for the peer's rx_join_lane(). False: no
  /// such thing here. May be called again, for a peer that has not heard of it.
  virtual bool tx_offer_lane(const wire::SocketName& name) noexcept {
    (void)name;
    return false;
  }
  /// Lets go of files whose passed bytes the peer has consumed. True: it holds some still.
  virtual bool tx_let_go_of_files() noexcept { return false; }
  /// Which of the path's two directions this end sends: 0 or 1.
  virtual int tx_direction() const noexcept { return 0; }
  /// Most bytes that may lie unread, as the path wants it; capacity() where it does not care.
  virtual size_t tx_window() const noexcept { return capacity(); }
  /// From here on it does not care: the peer reads too seldom for it.
  virtual void tx_widen() noexcept {}
  /// tx_write() of one piece of up to kShort bytes: all of it, or 0 and tx_write() knows more.
  virtual size_t tx_put(const void* from, size_t n) noexcept = 0;
  /// Published bytes that the receiver has not consumed, as far as it told.
  virtual uint64_t tx_unread() noexcept = 0;
  /// Bytes published since the channel began.
  virtual uint64_t tx_tail() noexcept = 0;
  /// Where bytes [from, from + n) lie in the sender's own ring, for a replay: one span, or two
  /// where the ring ends. They stay valid until the next tx_write(); the peer can write there, so
  /// they are for the kernel to copy, never to be believed. `from + n <= tail` and `tail - from <=
  /// capacity` are checked: otherwise 0. Returns the spans used.
  virtual size_t tx_unread_spans(uint64_t from, size_t n, iovec spans[2]) noexcept = 0;
  /// A word of the peer was impossible; the direction is unusable.
  virtual bool tx_failed() const noexcept = 0;

  // --- receiving
  // ----------------------------------------------------------------------------------
  /// Bytes that rx_read() would give now.
  virtual size_t rx_available() noexcept = 0;
  /// Scatters up to `limit` bytes into iov[0..n), beginning `skip` bytes into it. With peek nothing
  /// is consumed. Otherwise releases the bytes and wakes a sender when a third of the ring is free
  /// again (sk_stream_write_space() in net/core/stream.c wakes at the same share). Returns the
  /// bytes, or kFault.
  virtual size_t rx_read(const iovec* iov, size_t n, size_t skip, size_t limit,
                         bool peek) noexcept = 0;
  /// rx_read() into one piece of up to kShort bytes. All of it that is there, or 0 and rx_read()
  /// knows more.
  virtual size_t rx_take(void* to, size_t n) noexcept = 0;
  /// The peer has called tx_offer_lane().
  virtual void rx_join_lane(const wire::SocketName& name) noexcept { (void)name; }
  /// Consumes up to n bytes without copying (MSG_TRUNC on TCP). Returns the bytes.
  virtual size_t rx_discard(size_t n) noexcept = 0;
  /// Bytes consumed since the channel began.
  virtual uint64_t rx_head() noexcept = 0;
  /// Bytes the peer has published since the channel began, as its word says (unchecked: compare
  /// only).
  virtual uint64_t rx_published() noexcept = 0;
  virtual bool rx_failed() const noexcept = 0;

  // --- control words: PROTOCOL.md, "Moving a direction"
  // ---------------------------------------------
  virtual void tx_set_start(uint64_t stream_offset) noexcept = 0;
  virtual std::optional<uint64_t> rx_start() noexcept = 0;
  virtual void rx_set_ready() noexcept = 0;
  virtual bool tx_peer_ready() noexcept = 0;  // any thread
  virtual Turn tx_turn() noexcept = 0;        // any thread
  /// Whether a look at tx_turn() can find anything, for the path of every send: without a look at
  /// words that the receiver writes all the time. Late, never wrong: a freeze is seen after the
  /// next publish that follows it. tx lock.
  virtual bool tx_maybe_turned() noexcept = 0;
  virtual Turn rx_turn() noexcept = 0;        // any thread
  /// Ends our direction at the current tail if it is open: no byte will follow, the receiver drains
  /// what is there (shutdown, close). Returns the turn in force afterwards.
  virtual Turn tx_end() noexcept = 0;
  /// Freezes our direction at exactly what the receiver has consumed, without asking it. Returns
  /// the turn in force afterwards (kFrozen; kEnded if we ended it before).
  virtual Turn tx_recall() noexcept = 0;
  /// Freezes the peer's direction at our head if it is open. Returns the turn in force afterwards.
  virtual Turn rx_freeze() noexcept = 0;
  virtual void tx_set_replayed() noexcept = 0;
  virtual bool rx_replayed() noexcept = 0;

  // --- waiting
  // --------------------------------------------------------------------------------------
  /// Value of the bell. The order is bell, arm, check, sleep: whoever arms before reading the bell
  /// loses a ring in between (it disarms him, and he takes its bump for old). Any thread.
  virtual uint32_t rx_bell() noexcept = 0;
  virtual uint32_t tx_bell() noexcept = 0;
  /// Announces a sleeper, after reading the bell. The caller checks once more, then sleeps. Any
  /// thread.
  virtual void rx_arm(Sleep how) noexcept = 0;
  virtual void tx_arm(Sleep how) noexcept = 0;
  /// Takes Sleep::kDoorbell back, for all that sleep on it: the caller looks by itself from now on,
  /// and tells the others. False: not to be had here, the arming stays. Any thread.
  virtual bool rx_disarm() noexcept { return false; }
  /// Sleeps until the bell differs from `seen`. Errors: EINTR, ETIMEDOUT; timeout null: for ever,
  /// with recv(2)'s restart rule. No lock held.
  virtual Result<void> rx_sleep(uint32_t seen, const timespec* timeout) noexcept = 0;
  virtual Result<void> tx_sleep(uint32_t seen, const timespec* timeout) noexcept = 0;
  /// Wakes whoever sleeps on our side on that bell (another thread changed something). Any thread.
  virtual void wake_local() noexcept = 0;
  /// Wakes the peer's sleepers of both directions, unconditionally. Any thread.
  virtual void wake_peer() noexcept = 0;
  /// The doorbell: readable after a ring for a Sleep::kDoorbell; POLLRDHUP once the peer has let
  /// go of the channel. -1 never. Any thread.
  virtual int wait_fd() const noexcept = 0;
  /// Takes all rings out of wait_fd(). Any thread; a ring that comes later is kept. True: there were some. The
  /// doorbell is one for all who sleep on this end, whatever for: whoever takes rings out tells the others.
  virtual bool drain_wait_fd() noexcept = 0;
  /// Hangs up the doorbell for the peer now, although references to the channel may remain: in a
  /// thread that still sleeps, in one that left its call by siglongjmp, in a forked child. What
  /// this end consumed is final from here on; what it published stays readable. tx and rx locks
  /// held.
  virtual void let_go() noexcept = 0;

  // --- paths whose words are not in memory that both ends map
  // ---------------------------------------
  /// True: tx_end() and tx_recall() decide at once. False: they ask the peer and may return kOpen;
  /// the direction takes no bytes from then on, the answer shows in tx_turn() later, and the keeper
  /// is told. kEnded then means that the receiver has every byte in its memory: only now may FIN
  /// follow, or the channel go.
  virtual bool decides_alone() const noexcept { return true; }
  /// The peer has let go of the channel, or is gone: what it said is final. May be a system call.
  /// Any thread.
  virtual bool peer_let_go() noexcept;
  /// The sender asks for its direction back: freeze it.
  virtual bool rx_asked_back() noexcept { return false; }
  /// Why the path can carry nothing any more (a literal), or null: both directions have to go back
  /// to TCP. Any thread.
  virtual const char* path_failure() noexcept { return nullptr; }
  /// Published bytes that are not known to be in the receiver's memory: TCP would not have an
  /// acknowledgement.
  virtual uint64_t tx_undelivered() noexcept { return tx_unread(); }

 protected:
  Channel() = default;
};

}  // namespace rsock::transport
