#include "core/transport/verbs/verbs_channel.h"

#include <arpa/inet.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <climits>

#include "core/base/inside.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/transport/verbs/cancel_off.h"
#include "core/transport/verbs/rdma_library.h"

namespace rsock::transport::verbs {
namespace {

using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;
using std::memory_order_seq_cst;
using wire::Word;

/// So many signalled writes are in flight before small messages gather ...
constexpr uint32_t kEager = 4;
/// ... and from so many bytes on a write is worth its own.
constexpr uint64_t kBulk = 16 * 1024;
/// A write no longer than this: the receiver copies out while the next one is on its way.
constexpr uint64_t kLongestWrite = 128 * 1024;
/// Most writes of one call, where each is a packet (QueuePair::one_packet).
constexpr uint32_t kChain = 32;
/// Without one for so long an entry is signalled, so that the send queue empties.
constexpr uint32_t kSignalEvery = 16;
/// Immediate value: this bit says credit, the rest is a count of bytes (a ring is at most 64 MiB).
constexpr uint32_t kCreditBit = uint32_t{1} << 31;

void strike(std::atomic<uint32_t>& bell) noexcept {
  // release pairs with the acquire in rx_bell()/tx_bell().
  bell.fetch_add(1, memory_order_release);
  os::futex_wake(&bell, INT_MAX);
}

Result<void> sleep_on(const std::atomic<uint32_t>& bell, uint32_t seen,
                      const timespec* timeout) noexcept {
  Result<void> r = os::futex_wait(&bell, seen, timeout);
  if (!r && r.error() == EAGAIN) return {};  // it has rung already
  return r;
}

Turn turn_of(uint64_t head, uint64_t tail) noexcept {
  if ((head & ring::kSealFrozen) != 0) return Turn{TurnKind::kFrozen, head & ring::kCountMask};
  if ((head & ring::kSealEnded) != 0) return Turn{TurnKind::kEnded, tail};
  return Turn{};
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
  // The connection manager leaves 0 there, which is the longest wait of all, 655 ms
  // (cm_init_qp_rtr_attr() in drivers/infiniband/core/cm.c; the table in ibv_modify_qp(3)).
  constexpr uint8_t kRetryAfter320us = 10;
  ibv_qp_attr attributes{};
  attributes.min_rnr_timer = kRetryAfter320us;
  (void)RdmaLibrary::get()->ibv_modify_qp(pair_.qp, &attributes, IBV_QP_MIN_RNR_TIMER);
  {
    MutexLock lock(post_mutex_);
    if (pair_.one_packet) {
      ibv_qp_init_attr ignored{};
      attributes = ibv_qp_attr{};
      const bool known =
          RdmaLibrary::get()->ibv_query_qp(pair_.qp, &attributes, IBV_QP_PATH_MTU, &ignored) == 0;
      longest_write_ = 128u << (known ? attributes.path_mtu : IBV_MTU_256);
    }
    connected_ = true;
  }
  (void)push();
}

// --- the send queue ----------------------------------------------------------------------------

/// Slots for n bytes: a write for each `longest_write`, and where there are no immediates a SEND
/// that counts them.
uint32_t VerbsChannel::slots_for(uint64_t n) const noexcept {
  const uint64_t writes = n == 0 ? 0 : (n + longest_write_ - 1) / longest_write_;
  if (!pair_.has_immediate) return static_cast<uint32_t>(writes) + 1;
  return static_cast<uint32_t>(std::max<uint64_t>(writes, 1));
}

/// One call of the device for one span of the ring; the last entry tells of all of it.
bool VerbsChannel::post_locked(uint64_t offset, uint32_t n, uint32_t immediate,
                               bool signal) noexcept {
  ibv_send_wr entries[kChain + 1];
  ibv_sge pieces[kChain + 1];
  const uint32_t slots = slots_for(n);
  const uint32_t covered = unsignalled_ + slots;
  // What the completion tells: the slots that are free again, and how far the ring is delivered.
  const uint64_t id = uint64_t{covered} << 48 | ((offset + n) & ((uint64_t{1} << 48) - 1));
  uint32_t done = 0;
  for (uint32_t i = 0; i < slots; ++i) {
    const uint64_t at = (offset + done) & (capacity() - 1);
    const uint32_t size = std::min(n - done, longest_write_);
    ibv_send_wr& entry = entries[i];
    entry = ibv_send_wr{};
    entry.wr_id = id;
    entry.opcode = IBV_WR_RDMA_WRITE;
    entry.next = i + 1 < slots ? &entries[i + 1] : nullptr;
    entry.sg_list = &pieces[i];
    entry.num_sge = size != 0 ? 1 : 0;
    entry.wr.rdma.remote_addr = remote_.address + at;
    entry.wr.rdma.rkey = remote_.key;
    if (size <= pair_.inline_bytes) entry.send_flags = IBV_SEND_INLINE;
    pieces[i] = ibv_sge{reinterpret_cast<uint64_t>(pair_.memory.tx_ring() + at), size,
                        pair_.memory.tx_key()};
    done += size;
  }
  ibv_send_wr& last = entries[slots - 1];
  if (pair_.has_immediate) {
    last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    last.imm_data = htonl(immediate);
  } else {
    // A SEND is delivered behind the writes before it (RFC 5040, 5.3): the same promise in one
    // entry more.
    last.opcode = IBV_WR_SEND;
    last.num_sge = 1;
    last.send_flags = IBV_SEND_INLINE;
    pieces[slots - 1] = ibv_sge{reinterpret_cast<uint64_t>(&immediate), sizeof(immediate), 0};
  }
  // Solicited: the peer's keeper sleeps for arrivals only (device.h).
  last.send_flags |= IBV_SEND_SOLICITED;
  if (signal) last.send_flags |= IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  const CancelOff guard;
  if (ibv_post_send(pair_.qp, entries, &bad) != 0) {
    fail_path("the queue pair takes no more work");
    return false;
  }
  used_ += slots;
  if (signal) {
    unsignalled_ = 0;
    ++signals_in_flight_;
  } else {
    unsignalled_ = covered;
  }
  return true;
}

/// Posts what there is. False: something is left that a completion has to push out.
bool VerbsChannel::push_locked() noexcept {
  if (!connected_ || failure_.load(memory_order_relaxed) != nullptr) return true;
  push_credit_locked();
  for (;;) {
    // acquire pairs with the writer's publish: the bytes are in the ring.
    const uint64_t left = tx_.tail.load(memory_order_acquire) - posted_.load(memory_order_relaxed);
    if (left == 0) return true;
    if (used_ + slots_for(1) > pair_.data_slots || (signals_in_flight_ >= kEager && left < kBulk))
      return false;
    const uint64_t from = posted_.load(memory_order_relaxed);
    const uint64_t writes =
        std::min<uint64_t>(kChain, pair_.data_slots - used_ - (pair_.has_immediate ? 0 : 1));
    const uint64_t n = std::min(
        {left, kLongestWrite, writes * longest_write_, capacity() - (from & (capacity() - 1))});
    // The last of what there is: it tells that all is delivered, and what gathers meanwhile waits
    // for it.
    const bool signal = n == left || unsignalled_ + slots_for(n) + 1 > kSignalEvery;
    if (!post_locked(from, static_cast<uint32_t>(n), static_cast<uint32_t>(n), signal)) return true;
    posted_.store(from + n, memory_order_relaxed);
  }
}

void VerbsChannel::push_credit_locked() noexcept {
  const uint64_t wanted = credit_wanted_.load(memory_order_acquire);  // pairs with credit()
  if (wanted == credit_sent_ || used_ + slots_for(0) > pair_.data_slots + kCreditSlots) return;
  const uint32_t n = static_cast<uint32_t>(wanted - credit_sent_);
  const bool signal = unsignalled_ + 2 * slots_for(0) > kSignalEvery;
  if (post_locked(delivered_.load(memory_order_relaxed), 0, kCreditBit | n, signal))
    credit_sent_ = wanted;
}

/// True: all is posted. False: the keeper will hear of the completion that posts the rest, if no
/// thread does.
bool VerbsChannel::push() noexcept {
  {
    MutexLock lock(post_mutex_);
    if (push_locked()) return true;
  }
  (void)device_->progress();
  {
    MutexLock lock(post_mutex_);
    if (push_locked()) return true;
  }
  device_->need_events();
  (void)device_->progress();  // what completed before the queue was armed
  return false;
}

void VerbsChannel::on_sent(const ibv_wc& wc) noexcept {
  if (wc.status != IBV_WC_SUCCESS) {
    if (failure_.load(memory_order_relaxed) == nullptr) {
      RSOCK_LOG(kInfo, "queue pair %u: %s (vendor %u)", wc.qp_num,
                RdmaLibrary::get()->ibv_wc_status_str(wc.status), wc.vendor_err);
    }
    return fail_path(
        wc.status == IBV_WC_RETRY_EXC_ERR    ? "the peer does not answer over RDMA any more"
        : wc.status == IBV_WC_REM_ACCESS_ERR ? "the peer's ring may not be written any more"
                                             : "the queue pair failed");
  }
  MutexLock lock(post_mutex_);
  used_ -= std::min(used_, static_cast<uint32_t>(wc.wr_id >> 48));
  if (signals_in_flight_ != 0) --signals_in_flight_;
  // 48 bits of where it ends, which wrap on a fast stream within hours. A credit's may be older
  // than what is known.
  const uint64_t before = delivered_.load(memory_order_relaxed);
  const uint64_t step = (wc.wr_id - before) & ((uint64_t{1} << 48) - 1);
  if (step < uint64_t{1} << 47) delivered_.store(before + step, memory_order_relaxed);
  (void)push_locked();
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
  const uint32_t bits = rx_.rx_sleep.exchange(0, memory_order_seq_cst);
  if ((bits & wire::kSleepFutex) != 0) strike(rx_.rx_bell);
  if ((bits & wire::kSleepDoorbell) != 0) ring_doorbell();
}

void VerbsChannel::wake_sender_if_roomy() noexcept {
  if (tx_.tx_sleep.load(memory_order_seq_cst) == 0) return;
  const uint64_t used = tx_.tail.load(memory_order_relaxed) -
                        (tx_.head.load(memory_order_relaxed) & ring::kCountMask);
  if (capacity() - used < capacity() / 3) return;
  const uint32_t bits = tx_.tx_sleep.exchange(0, memory_order_seq_cst);
  if ((bits & wire::kSleepFutex) != 0) strike(tx_.tx_bell);
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
  if (peek) return reader_.peek(to, limit);
  const size_t piece = ring::release_piece(capacity());
  size_t done = 0;
  do {
    const size_t moved = reader_.read(to, std::min(limit - done, piece));
    if (moved == 0) break;
    done += moved;
    credit();
  } while (done < limit && !to.done());
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

// --- control words -----------------------------------------------------------------------------

void VerbsChannel::tx_set_start(uint64_t stream_offset) noexcept {
  line_->say(nonce_, Word::kStart, stream_offset);
}

std::optional<uint64_t> VerbsChannel::rx_start() noexcept {
  // acquire pairs with on_word().
  const uint64_t word = rx_.start.load(memory_order_acquire);
  if (word == 0) return std::nullopt;
  return word - 1;
}

void VerbsChannel::rx_set_ready() noexcept { line_->say(nonce_, Word::kReady, 0); }
bool VerbsChannel::tx_peer_ready() noexcept { return tx_.ready.load(memory_order_acquire) != 0; }

Turn VerbsChannel::tx_turn() noexcept {
  // acquire pairs with on_word().
  return turn_of(tx_.head.load(memory_order_acquire), tx_.tail.load(memory_order_relaxed));
}

bool VerbsChannel::tx_maybe_turned() noexcept { return turned_.load(memory_order_acquire); }

Turn VerbsChannel::rx_turn() noexcept {
  return turn_of(rx_.head.load(memory_order_acquire), rx_.tail.load(memory_order_acquire));
}

Turn VerbsChannel::tx_end() noexcept {
  writer_.close();
  if (!end_asked_ && !recall_asked_ && !gone_.load(memory_order_acquire)) {
    end_asked_ = true;
    line_->say(nonce_, Word::kEnd, writer_.tail());
    (void)push();
  }
  return tx_turn();
}

Turn VerbsChannel::tx_recall() noexcept {
  writer_.close();
  if (tx_turn().kind != TurnKind::kOpen) return tx_turn();
  if (!gone_.load(memory_order_acquire)) {
    if (!recall_asked_) {
      recall_asked_ = true;
      line_->say(nonce_, Word::kRecall, 0);
    }
    return tx_turn();
  }
  // Nobody answers any more. What the peer told of last is exact if it is all that we published;
  // else its process died with bytes of ours, and nobody knows how many: no byte may follow.
  (void)device_->progress();
  uint64_t head = tx_.head.load(memory_order_acquire);
  while ((head & ring::kSealFrozen) == 0) {
    if ((head & ring::kCountMask) != writer_.tail()) {
      tx_lied_.store(true, memory_order_release);
      break;
    }
    if (tx_.head.compare_exchange_weak(head, head | ring::kSealFrozen, memory_order_seq_cst,
                                       memory_order_acquire))
      break;
  }
  return tx_turn();
}

Turn VerbsChannel::rx_freeze() noexcept {
  const Turn turn = turn_of(reader_.freeze(), rx_.tail.load(memory_order_acquire));
  if (turn.kind == TurnKind::kFrozen && !frozen_said_.exchange(true, memory_order_relaxed)) {
    line_->say(nonce_, Word::kFrozen, turn.at);
  }
  return turn;
}

void VerbsChannel::tx_set_replayed() noexcept { line_->say(nonce_, Word::kReplayed, 0); }
bool VerbsChannel::rx_replayed() noexcept { return rx_.replayed.load(memory_order_acquire) != 0; }

void VerbsChannel::let_go() noexcept {
  if (let_go_) return;
  let_go_ = true;
  // What we consumed is final, and the peer must know it. The thread that found the end may not
  // have said so yet: twice is once, but behind BYE it would be too late.
  if (rx_freeze().kind == TurnKind::kEnded && !end_ok_said_.load(memory_order_acquire)) {
    line_->say(nonce_, Word::kEndOk, end_at_.load(memory_order_relaxed));
  }
  line_->say(nonce_, Word::kBye, 0);
}

// --- what the line brings ----------------------------------------------------------------------

void VerbsChannel::on_word(Word word, uint64_t value) noexcept {
  switch (word) {
    case Word::kReady:
      tx_.ready.store(1, memory_order_release);  // pairs with tx_peer_ready()
      break;
    case Word::kStart:
      if (rx_.start.load(memory_order_relaxed) != 0) {
        rx_lied_.store(true, memory_order_release);
      } else {
        rx_.start.store(value + 1, memory_order_release);  // pairs with rx_start()
      }
      break;
    case Word::kFrozen: {
      uint64_t head = tx_.head.load(memory_order_relaxed);
      do {
        if ((head & (ring::kSealFrozen | ring::kSealEnded)) != 0 ||
            value < (head & ring::kCountMask) || value > tx_.tail.load(memory_order_acquire)) {
          // A second answer to the same question is none; nor is one that takes back what was told.
          if ((head & ring::kSealFrozen) == 0) tx_lied_.store(true, memory_order_release);
          break;
        }
        // seq_cst, as on_arrival().
      } while (!tx_.head.compare_exchange_weak(head, value | ring::kSealFrozen,
                                               memory_order_seq_cst, memory_order_relaxed));
      turned_.store(true, memory_order_release);
      break;
    }
    case Word::kRecall:
      asked_back_.store(true, memory_order_release);
      break;
    case Word::kEnd:
      if (end_known_.load(memory_order_relaxed) || value < rx_.tail.load(memory_order_acquire)) {
        rx_lied_.store(true, memory_order_release);
        break;
      }
      end_at_.store(value, memory_order_relaxed);
      end_known_.store(true, memory_order_seq_cst);  // pairs with look_for_end() and on_arrival()
      (void)device_->progress();
      look_for_end();
      break;
    case Word::kEndOk:
      // Only what we asked; the writer is closed then, so the tail stands still.
      if (value != tx_.tail.load(memory_order_acquire)) {
        tx_lied_.store(true, memory_order_release);
      } else {
        tx_.head.fetch_or(ring::kSealEnded, memory_order_seq_cst);
      }
      turned_.store(true, memory_order_release);
      break;
    case Word::kReplayed:
      rx_.replayed.store(1, memory_order_release);  // pairs with rx_replayed()
      break;
    case Word::kBye:
      // Words keep their order: a direction without a START has not left TCP, and never will.
      // Without this an end that let go of a channel between our READY and its START would be taken
      // for one that died with bytes.
      if (rx_.start.load(memory_order_relaxed) == 0) rx_.replayed.store(1, memory_order_release);
      return line_down();
  }
  wake_all();
}

void VerbsChannel::line_down() noexcept {
  gone_.store(true, memory_order_release);
  turned_.store(true, memory_order_release);
  wake_all();
}

void VerbsChannel::fail_path(const char* reason) noexcept {
  const char* none = nullptr;
  if (!failure_.compare_exchange_strong(none, reason, std::memory_order_acq_rel,
                                        memory_order_relaxed))
    return;
  line_->attention(nonce_);
}

bool VerbsChannel::peer_let_go() noexcept { return gone_.load(memory_order_acquire); }
bool VerbsChannel::rx_asked_back() noexcept { return asked_back_.load(memory_order_acquire); }
const char* VerbsChannel::path_failure() noexcept { return failure_.load(memory_order_acquire); }

// --- waiting -----------------------------------------------------------------------------------

uint32_t VerbsChannel::rx_bell() noexcept { return rx_.rx_bell.load(memory_order_acquire); }
uint32_t VerbsChannel::tx_bell() noexcept { return tx_.tx_bell.load(memory_order_acquire); }

void VerbsChannel::rx_arm(Sleep how) noexcept {
  // seq_cst: the store half of Dekker. Then the queue: a completion before that is found by the
  // check that follows.
  rx_.rx_sleep.fetch_or(static_cast<uint32_t>(how), memory_order_seq_cst);
  device_->need_arrivals();
}

void VerbsChannel::tx_arm(Sleep how) noexcept {
  tx_.tx_sleep.fetch_or(static_cast<uint32_t>(how), memory_order_seq_cst);
  device_->need_events();
}

Result<void> VerbsChannel::rx_sleep(uint32_t seen, const timespec* timeout) noexcept {
  return sleep_on(rx_.rx_bell, seen, timeout);
}

Result<void> VerbsChannel::tx_sleep(uint32_t seen, const timespec* timeout) noexcept {
  return sleep_on(tx_.tx_bell, seen, timeout);
}

void VerbsChannel::wake_local() noexcept {
  strike(rx_.rx_bell);
  strike(tx_.tx_bell);
}

bool VerbsChannel::drain_wait_fd() noexcept {
  uint64_t rings = 0;
  return os::read(doorbell_.get(), &rings, sizeof(rings)).has_value();
}

}  // namespace rsock::transport::verbs
