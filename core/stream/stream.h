// A TCP connection that can be lifted onto a channel and set down again, at any byte.
//
// Purpose: the state of one connection of the program. Descriptors (dup) share one Stream. On plain
// TCP the two gates count calls into the kernel and the offsets count bytes; with a channel
// attached each direction is either still in the kernel's hands or managed under its lock.
// PROTOCOL.md is the rule book; the states here are its states.
//
// Ownership: Streams live in a slab that is never unmapped (slab.h), so a stale pointer is readable
// and its locks can be taken; `generation` tells a recycled one. A Stream is freed when its last
// descriptor is gone and nothing is owed to the peer.
//
// Thread safety: tx members under tx.mutex, rx members under rx.mutex, atomics anywhere. Lock
// order: watch_mutex, epoll instance, tx.mutex, rx.mutex. `channel` changes with both tx and rx
// held; holding one of them, or a copy of the shared_ptr taken under one, keeps it alive.
//
// Invariants:
//  1. tx.state == kKernel  <=>  tx.gate not managed, outside the lock; likewise rx. (Or tx.barred:
//  managed for good.)
//  2. tx.offset and rx.offset count the program's bytes of that direction since the connection
//  began,
//     whatever path they took.
//  3. tx.state == kRing or kReplay implies a channel; rx.state != kKernel implies a channel.
//  4. Nothing is written to the TCP stream between tx_set_start() and the turn of that direction.
#pragma once

#include <atomic>
#include <boost/intrusive/list.hpp>
#include <cstdint>
#include <memory>

#include "core/base/mutex.h"
#include "core/stream/gate.h"
#include "core/stream/watcher.h"
#include "core/stream/zero_copy.h"
#include "core/transport/transport.h"
#include "core/wire/rendezvous.h"

