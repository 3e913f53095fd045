// A ring of bytes in memory that two ends share: one writes, the other reads.
//
// Purpose: RingWriter and RingReader are each end's view of one ring. They copy and publish; who
// sleeps and who is woken is the channel's affair. Pure: no system call.
// Ownership: borrows the bytes and the two words, which must outlive the view.
// Thread safety: each view belongs to one thread at a time (the stream's tx or rx lock).
// Trust: the other end's word may hold anything at any moment. It is loaded once into a local and
// believed only if it continues what was believed before.
//
// Invariants.
//  1. Words count bytes since the ring began and never wrap (2^62 bytes is decades).
//  2. seen_head_ <= tail_ <= seen_head_ + capacity_; head_ <= seen_tail_ <= head_ + capacity_.
//  3. A word of the other end that would break 2, or that moves backwards, sets failed() for good.
//     From then on there is no room and nothing to read.
//  4. No copy leaves base_[0, capacity_), whatever the words say.
//  5. The two top bits of the head word are seals, set once and by one atomic operation each:
//     kSealEnded by the writer: the reader may still release, up to the tail of that moment.
//     kSealFrozen by either end: the count beside it is final. A release is a compare-exchange of
//     the whole word, so it comes before the seal, or fails and its bytes do not count. That is how
//     the writer learns, without asking, exactly which bytes the reader delivered. The writer ends
//     with a fetch_or, so both seals together mean that the freeze came first.
//
// Memory order. Publishing a word has two duties.
//  - Release: bytes are copied in before the tail that covers them, and out before the head that
//    frees them. Pairs with the load in the other view's refresh().
//  - Dekker: right after publishing, an end loads the other one's sleep word, and right after
//    setting its sleep word the other one loads ours. Each must do "store, then load" in that
//    order, or both could miss each other: data in the ring and everybody asleep. A release store
//    alone lets the load pass it (x86 does, through the store buffer; the contract tests show it).
//    The tail is followed by a seq_cst fence; the head and the sleep words change by seq_cst
//    read-modify-write, and the loads are seq_cst: then one of the two ends sees the other.
//    Why a fence behind the tail and not an exchange: the lines of the bytes and of the tail are
//    both in the reader's cache, and two stores fetch them back at once. An exchange first waits
//    for the one, then for the other, which made a 64-byte round trip half as long again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/base/fence.h"
#include "core/base/try_copy.h"
#include "core/ring/iov_cursor.h"

namespace rsock::ring {

inline constexpr uint64_t kSealEnded = uint64_t{1} << 62;
inline constexpr uint64_t kSealFrozen = uint64_t{1} << 63;
inline constexpr uint64_t kCountMask = kSealEnded - 1;

/// Large transfers are published in pieces of this size, so that the reader copies out while the
/// writer still copies in ...
inline constexpr size_t kPublishPiece = 32 * 1024;
/// ... and released in larger ones: the writer seldom waits for room, and each release costs it a
/// look. Less in a small ring.
constexpr size_t release_piece(size_t capacity) {
  return std::min<size_t>(128 * 1024, capacity / 4);
}

/// Stores a word that the other end waits for; loads that follow are not done before.
inline void publish(std::atomic<uint64_t>& word, uint64_t value) noexcept {
#if defined(__SANITIZE_THREAD__)
  // ThreadSanitizer does not know fences.
  word.exchange(value, std::memory_order_seq_cst);
#else
  word.store(value, std::memory_order_release);
  full_fence();
#endif
}

/// A stream of writes up to kSmall asks for the line kAhead bytes on: that one was last in the
/// reader's cache, and the fence of publish() would wait for it, message by message. More than
/// halves the cost of a 64-byte message between cores that are far apart.
inline constexpr size_t kSmall = 64;
inline constexpr size_t kAhead = 256;
inline void prefetch_for_write(const std::byte* at) noexcept {
#if defined(__x86_64__)
  // The builtin becomes a prefetch for reading unless built for newer processors; those that lack
  // this instruction take it for a nop.
  asm volatile("prefetchw %0" : : "m"(*at));
#else
  __builtin_prefetch(at, 1);
#endif
}

class RingWriter {
 public:
  /// `capacity` is a power of two; base[0, capacity) is the ring, empty, both words zero.
  RingWriter(std::byte* base, size_t capacity, std::atomic<uint64_t>& tail,
             std::atomic<uint64_t>& head) noexcept
      : base_(base), capacity_(capacity), tail_word_(tail), head_word_(head) {}

