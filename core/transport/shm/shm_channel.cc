#include "core/transport/shm/shm_channel.h"

#include <sys/syscall.h>

#include <climits>

#include "core/base/clock.h"
#include "core/os/os.h"
#include "core/transport/bell.h"

namespace rsock::transport {
namespace {

using std::memory_order_acquire;
using std::memory_order_release;
using std::memory_order_seq_cst;

// ring/ stands beside wire/ and does not know it.
static_assert(ring::kSealFrozen == wire::kHeadSealed && ring::kSealEnded == wire::kHeadEnded &&
              ring::kCountMask == wire::kHeadCount);

// MADV_POPULATE_WRITE, since Linux 5.14; older headers lack it.
constexpr long kMadvPopulateWrite = 23;

Turn look_at_turn(const wire::DirectionWords& words) noexcept {
  // acquire pairs with the seals' release: whoever sees an end sees the tail that it is at, and
  // whoever sees a freeze comes after the reader's last copy out.
  const uint64_t head = words.head.load(memory_order_acquire);
  // Relaxed: ordered by the load before; used only if that one says that the tail is final.
  return wire::turn_of(head, words.tail.load(std::memory_order_relaxed));
}

}  // namespace

ShmChannel::ShmChannel(ShmSegment segment, os::OwnedFd doorbell, bool caller, Reuse reuse) noexcept
    : segment_(std::move(segment)),
      doorbell_(std::move(doorbell)),
      reuse_(std::move(reuse)),
      tx_index_(caller ? 0 : 1),
      tx_(segment_.page().direction[tx_index_]),
      rx_(segment_.page().direction[1 - tx_index_]),
      writer_(segment_.ring(tx_index_), segment_.ring_size(), tx_.tail, tx_.head),
      sent_pages_(tx_, segment_.page().span[tx_index_]),
      window_(segment_.ring_size()),
      reader_(segment_.ring(1 - tx_index_), segment_.ring_size(), rx_.tail, rx_.head),
      pages_(rx_, segment_.page().span[1 - tx_index_]) {
  // All that were to come over it have come. One more could stop whoever takes it out
  // (page_lane.cc).
  (void)os::refuse_descriptors(doorbell_.get());
}

ShmChannel::~ShmChannel() {
  // A peer that broke the rules gets no second use. A forked child lets go of its parent's channel:
  // the segment is the parent's.
  if (!reuse_.memfd || writer_.failed() || reader_.failed() || os::getpid() != reuse_.maker) return;
  park_segment(std::move(segment_), std::move(reuse_), std::move(doorbell_));
}

std::unique_ptr<Channel> make_shm_channel(ShmSegment segment, os::OwnedFd doorbell, bool caller,
                                          Reuse reuse) {
  return std::make_unique<ShmChannel>(std::move(segment), std::move(doorbell), caller,
                                      std::move(reuse));
}

// --- bytes -------------------------------------------------------------------------------------

/// Gives the next part of a ring that is used for the first time its pages, many in one system
/// call: a page fault for each costs several times as much. Not all at once, because most streams
/// that are lifted never fill a ring.
void ShmChannel::populate_ahead(int index) noexcept {
  constexpr size_t kStep = 64 * 1024;
  size_t& populated = segment_.populated(index);
  const size_t n = std::min(kStep, capacity() - populated);
  // No wrapper in os.h: a hint. An older kernel (before 5.14) refuses it, and the faults come.
  (void)os::door()(SYS_madvise, reinterpret_cast<long>(segment_.ring(index) + populated),
                   static_cast<long>(n), kMadvPopulateWrite, 0, 0, 0);
  populated += n;
}

template <typename From>
size_t ShmChannel::write_from(From& from, size_t limit) noexcept {
  size_t done = 0;
  do {
    if (__builtin_expect(segment_.populated(tx_index_) < capacity(), 0) &&
        writer_.tail() + ring::kPublishPiece > segment_.populated(tx_index_)) {
      populate_ahead(tx_index_);
    }
    const size_t moved = writer_.write(from, std::min(limit - done, ring::kPublishPiece));
    if (moved == 0) break;
    done += moved;
    // After every piece, not only the last: the receiver wakes up while we copy the next.
    // seq_cst: the load half of Dekker, see byte_ring.h. Pairs with rx_arm().
    if (tx_.rx_sleep.load(memory_order_seq_cst) != 0) wake_receiver();
  } while (done < limit && !from.done());
  return done;
}

size_t ShmChannel::tx_write(const iovec* iov, size_t n, size_t skip, size_t limit) noexcept {
  ring::IovCursor from(iov, n, skip);
  const size_t done = write_from(from, limit);
  return done == 0 && from.faulted() ? kFault : done;
}

size_t ShmChannel::tx_fill(ByteSource& from, size_t limit) noexcept {
  return write_from(from, limit);
}

size_t ShmChannel::tx_pass(int file, off_t offset, size_t limit) noexcept {
  if (!sent_pages_.usable(doorbell_.get())) return 0;
  limit = std::min(limit, writer_.room(limit));
  const size_t n = sent_pages_.pass(file, offset, limit, writer_.tail(),
                                    writer_.tail() - writer_.unread());
  if (n == 0) return 0;
  if (window_ == capacity() && !wide_) {
    // What the lane does not take, and what the program sends beside the file, lies in the ring.
    // More than that would be copied where the lane has room again soon.
    set_window(std::min(capacity(), sent_pages_.capacity() + 2 * PageSender::kLeast));
  }
  writer_.advance(n);
  // seq_cst: as in tx_write().
  if (tx_.rx_sleep.load(memory_order_seq_cst) != 0) wake_receiver();
  return n;
}

void ShmChannel::set_window(size_t window) noexcept {
  window_ = window;
  // Relaxed: who wakes us too early or too late by the old one wakes us again.
  tx_.window.store(static_cast<uint32_t>(window), std::memory_order_relaxed);
}

void ShmChannel::tx_widen() noexcept {
  wide_ = true;
  set_window(capacity());
}

bool ShmChannel::tx_let_go_of_files() noexcept {
  if (sent_pages_.holds()) sent_pages_.let_go_below(writer_.tail() - writer_.unread());
  return sent_pages_.holds();
}

size_t ShmChannel::tx_unread_spans(uint64_t from, size_t n, iovec spans[2]) noexcept {
  if (sent_pages_.holds() && from <= writer_.tail() && writer_.tail() - from <= capacity() &&
      !sent_pages_.restore(from, segment_.ring(tx_index_), capacity())) {
    return 0;
  }
  return writer_.unread_spans(from, n, spans);
}

size_t ShmChannel::tx_put(const void* from, size_t n) noexcept {
  const size_t populated = segment_.populated(tx_index_);
  if (__builtin_expect(populated < capacity(), 0) && populated < writer_.tail() + n) {
    return 0;  // tx_write() sees to that
  }
  if (__builtin_expect(window_ < capacity(), 0))
    return 0;  // the stream knows how much of it is left
  const size_t done = writer_.put(from, n);
  // seq_cst: as in tx_write().
  if (done != 0 && tx_.rx_sleep.load(memory_order_seq_cst) != 0) wake_receiver();
  return done;
}

/// A receiver at the sender's heels takes the line of the tail away from it with every message. A
/// moment's patience, and it finds several at once. Not where it waits for an answer: then it has
/// sent something since the last look.
void ShmChannel::let_bytes_gather(size_t n) noexcept {
  constexpr int kPauses = 4;  // some 0.1 us
  constexpr size_t kSeveral = 8;
  if (at_the_heels_ && tail_at_look_ == writer_.tail()) {
    for (int i = 0; i < kPauses; ++i) cpu_relax();
  }
  tail_at_look_ = writer_.tail();
  at_the_heels_ = reader_.available() < kSeveral * n;
}

size_t ShmChannel::rx_take(void* to, size_t n) noexcept {
  const size_t populated = segment_.populated(1 - tx_index_);
  if (__builtin_expect(populated < capacity(), 0) && populated < reader_.head() + n) {
    return 0;  // rx_read() sees to that
  }
  if (reader_.known() < n) {
    let_bytes_gather(n);
    if (reader_.known() < n) reader_.look();
  }
  // After the last look at the tail: spans below it are seen.
  if (__builtin_expect(pages_.pending(), 0)) return 0;
  const size_t done = reader_.take_known(to, n);
  if (done != 0) wake_sender_if_roomy();
  return done;
}

void ShmChannel::populate_for_reading(size_t piece) noexcept {
  const size_t known = reader_.available();
  if (known != 0 && reader_.head() + std::min(known, piece) > segment_.populated(1 - tx_index_)) {
    populate_ahead(1 - tx_index_);
  }
}

size_t ShmChannel::rx_read(const iovec* iov, size_t n, size_t skip, size_t limit,
                           bool peek) noexcept {
  ring::IovCursor to(iov, n, skip);
  if (peek) {
    bring_pages_in();
    const size_t seen = reader_.peek_known(to, limit);
    return to.faulted() ? kFault : seen;
  }
  const size_t piece = ring::release_piece(capacity());
  size_t done = 0;
  bool faulted = false;
  do {
    if (__builtin_expect(segment_.populated(1 - tx_index_) < capacity(), 0)) {
      populate_for_reading(piece);
    }
    if (reader_.known() < std::min(limit - done, piece)) reader_.look();
    // After the last look at the tail: spans below it are seen.
    const size_t moved = __builtin_expect(pages_.pending(), 0)
                             ? read_pages(to, limit - done, &faulted)
                             : reader_.read_known(to, std::min(limit - done, piece));
    if (moved == 0) break;
    done += moved;
    wake_sender_if_roomy();
  } while (done < limit && !to.done());
  if (done == 0 && (faulted || to.faulted())) return kFault;
  return done;
}

/// rx_read() of what comes next, while there are bytes in the page lane: of the ring up to there, or
/// of the lane.
size_t ShmChannel::read_pages(ring::IovCursor& to, size_t limit, bool* faulted) noexcept {
  constexpr size_t kPieces = 16;  // of the program's memory, a call
  limit = std::min(limit, reader_.available());
  if (limit == 0) return 0;
  const PageReceiver::Part part = pages_.part_at(reader_.head(), capacity());
  if (part.lied) reader_.fail();
  if (part.in_ring != 0) {
    return reader_.read_known(to, std::min({limit, part.in_ring, ring::release_piece(capacity())}));
  }
  if (part.in_lane == 0) return 0;
  // A program that reads a few KiB at a time would pay a system call for each.
  constexpr size_t kAhead = 128 * 1024;
  if (limit < kAhead / 2 && part.in_lane > limit) {
    const size_t n = std::min({part.in_lane, reader_.available(), kAhead});
    return bring_in(reader_.head(), n) ? reader_.read_known(to, std::min(limit, n)) : 0;
  }
  iovec pieces[kPieces];
  const size_t n = to.pieces(pieces, kPieces, std::min(limit, part.in_lane));
  if (n == 0) return 0;
  const long got = pages_.read(pieces, n);
  if (got == -EFAULT) *faulted = true;
  // Any other: -EAGAIN where the sender lied, or the program closed a number that is not its own.
  if (got < 0 && got != -EFAULT && got != -EINTR) reader_.fail();
  // A release that meets the seal fails: then the sender sends these bytes again, by another way.
  if (got <= 0 || reader_.discard_known(static_cast<size_t>(got)) == 0) return 0;
  to.advance(static_cast<size_t>(got));
  return static_cast<size_t>(got);
}

bool ShmChannel::bring_in(uint64_t at, size_t n) noexcept {
  if (pages_.bring_in(at, n, segment_.ring(1 - tx_index_), capacity())) return true;
  reader_.fail();
  return false;
}

/// What was published and lies in the page lane comes into the ring, for who has to see it there.
void ShmChannel::bring_pages_in() noexcept {
  // Also where the sender has sealed the head meanwhile: what is known may be looked at.
  reader_.look();
  const uint64_t end = reader_.head() + reader_.known();
  for (uint64_t at = reader_.head(); at < end && pages_.pending();) {
    const PageReceiver::Part part = pages_.part_at(at, capacity());
    const size_t n = std::min<uint64_t>(end - at, std::max(part.in_ring, part.in_lane));
    if (part.lied) return reader_.fail();
    if (part.in_lane != 0 && !bring_in(at, n)) return;
    at += n;
  }
}

void ShmChannel::rx_join_lane(const wire::SocketName& name) noexcept {
  // release: the sender may use it from here on.
  if (pages_.join(name, doorbell_.get())) rx_.lane.store(1, memory_order_release);
}

size_t ShmChannel::rx_discard(size_t n) noexcept {
  bring_pages_in();
  const size_t done = reader_.discard_known(n);
  if (done != 0) wake_sender_if_roomy();
  return done;
}

uint64_t ShmChannel::rx_published() noexcept {
  // acquire pairs with RingWriter::write(), as any look at the tail.
  return rx_.tail.load(memory_order_acquire);
}

// --- control words -----------------------------------------------------------------------------

void ShmChannel::tx_set_start(uint64_t stream_offset) noexcept {
  // release pairs with rx_start().
  tx_.start.store(stream_offset + 1, memory_order_release);
}

std::optional<uint64_t> ShmChannel::rx_start() noexcept {
  // acquire pairs with tx_set_start(): what the sender did on TCP before the switch came before.
  const uint64_t word = rx_.start.load(memory_order_acquire);
  if (word == 0) return std::nullopt;
  return word - 1;
}

void ShmChannel::rx_set_ready() noexcept {
  // release pairs with tx_peer_ready(): the gate was closed before the sender may switch.
  rx_.ready.store(1, memory_order_release);
}

bool ShmChannel::tx_peer_ready() noexcept {
  // acquire pairs with rx_set_ready().
  return tx_.ready.load(memory_order_acquire) != 0;
}

Turn ShmChannel::tx_turn() noexcept { return look_at_turn(tx_); }

Turn ShmChannel::rx_turn() noexcept { return look_at_turn(rx_); }

Turn ShmChannel::tx_end() noexcept {
  if (over_.kind != TurnKind::kOpen) return over_;
  const uint64_t before = writer_.seal(ring::kSealEnded);
  over_ = wire::turn_of(before | ring::kSealEnded, writer_.tail());
  return over_;
}

Turn ShmChannel::tx_recall() noexcept {
  if (over_.kind != TurnKind::kOpen) return over_;
  const uint64_t before = writer_.seal(ring::kSealFrozen);
  over_ = wire::turn_of(before | ring::kSealFrozen, writer_.tail());
  return over_;
}

Turn ShmChannel::rx_freeze() noexcept {
  // acquire: as in look_at_turn().
  const Turn turn = wire::turn_of(reader_.freeze(), rx_.tail.load(memory_order_acquire));
  // For a sender that is busy: it looks at this word after every publish, and at the head seldom.
  // seq_cst: as rx_arm().
  rx_.rx_sleep.fetch_or(wire::kSleepFrozen, memory_order_seq_cst);
  return turn;
}

void ShmChannel::tx_set_replayed() noexcept {
  // release pairs with rx_replayed().
  tx_.replayed.store(1, memory_order_release);
}

bool ShmChannel::rx_replayed() noexcept {
  // acquire pairs with tx_set_replayed(): the replayed bytes entered TCP before.
  return rx_.replayed.load(memory_order_acquire) != 0;
}

// --- waiting -----------------------------------------------------------------------------------

uint32_t ShmChannel::rx_bell() noexcept {
  // acquire pairs with strike(): it keeps the arming and the check that follow behind this load.
  return rx_.rx_bell.load(memory_order_acquire);
}

uint32_t ShmChannel::tx_bell() noexcept {
  // acquire: as rx_bell().
  return tx_.tx_bell.load(memory_order_acquire);
}

void ShmChannel::rx_arm(Sleep how) noexcept {
  // seq_cst: the store half of Dekker, see byte_ring.h. Pairs with tx_write()'s load of this word.
  rx_.rx_sleep.fetch_or(static_cast<uint32_t>(how), memory_order_seq_cst);
}

bool ShmChannel::rx_disarm() noexcept {
  // seq_cst: the caller looks next whether somebody else has armed (model/sleep.pml, DISARM).
  rx_.rx_sleep.fetch_and(~static_cast<uint32_t>(Sleep::kDoorbell), memory_order_seq_cst);
  return true;
}

void ShmChannel::tx_arm(Sleep how) noexcept {
  // seq_cst: as rx_arm(). Pairs with wake_sender_if_roomy()'s load.
  tx_.tx_sleep.fetch_or(static_cast<uint32_t>(how), memory_order_seq_cst);
}

Result<void> ShmChannel::rx_sleep(uint32_t seen, const timespec* timeout) noexcept {
  return sleep_on(rx_.rx_bell, seen, timeout);
}

Result<void> ShmChannel::tx_sleep(uint32_t seen, const timespec* timeout) noexcept {
  return sleep_on(tx_.tx_bell, seen, timeout);
}

void ShmChannel::wake_receiver() noexcept {
  // One waker takes the whole word: sleepers that still find nothing arm again. seq_cst keeps it in
  // the one order with rx_arm(); our publish came before it, so a sleeper that arms later sees the
  // bytes.
  const uint32_t bits = tx_.rx_sleep.exchange(0, memory_order_seq_cst);
  if ((bits & wire::kSleepFrozen) != 0) freeze_heard_ = true;
  if ((bits & wire::kSleepFutex) != 0) strike(tx_.rx_bell);
  if ((bits & wire::kSleepDoorbell) != 0) ring_doorbell();
}

void ShmChannel::wake_sender_if_roomy() noexcept {
  // seq_cst: the load half of Dekker, after the release of the head. Pairs with tx_arm().
  if (rx_.tx_sleep.load(memory_order_seq_cst) == 0) return;
  // A sender that is woken for every few bytes would sleep and wake all the time.
  // Relaxed: the sender's own affair; nonsense wakes it at the wrong time.
  const size_t told = rx_.window.load(std::memory_order_relaxed);
  const size_t window = told != 0 && told < capacity() ? told : capacity();
  const size_t unread = reader_.available();
  if (unread > window - window / 3) return;
  const uint32_t bits = rx_.tx_sleep.exchange(0, memory_order_seq_cst);
  if ((bits & wire::kSleepFutex) != 0) strike(rx_.tx_bell);
  if ((bits & wire::kSleepDoorbell) != 0) ring_doorbell();
}

void ShmChannel::ring_doorbell() noexcept {
  // EAGAIN: hundreds of rings wait there already. EPIPE: nobody is left to wake.
  const char ring = 1;
  (void)os::send(doorbell_.get(), &ring, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void ShmChannel::wake_local() noexcept {
  strike(rx_.rx_bell);
  strike(tx_.tx_bell);
}

void ShmChannel::wake_peer() noexcept {
  strike(tx_.rx_bell);
  strike(rx_.tx_bell);
  ring_doorbell();
}

void ShmChannel::let_go() noexcept {
  // For the socket, not for our descriptor of it: copies hang up with it. Rings of ours that the
  // peer has not taken out yet stay. Who will park the segment goes on listening for the peer's
  // end.
  (void)os::shutdown(doorbell_.get(), reuse_.memfd ? SHUT_WR : SHUT_RDWR);
}

bool ShmChannel::drain_wait_fd() noexcept {
  char rings[256];
  bool any = false;
  // Bounded: a peer that rings without end keeps us awake, not in here.
  for (int i = 0; i < 4; ++i) {
    const Result<size_t> n = os::recv(doorbell_.get(), rings, sizeof(rings), MSG_DONTWAIT);
    if (n && *n > 0) any = true;
    if (!n || *n < sizeof(rings)) break;
  }
  return any;
}

}  // namespace rsock::transport
