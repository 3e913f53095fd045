// The control page: the words by which the two ends of a shared-memory channel agree.
//
// Purpose: first page of the memfd that both ends map; PROTOCOL.md explains every word and who may
// write it. Two DirectionWords, one per direction of the stream; [0] carries what the *caller*
// sends, [1] what the *callee* sends (roles of the rendezvous, not of connect/accept). Trust:
// everything here can be written by the peer at any moment. Each word is loaded once per decision
// into a local and bounds-checked; nothing here is ever asserted.
// Layout: fixed by the static_asserts below, compared with PROTOCOL.md by a test.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace rsock::wire {

inline constexpr uint32_t kControlMagic = 0x4b435352;  // "RSCK", little-endian
inline constexpr size_t kControlPageSize = 4096;

/// How a direction leaves the channel. Decided once, in the head word itself, so that the
/// receiver's last release, its freeze, the sender's end and the sender's recall are ordered by one
/// atomic location:
///  - freeze (receiver) and recall (sender) set kHeadSealed with fetch_or. The count beside it is
///  exact:
///    the receiver releases with compare-exchange, so a release that meets the seal fails and its
///    bytes do not count as delivered (PROTOCOL.md, "Moving a direction").
///  - end (sender) sets kHeadEnded with fetch_or, after its last publish: the tail is final.
/// Whoever's fetch_or found neither bit has won. A receiver that finds kHeadEnded when it wanted to
/// freeze sets no seal and drains; a sender that finds kHeadSealed when it wanted to end
/// replays.
inline constexpr uint64_t kHeadSealed = uint64_t{1} << 63;
inline constexpr uint64_t kHeadEnded = uint64_t{1} << 62;
inline constexpr uint64_t kHeadCount = kHeadEnded - 1;

enum class TurnKind : uint8_t { kOpen = 0, kEnded = 1, kFrozen = 2 };

struct Turn {
  TurnKind kind = TurnKind::kOpen;
  uint64_t at = 0;  // kFrozen: first byte to replay; kEnded: the tail
};

/// What a head word says of its direction, whose tail is `tail`. Both bits: the seal came first.
inline Turn turn_of(uint64_t head, uint64_t tail) noexcept {
  if ((head & kHeadSealed) != 0) return Turn{TurnKind::kFrozen, head & kHeadCount};
  if ((head & kHeadEnded) != 0) return Turn{TurnKind::kEnded, tail};
  return Turn{};
}

/// Bits of rx_sleep and tx_sleep: how the sleeper wants to be woken.
inline constexpr uint32_t kSleepFutex = 1;     // FUTEX_WAKE the bell beside it
inline constexpr uint32_t kSleepDoorbell = 2;  // one byte into the doorbell socket
/// rx_sleep only: no sleeper. The receiver has sealed the head; look there. A hint that saves a
/// busy sender the look at the head, whose line the receiver writes with every release.
inline constexpr uint32_t kSleepFrozen = 4;

struct DirectionWords {
  // Written by the sender, on every publish.
  alignas(64) std::atomic<uint64_t> tail;  // bytes published
  std::atomic<uint64_t> spans;             // page spans published, in all: see PageSpan
  // Written by the receiver, on every release (compare-exchange); the two top bits by either, once.
  alignas(64) std::atomic<uint64_t> head;  // bytes consumed, kHeadSealed, kHeadEnded
  // Written a few times in a stream's life.
  alignas(
      64) std::atomic<uint64_t> start;  // sender: stream offset N of byte 0, plus 1; 0 = not yet
  std::atomic<uint32_t> ready;          // receiver: no reader of mine can miss the switch
  std::atomic<uint32_t> replayed;       // sender: what was sealed off is in the TCP stream
  std::atomic<uint32_t> lane;           // receiver: I have connected the page lane
  std::atomic<uint32_t> window;         // sender: most bytes it leaves unread; 0: the ring
  // Sleepers. rx_*: the receiver sleeps for bytes; tx_*: the sender sleeps for room.
  alignas(64) std::atomic<uint32_t> rx_sleep;
  std::atomic<uint32_t> rx_bell;
  alignas(64) std::atomic<uint32_t> tx_sleep;
  std::atomic<uint32_t> tx_bell;
};

/// Bytes [begin, end) of a direction that own their place in the ring and lie in its page lane, a
/// socket. In order, none twice; the sender counts up `spans` behind writing one and before the tail
/// that covers it. Number k lies in slot k % kPageSpans, which is free again once the head is at its
/// end.
struct PageSpan {
  std::atomic<uint64_t> begin;
  std::atomic<uint64_t> end;
};
inline constexpr size_t kPageSpans = 16;

struct ControlPage {
  uint32_t magic;
  uint32_t version;
  uint32_t ring_size;  // bytes of each ring; a power of two
  uint32_t reserved;
  alignas(64) DirectionWords direction[2];
  PageSpan span[2][kPageSpans];  // by direction
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
static_assert(offsetof(DirectionWords, tail) == 0);
static_assert(offsetof(DirectionWords, spans) == 8);
static_assert(offsetof(DirectionWords, head) == 64);
static_assert(offsetof(DirectionWords, start) == 128);
static_assert(offsetof(DirectionWords, ready) == 136);
static_assert(offsetof(DirectionWords, replayed) == 140);
static_assert(offsetof(DirectionWords, lane) == 144);
static_assert(offsetof(DirectionWords, window) == 148);
static_assert(offsetof(DirectionWords, rx_sleep) == 192);
static_assert(offsetof(DirectionWords, rx_bell) == 196);
static_assert(offsetof(DirectionWords, tx_sleep) == 256);
static_assert(offsetof(DirectionWords, tx_bell) == 260);
static_assert(sizeof(DirectionWords) == 320);
static_assert(offsetof(ControlPage, direction) == 64);
static_assert(offsetof(PageSpan, end) == 8 && sizeof(PageSpan) == 16);
static_assert(offsetof(ControlPage, span) == 704);
static_assert(sizeof(ControlPage) == 1216 && sizeof(ControlPage) <= kControlPageSize);

}  // namespace rsock::wire
