#include "core/transport/verbs/verbs_channel.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "core/base/inside.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/transport/verbs/rdma_library.h"

namespace rsock::transport::verbs {
namespace {

using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;
using std::memory_order_seq_cst;
using wire::Word;

/// Bytes of a write, at most (Packets).
uint32_t longest_write_on(const QueuePair& pair) noexcept {
  if (pair.packets == Packets::kMany) return kLongestWrite;
  const RdmaLibrary& lib = *RdmaLibrary::get();
  ibv_qp_init_attr ignored{};
  ibv_qp_attr now{};
  if (lib.ibv_query_qp(pair.qp, &now, IBV_QP_PATH_MTU | IBV_QP_AV | IBV_QP_PORT, &ignored) != 0)
    return 128u << IBV_MTU_256;
  if (pair.packets == Packets::kOneBetweenHosts && now.ah_attr.is_global != 0) {
    const ibv_global_route& path = now.ah_attr.grh;
    ibv_gid ours{};
    if (lib.ibv_query_gid(pair.qp->context, now.ah_attr.port_num, path.sgid_index, &ours) == 0 &&
        memcmp(&ours, &path.dgid, sizeof(ours)) == 0)
      return kLongestWrite;
  }
  return 128u << now.path_mtu;
}

}  // namespace

VerbsChannel::VerbsChannel(std::shared_ptr<Device> device, QueuePair pair, const RemoteRing& remote,
                           uint64_t nonce, std::shared_ptr<WordLine> line,
                           os::OwnedFd doorbell) noexcept
    : device_(std::move(device)),
      pair_(std::move(pair)),
      remote_(remote),
      nonce_(nonce),
      line_(std::move(line)),
      doorbell_(std::move(doorbell)),
      writer_(pair_.memory.tx_ring(), pair_.memory.ring_size(), tx_.tail, tx_.head),
      reader_(pair_.memory.rx_ring(), pair_.memory.ring_size(), rx_.tail, rx_.head) {
  device_->add(*this, pair_.qp->qp_num);
}

VerbsChannel::~VerbsChannel() {
  if (!device_->is_ours()) {  // a forked child: everything is the parent's, also the locks
    pair_.memory.abandon();
    return;
  }
  device_->remove(*this, pair_.qp->qp_num);
  {
    MutexLock lock(post_mutex_);
    note_behind_locked(false);
  }
  (void)take_sleep(rx_.rx_sleep);
  (void)take_sleep(tx_.tx_sleep);
  device_->retire(std::move(pair_));
  line_->attention(nonce_);
}

std::shared_ptr<VerbsChannel> make_verbs_channel(std::shared_ptr<Device> device, QueuePair&& pair,
                                                 const RemoteRing& remote, uint64_t nonce,
                                                 std::shared_ptr<WordLine> line) noexcept {
  auto bell = os::make_internal([] { return os::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!bell) {
    device->retire(std::move(pair));
    return nullptr;
  }
  return std::make_shared<VerbsChannel>(std::move(device), std::move(pair), remote, nonce,
                                        std::move(line), std::move(*bell));
}

void VerbsChannel::connected() noexcept {
  pair_.connected = true;
  // The connection manager leaves 0 there, which is the longest wait of all, 655 ms
  // (cm_init_qp_rtr_attr() in drivers/infiniband/core/cm.c; the table in ibv_modify_qp(3)).
  constexpr uint8_t kRetryAfter320us = 10;
  ibv_qp_attr attributes{};
  attributes.min_rnr_timer = kRetryAfter320us;
  (void)RdmaLibrary::get()->ibv_modify_qp(pair_.qp, &attributes, IBV_QP_MIN_RNR_TIMER);
  {
    MutexLock lock(post_mutex_);
    longest_write_ = longest_write_on(pair_);
    connected_ = true;
  }
  (void)push();
}

// --- arrivals ----------------------------------------------------------------------------------

void VerbsChannel::on_arrival(uint32_t immediate) noexcept {
  const uint64_t n = immediate & ~kCreditBit;
  if ((immediate & kCreditBit) != 0) {
    uint64_t head = tx_.head.load(memory_order_relaxed);
    do {
      // Sealed: the count beside it is final, and includes this.
      if ((head & ring::kSealFrozen) != 0) return;
      if (n > tx_.tail.load(memory_order_relaxed) - (head & ring::kCountMask)) {
        tx_lied_.store(true, memory_order_release);
        turned_.store(true, memory_order_release);
        line_->attention(nonce_);  // perhaps nobody sends for long
        return wake_all();
      }
      // seq_cst pairs with RingWriter::refresh() and with the sender's sleep word (byte_ring.h,
      // Dekker).
    } while (!tx_.head.compare_exchange_weak(head, head + n, memory_order_seq_cst,
                                             memory_order_relaxed));
    return wake_sender_if_roomy();
  }
  const uint64_t tail = rx_.tail.load(memory_order_relaxed);  // only we write it
  const uint64_t head = rx_.head.load(memory_order_acquire) & ring::kCountMask;
  const bool known = end_known_.load(memory_order_acquire);
  if (n == 0 || n > capacity() - (tail - head) ||
      (known && tail + n > end_at_.load(memory_order_relaxed))) {
    rx_lied_.store(true, memory_order_release);
    line_->attention(nonce_);
    return wake_all();
  }
  ring::publish(rx_.tail, tail + n);
  look_for_end();
  // seq_cst: the load half of Dekker. Pairs with rx_arm().
  if (rx_.rx_sleep.load(memory_order_seq_cst) != 0) wake_receiver();
}

/// Receiver: when the last byte before the peer's end is here, and we have not sealed, the
/// direction is ended. Called by who stored the tail and by who stored the end: seq_cst on both, so
/// that one of them sees both.
void VerbsChannel::look_for_end() noexcept {
  if (!end_known_.load(memory_order_seq_cst)) return;
  const uint64_t end = end_at_.load(memory_order_relaxed);
  if (rx_.tail.load(memory_order_seq_cst) != end) return;
  // One word, as in shared memory: whoever seals first has decided. Pairs with RingReader's
  // compare-exchange.
  const uint64_t before = rx_.head.fetch_or(ring::kSealEnded, memory_order_seq_cst);
  if ((before & (ring::kSealEnded | ring::kSealFrozen)) != 0) return;
  line_->say(nonce_, Word::kEndOk, end);
  end_ok_said_.store(true, memory_order_release);  // pairs with let_go()
  wake_all();
}

void VerbsChannel::wake_receiver() noexcept {
  const uint32_t bits = take_sleep(rx_.rx_sleep);
  if ((bits & wire::kSleepFutex) != 0) device_->strike(rx_.rx_bell);
  if ((bits & wire::kSleepDoorbell) != 0) ring_doorbell();
}

void VerbsChannel::wake_sender_if_roomy() noexcept {
  if (tx_.tx_sleep.load(memory_order_seq_cst) == 0) return;
  const uint64_t used = tx_.tail.load(memory_order_relaxed) -
                        (tx_.head.load(memory_order_relaxed) & ring::kCountMask);
  if (capacity() - used < capacity() / 3) return;
  const uint32_t bits = take_sleep(tx_.tx_sleep);
  if ((bits & wire::kSleepFutex) != 0) device_->strike(tx_.tx_bell);
  if ((bits & wire::kSleepDoorbell) != 0) ring_doorbell();
}

void VerbsChannel::ring_doorbell() noexcept {
  const uint64_t one = 1;
  (void)os::write(doorbell_.get(), &one, sizeof(one));
}

void VerbsChannel::wake_all() noexcept {
  wake_local();
  ring_doorbell();
}

// --- bytes -------------------------------------------------------------------------------------

size_t VerbsChannel::tx_room(size_t want) noexcept {
  const size_t room = writer_.room(want);
  if (room >= want) return room;
  (void)device_->progress();
  return writer_.room(want);
}

size_t VerbsChannel::tx_write(const iovec* iov, size_t n, size_t skip, size_t limit) noexcept {
  ring::IovCursor from(iov, n, skip);
  size_t done = 0;
  do {
    const size_t moved = writer_.write(from, std::min(limit - done, ring::kPublishPiece));
    if (moved == 0) break;
    done += moved;
    // The first piece of many leaves while the others are copied; the rest in as few calls as there
    // are large writes.
    if (done == moved || posted_.load(memory_order_relaxed) + kLongestWrite <= writer_.tail())
      // `more` only if there is room for it, and it can be read: what it promises must follow.
      (void)push(done < limit && !from.done() && writer_.room(1) != 0 &&
                 from.readable_ahead(ring::kPublishPiece));
  } while (done < limit && !from.done());
  if (done != 0 && posted_.load(memory_order_relaxed) != writer_.tail()) (void)push();
  if (done == 0 && from.faulted()) return kFault;
  return done;
}

size_t VerbsChannel::tx_fill(ByteSource& from, size_t limit) noexcept {
  size_t done = 0;
  do {
    const size_t moved = writer_.write(from, std::min(limit - done, ring::kPublishPiece));
    if (moved == 0) break;
    done += moved;
    // As in tx_write(). Nobody knows what else the source has, so nothing is promised behind it.
    if (done == moved || posted_.load(memory_order_relaxed) + kLongestWrite <= writer_.tail())
      (void)push();
  } while (done < limit && !from.done());
  if (done != 0 && posted_.load(memory_order_relaxed) != writer_.tail()) (void)push();
  return done;
}

size_t VerbsChannel::tx_put(const void* from, size_t n) noexcept {
  const size_t done = writer_.put(from, n);
  if (done != 0) (void)push();
  return done;
}

uint64_t VerbsChannel::tx_unread() noexcept {
  (void)device_->progress();
  return writer_.unread();
}

uint64_t VerbsChannel::tx_undelivered() noexcept {
  (void)device_->progress();
  return writer_.tail() - std::min(writer_.tail(), delivered_.load(memory_order_relaxed));
}

bool VerbsChannel::tx_failed() const noexcept {
  return writer_.failed() || tx_lied_.load(memory_order_acquire);
}

size_t VerbsChannel::rx_available() noexcept {
  if (const size_t n = reader_.available(); n != 0) return n;
  (void)device_->progress();
  return reader_.available();
}

/// Tells the peer what was consumed, at half a ring. More often would be a message that carries
/// nothing; later would let the sender run dry.
void VerbsChannel::credit() noexcept {
  const uint64_t head = reader_.head();
  if (head - credited_ < capacity() / 2) return;
  credited_ = head;
  credit_wanted_.store(head, memory_order_release);  // pairs with push_credit_locked()
  (void)push();
}

size_t VerbsChannel::rx_read(const iovec* iov, size_t n, size_t skip, size_t limit,
                             bool peek) noexcept {
  ring::IovCursor to(iov, n, skip);
  if (reader_.known() < limit) (void)device_->progress();
  if (peek) {
    const size_t seen = reader_.peek(to, limit);
    return to.faulted() ? kFault : seen;
  }
  const size_t piece = ring::release_piece(capacity());
  size_t done = 0;
  do {
    const size_t moved = reader_.read(to, std::min(limit - done, piece));
    if (moved == 0) break;
    done += moved;
    credit();
  } while (done < limit && !to.done());
  if (done == 0 && to.faulted()) return kFault;
  return done;
}

size_t VerbsChannel::rx_take(void* to, size_t n) noexcept {
  if (reader_.known() < n) (void)device_->progress();
  const size_t done = reader_.take(to, n);
  if (done != 0) credit();
  return done;
}

size_t VerbsChannel::rx_discard(size_t n) noexcept {
  if (reader_.known() < n) (void)device_->progress();
  const size_t done = reader_.discard(n);
  if (done != 0) credit();
  return done;
}

/// What came; of a peer that went without a word about its end, one byte more than that: nobody
/// knows.
uint64_t VerbsChannel::rx_published() noexcept {
  (void)device_->progress();
  if (end_known_.load(memory_order_acquire)) return end_at_.load(memory_order_relaxed);
  const uint64_t tail = rx_.tail.load(memory_order_acquire);
  return gone_.load(memory_order_acquire) ? tail + 1 : tail;
}

bool VerbsChannel::rx_failed() const noexcept {
  return reader_.failed() || rx_lied_.load(memory_order_acquire);
}

// --- waiting -----------------------------------------------------------------------------------

uint32_t VerbsChannel::rx_bell() noexcept { return rx_.rx_bell.load(memory_order_acquire); }
uint32_t VerbsChannel::tx_bell() noexcept { return tx_.tx_bell.load(memory_order_acquire); }

/// Counted from before the word is set until after it is taken: the device keeps its queue armed
/// while anybody may sleep.
void VerbsChannel::arm_sleep(std::atomic<uint32_t>& word, Sleep how) noexcept {
  device_->count_sleeping(1);
  if (word.fetch_or(static_cast<uint32_t>(how), memory_order_seq_cst) != 0)
    device_->count_sleeping(-1);
}

uint32_t VerbsChannel::take_sleep(std::atomic<uint32_t>& word) noexcept {
  const uint32_t bits = word.exchange(0, memory_order_seq_cst);
  if (bits != 0) device_->count_sleeping(-1);
  return bits;
}

void VerbsChannel::rx_arm(Sleep how) noexcept {
  // seq_cst: the store half of Dekker. Then the queue: a completion before that is found by the
  // check that follows.
  arm_sleep(rx_.rx_sleep, how);
  device_->need_arrivals();
}

void VerbsChannel::tx_arm(Sleep how) noexcept {
  arm_sleep(tx_.tx_sleep, how);
  // Room is the peer's to give: a credit is an arrival, what of ours completes is none.
  device_->need_arrivals();
}

Result<void> VerbsChannel::rx_sleep(uint32_t seen, const timespec* timeout) noexcept {
  return device_->sleep(rx_.rx_bell, seen, timeout);
}

Result<void> VerbsChannel::tx_sleep(uint32_t seen, const timespec* timeout) noexcept {
  return device_->sleep(tx_.tx_bell, seen, timeout);
}

void VerbsChannel::wake_local() noexcept {
  device_->strike(rx_.rx_bell);
  device_->strike(tx_.tx_bell);
}

bool VerbsChannel::drain_wait_fd() noexcept {
  uint64_t rings = 0;
  return os::read(doorbell_.get(), &rings, sizeof(rings)).has_value();
}

}  // namespace rsock::transport::verbs