namespace rsock::stream {

using transport::Channel;
using transport::PathKind;
using transport::Turn;
using transport::TurnKind;

inline constexpr int kPaths = 4;

/// A receiver that waits for more than this at a time stays on TCP: a sender may stop short of a
/// full ring (tx_bound_locked(), and messages that are taken whole), and both would wait.
inline constexpr int kMostLowWater = 32 * 1024;

enum class TxState : uint8_t {
  kKernel,  // the kernel's: raw TCP
  kRing,    // managed: bytes go to the channel
  kReplay,  // managed: the peer froze us; the channel's unread bytes go to TCP first
};

enum class RxState : uint8_t {
  kKernel,  // the kernel's: raw TCP
  kTcp,     // managed: TCP up to the peer's start offset, which may not be known yet
  kRing,    // managed: the channel
};

/// What the waits of one side have taught (spin.h). Under that side's mutex.
struct SpinState {
  uint64_t limit = 0;      // ticks the next wait may spin
  uint32_t until_try = 0;  // waits until spinning is tried again, when limit is 0
  uint32_t try_gap = 16;
  bool begun = false;
};

struct TxSide {
  Gate gate;
  Mutex mutex;
  std::atomic<uint64_t> offset{0};
  TxState state = TxState::kKernel;  // written under mutex
  bool ring_done = false;            // the attached channel owes nothing more in this direction
  bool shut = false;                 // the program sent FIN (shutdown or close)
  bool lied = false;                 // the peer froze us at an impossible byte: the stream fails
  bool fin_owed = false;             // FIN waits for the end of a replay
  bool barred = false;   // forked child: the parent's replay is not out; nothing is sent
  uint64_t off_tcp = 0;  // bytes of `offset` that never were on TCP; under mutex
  bool others_moved = false;  // others have had it too since `offset` was looked at; under mutex
  size_t full_at = 0;    // a send was refused with so much room left: full until there is more
  SpinState spin;
  uint64_t replay_next = 0;  // kReplay: channel offset of the next byte to put on TCP
};

struct RxSide {
  Gate gate;
  Mutex mutex;
  std::atomic<uint64_t> offset{0};
  RxState state = RxState::kKernel;   // written under mutex
  bool ring_done = false;             // nothing more to come from the attached channel
  bool end_due = false;               // the peer let go without a word: TCP will say what that was
  bool shut = false;                  // SHUT_RD
  std::atomic<bool> fin_seen{false};  // the end was reached: recv says 0, whatever comes later
  uint64_t off_tcp = 0;               // bytes of `offset` that never were on TCP; under mutex
  bool others_moved = false;          // as in TxSide
  SpinState spin;
  std::atomic<bool> want_ready{false};    // a channel waits for the readers to be out of the kernel
  std::atomic<bool> await_replay{false};  // frozen: bytes are owed to us on TCP
  uint64_t kicked_ns = 0;                 // when the peer was last told so; under mutex
};

/// Why a stream is not lifted: literals, so that pointers can be kept and compared.
using Reason = const char*;
/// It was asked for, and its end came first.
inline constexpr Reason kOverTooSoon = "over before it was lifted";

/// Of a stream that was there at a fork, in memory that its family shares: the processes that came
/// by forks from the one that forked first.
struct Family {
  std::atomic<uint32_t> count;  // how many of them hold it
  std::atomic<uint32_t> note;   // their holder's note (notes.h); 0: none, nobody else ever had it
};

class Stream : public boost::intrusive::list_base_hook<
                   boost::intrusive::link_mode<boost::intrusive::normal_link>> {
 public:
  TxSide tx;
  RxSide rx;

  // --- identity and life ---
  std::atomic<uint32_t> generation{0};  // odd while in use
  std::atomic<int> fd{-1};  // one live number of the program (or ours, when a replay is owed)
  std::atomic<int> fd_refs{0};
  std::atomic<bool> closed{false};  // no descriptor of the program is left
  std::atomic<bool> adopted{
      false};  // closed, and the keeper finishes what is owed on a descriptor of its own
  // Calls that have slept on it and not returned, and: no number of the program is left (stay.h).
  std::atomic<int> inside{0};
  std::atomic<bool> orphaned{false};
  // Adopted, and the thread that closed it waits (SO_LINGER) and finishes it; under both locks.
  bool awaited = false;
  std::atomic<uint64_t> cookie{0};  // SO_COOKIE; 0: not asked for yet (inherit.cc)
  Family* holders = nullptr;  // null: this process is a family of one
  void* holders_block = nullptr;
  // holders.h. Under both locks. Beside the family there are, or were, others who hold it: the note
  // of this process (0: no others; with `holders` it is in there), the note of an exec that is
  // under way or has failed, and whether some hold it of whom nobody will hear.
  uint32_t note = 0;
  bool in_exec = false;
  bool given_away = false;
  // lineage.h. Under both locks (`lent` changes in a fork and in the keeper only): where this
  // process, a forked one, counts it (place + 1; 0: nowhere), and how many lineages share an epoll
  // instance that has it.
  uint32_t kin = 0;
  uint32_t lent = 0;

  // --- what the program set ---
  std::atomic<bool> nonblocking{false};
  std::atomic<int64_t> rcv_timeout_ns{0};  // 0: none
  std::atomic<uint32_t> low_water{1};      // SO_RCVLOWAT
  std::atomic<int64_t> snd_timeout_ns{0};
  std::atomic<uint32_t> user_timeout_ms{0};  // TCP_USER_TIMEOUT; 0: none
  std::atomic<size_t> send_bound{SIZE_MAX};  // SO_SNDBUF: most bytes that may lie unread

  // --- lifting ---
  std::shared_ptr<Channel> channel;          // see "Thread safety"
  std::atomic<bool> has_channel{false};      // cheap mirror for checks without a lock
  std::atomic<int> doorbell_fd{-1};          // channel's wait_fd(), while it is attached
  std::atomic<uint32_t> armed_undrained{0};  // by epoll, since the doorbell was drained
  std::atomic<bool> tx_nospace{false};  // a sender was told to wait: room is news (SOCK_NOSPACE)
  std::atomic<bool> full_watched{
      false};                  // the keeper looks whether the peer reads (user_timeout.cc)
  std::atomic<bool> lane_watched{false};  // the keeper looks at its page lane (lane_watch.cc), ...
  uint64_t lane_head = 0;                 // ... and found it full with the peer there; tx.mutex
  uint64_t full_since_ns = 0;  // the keeper found it full, with the peer at full_head
  uint64_t full_head = 0;
  std::atomic<bool> tx_wanted{false};   // the peer is ready: switch at the next chance
  std::atomic<uint32_t> calls{0};       // intercepted data calls on TCP, until it is asked for
  std::atomic<bool> lift_asked{false};
  std::atomic<bool> pinned{false};          // TCP for good
  std::atomic<bool> strange{false};         // and so it is in a program that takes it over
  std::atomic<Reason> not_lifted{nullptr};  // the last reason
  std::atomic<bool> strict_failed{false};   // RSOCK_STRICT: next call fails
  bool ever_attached = false;               // keeper only: a channel was agreed on
  uint32_t attempts = 0;                    // keeper only
  uint64_t channel_nonce = 0;               // keeper only; 0: none
  wire::SocketName peer_kick;               // where the peer's keeper listens
  uint32_t ever_lifted = 0;                 // bits of 1 << PathKind
  uint32_t set_downs = 0;
  uint64_t path_failed_ns = 0;  // when
  bool failed = false;          // reset by us: fail_stream()
  bool path_failed =
      false;  // the channel's path is of no use, and both directions were called back
  // The keeper's queue of those that asked. Not touched when the object is recycled.
  std::atomic<Stream*> next_asked{nullptr};
  std::atomic<bool> in_queue{false};  // it is in there, or about to be

  // A child of vfork asks the keeper, because the descriptors of both are its own no more.
  std::atomic<bool> detach_due{false};    // it found the channel done: not its to close
  std::atomic<bool> set_down_due{false};  // it is about to keep the stream

  // --- events ---
  std::atomic<bool> tcp_event{false};  // the kernel's stream has something to say: FIN, RST, bytes
  std::atomic<bool> peer_gone{false};  // the peer let go of the channel
  std::atomic<int> error{0};           // an error we owe the program, reported once
  std::atomic<bool> error_told{false};  // it has heard of one that ends the stream, from whomever
  Mutex watch_mutex;
  boost::intrusive::list<Watcher, boost::intrusive::constant_time_size<false>> watchers;
  std::atomic<int> watching{0};  // how many there are, for a look without the mutex
  ZeroCopies zero_copies;        // under watch_mutex

  // --- counters: bytes by PathKind, relaxed ---
  std::atomic<uint64_t> sent[kPaths] = {};
  std::atomic<uint64_t> received[kPaths] = {};
  std::atomic<uint64_t> zero_copied{0};  // of those sent: passed by reference
  uint32_t lane_calls = 0;  // sendfile calls that wanted a page lane of the channel; tx.mutex

  bool connected_here = false;  // we called connect(): tcpi_bytes_acked counts our SYN

  bool owned_by(uint32_t gen) const noexcept {
    return generation.load(std::memory_order_acquire) == gen;
  }
};

// --- slab.cc ---
/// A fresh stream for a connected TCP socket, or null (no memory: the socket stays plain TCP).
Stream* acquire_stream(int fd, bool nonblocking) noexcept;
/// Counters go to the process totals; the object may be recycled. `fd`: a number of its file that
/// is still there, for what is written on it (notes.h).
void release_stream(Stream& s, int fd) noexcept;
/// Streams that exist now.
int live_streams() noexcept;
/// Over a fork: the slab stays locked and every stream in use with it, level by level in lock
/// order; `between` takes what lies between the watch locks and the directions (the epoll
/// instances). The child re-makes them all.
void lock_all_streams(void (*between)() noexcept) noexcept;
void unlock_all_streams(void (*between)() noexcept) noexcept;
/// As for_each_stream(), between the two.
void for_each_stream_locked(void (*fn)(Stream&, void*), void* arg) noexcept;
void slab_after_fork_child() noexcept;
/// Some of the streams for which `is` holds, to work on without the slab's lock.
struct SomeStreams {
  static constexpr size_t kMost = 64;
  Stream* streams[kMost];
  size_t count = 0;
};
SomeStreams find_streams(bool (*is)(const Stream&) noexcept) noexcept;
/// Calls fn for every stream in use. The slab's lock is held: fn must not acquire or release.
void for_each_stream(void (*fn)(Stream&, void*), void* arg) noexcept;

// --- notify.cc ---
/// Wakes everybody in this process that waits on s in any way. No stream lock needed or taken.
void wake_waiters(Stream& s) noexcept;
/// Tells the watchers that the channel came or went. No tx or rx lock held.
void path_changed(Stream& s) noexcept;
/// Wakes all watchers but one: its owner took a ring out of the doorbell that they share.
void wake_watchers_except(Stream& s, const Watcher* self) noexcept;
/// In a forked child: forgets the watchers of threads that are the parent's alone.
void drop_sleepers_in_child(Stream& s) noexcept;
/// In and out of the list. seq_cst: who links itself arms the doorbell after that, and who disarms
/// it looks at the count after that (Instance::rouse_locked()).
void link_watcher_locked(Stream& s, Watcher& w) noexcept RSOCK_REQUIRES(s.watch_mutex);
void unlink_watcher_locked(Stream& s, Watcher& w) noexcept RSOCK_REQUIRES(s.watch_mutex);
/// Unlinks every watcher and tells it that the stream is closed.
void unlink_watchers(Stream& s) noexcept;
/// The same for epoll items only: who sleeps in poll goes on.
void unlink_items(Stream& s) noexcept;

}  // namespace rsock::stream