  /// Bytes that fit now. Looks at the reader's word if fewer than `want` are known to fit.
  size_t room(size_t want = SIZE_MAX) noexcept {
    if (known_room() < want) refresh();
    return known_room();
  }

  /// Copies up to `limit` bytes in and publishes them at once. Looks at the reader's word only when
  /// the room it knows of is less than `limit`. 0 when full, sealed by us, failed, or when `from`
  /// has ended or lies at a bad address (then none of the bytes is published). After a freeze by
  /// the reader bytes are still taken: they are part of what is replayed.
  ///
  /// `From` is an IovCursor, or whatever else puts bytes where it is told: size_t gather(std::byte*
  /// to, size_t limit), which gives less only when it has no more now, and bool faulted().
  template <typename From>
  size_t write(From& from, size_t limit) noexcept {
    if (known_room() < limit) refresh();
    const size_t n = copy_in(from, std::min(limit, known_room()));
    if (n == 0) return 0;
    tail_ += n;
    // Pairs with RingReader::refresh(), and with the reader's sleep word: see "Memory order".
    publish(tail_word_, tail_);
    if (n <= kSmall && known_room() > kAhead) prefetch_for_write(place(tail_ + kAhead));
    return n;
  }

  /// write() for one short piece: all of it or nothing (0). Nothing too when it would cross the
  /// edge, or lies at a bad address.
  size_t put(const void* from, size_t n) noexcept {
    if (known_room() < n) refresh();
    const size_t at = tail_ & (capacity_ - 1);
    if (known_room() < n || capacity_ - at < n) return 0;
    if (!try_copy(base_ + at, from, n)) return 0;
    tail_ += n;
    publish(tail_word_, tail_);  // as in write()
    if (n <= kSmall && known_room() > kAhead) prefetch_for_write(place(tail_ + kAhead));
    return n;
  }

  /// Publishes n bytes that lie elsewhere, or were put to their places already. n <= room().
  void advance(size_t n) noexcept {
    tail_ += n;
    publish(tail_word_, tail_);  // as in write()
  }

  /// Bytes published and, as far as the reader told, not consumed. Looks at the reader's word.
  uint64_t unread() noexcept {
    refresh();
    return tail_ - seen_head_;
  }

  /// Where [from, from + n) lies in the ring, in one span or two. The range must lie in the last
  /// `capacity` bytes published: otherwise none, 0 is returned (`from` may have come from the
  /// peer). Returns the spans used.
  size_t unread_spans(uint64_t from, size_t n, iovec spans[2]) const noexcept;

  /// Sets kSealEnded or kSealFrozen. Returns the head word as it was before. We write no more.
  uint64_t seal(uint64_t bit) noexcept {
    closed_ = true;
    // Release: who sees the seal sees our last tail. Acquire: we see what the reader did before the
    // count that comes back. Pairs with RingReader::release() and RingReader::freeze().
    return head_word_.fetch_or(bit, std::memory_order_seq_cst);
  }

  /// We write no more; the head word stays as it is.
  void close() noexcept { closed_ = true; }

  uint64_t tail() const noexcept { return tail_; }
  bool failed() const noexcept { return failed_; }
  /// The last look at the reader's word found a seal on it.
  bool seal_seen() const noexcept { return seal_seen_; }
  size_t capacity() const noexcept { return capacity_; }

 private:
  size_t known_room() const noexcept {
    return failed_ || closed_ ? 0 : capacity_ - (tail_ - seen_head_);
  }
  std::byte* place(uint64_t at) const noexcept { return base_ + (at & (capacity_ - 1)); }
  template <typename From>
  size_t copy_in(From& from, size_t limit) noexcept {
    const size_t at = tail_ & (capacity_ - 1);
    const size_t first = std::min(limit, capacity_ - at);
    const size_t n = from.gather(base_ + at, first);
    if (n < first || n == limit) return n;
    const size_t rest = from.gather(base_, limit - n);
    return from.faulted() ? 0 : n + rest;
  }
  void refresh() noexcept;

  std::byte* const base_;
  const size_t capacity_;
  std::atomic<uint64_t>& tail_word_;
  std::atomic<uint64_t>& head_word_;
  uint64_t tail_ = 0;
  uint64_t seen_head_ = 0;
  bool failed_ = false;
  bool closed_ = false;
  bool seal_seen_ = false;
};

class RingReader {
 public:
  /// As RingWriter.
  RingReader(const std::byte* base, size_t capacity, const std::atomic<uint64_t>& tail,
             std::atomic<uint64_t>& head) noexcept
      : base_(base), capacity_(capacity), tail_word_(tail), head_word_(head) {}

