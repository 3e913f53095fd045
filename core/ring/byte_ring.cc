#include "core/ring/byte_ring.h"

namespace rsock::ring {

void RingWriter::refresh() noexcept {
  // Pairs with RingReader::move_head(): the reader's copy out ended before we write there again.
  // seq_cst and not acquire because this may be the check that follows setting our sleep word.
  const uint64_t word = head_word_.load(std::memory_order_seq_cst);
  const uint64_t head = word & kCountMask;
  seal_seen_ = word != head;
  if (head < seen_head_ || head > tail_) {
    failed_ = true;
    return;
  }
  seen_head_ = head;
}

size_t RingWriter::unread_spans(uint64_t from, size_t n, iovec spans[2]) const noexcept {
  if (n == 0 || from > tail_ || tail_ - from > capacity_ || n > tail_ - from) return 0;
  const size_t first = std::min(n, capacity_ - (from & (capacity_ - 1)));
  spans[0] = iovec{place(from), first};
  spans[1] = iovec{base_, n - first};
  return first == n ? 1 : 2;
}

void RingReader::refresh() noexcept {
  // Pairs with RingWriter::write(): bytes before the tail that covers them. seq_cst and not acquire
  // because this may be the check that follows setting our sleep word.
  const uint64_t tail = tail_word_.load(std::memory_order_seq_cst);
  if (tail < seen_tail_ || tail - head_ > capacity_) {
    failed_ = true;
    return;
  }
  seen_tail_ = tail;
}

size_t RingReader::copy_out(IovCursor& to, size_t limit) const noexcept {
  const size_t at = head_ & (capacity_ - 1);
  const size_t first = std::min(limit, capacity_ - at);
  const size_t n = to.scatter(base_ + at, first);
  if (n < first || n == limit) return n;
  const size_t rest = to.scatter(base_, limit - n);
  return to.faulted() ? 0 : n + rest;
}

bool RingReader::move_head_slow(uint64_t found, uint64_t to, uint64_t seal) noexcept {
  // The writer may set two seals, one after the other. A word that changes more often, or whose
  // count is not ours, was written by somebody who does not follow the protocol.
  for (int i = 0; i < 3; ++i) {
    if ((found & kCountMask) != head_) break;
    if ((found & kSealFrozen) != 0) {
      frozen_ = true;
      return false;
    }
    seals_ = found & kSealEnded;
    if (seal != 0 && seals_ != 0) return false;  // ended first: there is nothing to freeze
    // As in move_head().
    if (head_word_.compare_exchange_strong(found, to | seals_ | seal, std::memory_order_seq_cst,
                                           std::memory_order_seq_cst)) {
      head_ = to;
      return true;
    }
  }
  failed_ = true;
  return false;
}

uint64_t RingReader::freeze() noexcept {
  if (frozen_) return head_ | kSealFrozen;
  if (seals_ != 0) return head_ | seals_;
  if (move_head(head_, kSealFrozen)) frozen_ = true;
  if (frozen_) return head_ | kSealFrozen;
  // Ended by the writer; or nonsense, and then frozen is the safest that can be said.
  return head_ | (seals_ != 0 ? seals_ : kSealFrozen);
}

}  // namespace rsock::ring