  /// Bytes that can be read now. Looks at both words.
  size_t available() noexcept {
    // Relaxed: a freeze that we do not see yet will make the release fail.
    if ((head_word_.load(std::memory_order_relaxed) & kSealFrozen) != 0) return 0;
    refresh();
    return known_bytes();
  }

  /// Looks at the writer's word. What the *_known() calls go by changes here and in those without.
  void look() noexcept { refresh(); }

  /// Copies up to `limit` bytes out and releases them at once. Looks at the writer's word only when
  /// the bytes it knows of are fewer than `limit`. 0 when empty, frozen, failed, or when `to` has
  /// ended or lies at a bad address (then none is released). Memory of `to` may have been written
  /// although 0 is returned.
  size_t read(IovCursor& to, size_t limit) noexcept {
    if (known_bytes() < limit) refresh();
    return read_known(to, limit);
  }
  size_t read_known(IovCursor& to, size_t limit) noexcept {
    const size_t n = copy_out(to, std::min(limit, known_bytes()));
    return n != 0 && release(n) ? n : 0;
  }

  /// read() into one short piece. Nothing (0) when it would cross the edge: half of what is there
  /// looks to the program as if that were all. Nothing too at a bad address.
  size_t take(void* to, size_t limit) noexcept {
    if (known_bytes() < limit) refresh();
    return take_known(to, limit);
  }
  size_t take_known(void* to, size_t limit) noexcept {
    const size_t at = head_ & (capacity_ - 1);
    const size_t n = std::min(limit, known_bytes());
    if (n == 0 || n > capacity_ - at) return 0;
    if (!try_copy(to, base_ + at, n)) return 0;
    return release(n) ? n : 0;
  }

  /// As read(), but releases nothing.
  size_t peek(IovCursor& to, size_t limit) noexcept {
    if (known_bytes() < limit) refresh();
    return peek_known(to, limit);
  }
  size_t peek_known(IovCursor& to, size_t limit) noexcept {
    return copy_out(to, std::min(limit, known_bytes()));
  }

  /// Releases up to `limit` bytes unread.
  size_t discard(size_t limit) noexcept {
    if (known_bytes() < limit) refresh();
    return discard_known(limit);
  }
  size_t discard_known(size_t limit) noexcept {
    const size_t n = std::min(limit, known_bytes());
    return n != 0 && release(n) ? n : 0;
  }

  /// The writer broke a rule that only the caller knows of.
  void fail() noexcept { failed_ = true; }

  /// Seals the head with kSealFrozen unless it is sealed already. Returns the head word in force.
  uint64_t freeze() noexcept;

  uint64_t head() const noexcept { return head_; }
  /// Bytes that can be read without another look at the writer's word.
  size_t known() const noexcept { return known_bytes(); }
  bool failed() const noexcept { return failed_; }
  size_t capacity() const noexcept { return capacity_; }

 private:
  size_t known_bytes() const noexcept { return failed_ || frozen_ ? 0 : seen_tail_ - head_; }
  size_t copy_out(IovCursor& to, size_t limit) const noexcept;
  void refresh() noexcept;

  bool release(size_t n) noexcept { return move_head(head_ + n, 0); }
  /// Our word from head_ to `to`, plus `seal`. False: the other end froze it first, or wrote
  /// nonsense.
  bool move_head(uint64_t to, uint64_t seal) noexcept {
    uint64_t word = head_ | seals_;
    // Pairs with RingWriter::refresh() and seal(), and with the writer's sleep word: see "Memory
    // order". A failure needs no less, it carries the writer's seal.
    if (!head_word_.compare_exchange_strong(word, to | seals_ | seal, std::memory_order_seq_cst,
                                            std::memory_order_seq_cst)) {
      return move_head_slow(word, to, seal);
    }
    head_ = to;
    return true;
  }
  bool move_head_slow(uint64_t found, uint64_t to, uint64_t seal) noexcept;

  const std::byte* const base_;
  const size_t capacity_;
  const std::atomic<uint64_t>& tail_word_;
  std::atomic<uint64_t>& head_word_;
  uint64_t head_ = 0;
  uint64_t seals_ = 0;  // kSealEnded once we know of it
  uint64_t seen_tail_ = 0;
  bool failed_ = false;
  bool frozen_ = false;
};

}  // namespace rsock::ring
