// What a channel posts: writes of its ring, credits, and what their completions free.

#include <arpa/inet.h>

#include <algorithm>

#include "core/base/cancel_off.h"
#include "core/base/log.h"
#include "core/transport/verbs/rdma_library.h"
#include "core/transport/verbs/verbs_channel.h"

namespace rsock::transport::verbs {
namespace {

using std::memory_order_acquire;
using std::memory_order_relaxed;

/// So many signalled writes are in flight before small messages gather ...
constexpr uint32_t kEager = 4;
/// ... and from so many bytes on a write is worth its own.
constexpr uint64_t kBulk = 16 * 1024;
/// Most writes of one call, where each is a packet (QueuePair::packets).
constexpr uint32_t kChain = 32;
/// Bytes that may arrive before a sleeping receiver is woken, if more follow at once.
constexpr uint64_t kLongestQuiet = 64 * 1024;
/// Without one for so long an entry is signalled, so that the send queue empties.
constexpr uint32_t kSignalEvery = 16;

}  // namespace

/// Slots for n bytes: a write for each `longest_write`, and where there are no immediates a SEND
/// that counts them.
uint32_t VerbsChannel::slots_for(uint64_t n) const noexcept {
  const uint64_t writes = n == 0 ? 0 : (n + longest_write_ - 1) / longest_write_;
  if (!pair_.has_immediate) return static_cast<uint32_t>(writes) + 1;
  return static_cast<uint32_t>(std::max<uint64_t>(writes, 1));
}

/// One call of the device for one span of the ring; the last entry tells of all of it.
bool VerbsChannel::post_locked(uint64_t offset, uint32_t n, uint32_t immediate, bool signal,
                               bool solicited) noexcept {
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
  // Solicited: who sleeps at the peer is woken (device.h).
  if (solicited) last.send_flags |= IBV_SEND_SOLICITED;
  if (signal) last.send_flags |= IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  // The doorbell of a software device is write(2) (post_send_db() in rdma-core's
  // providers/rxe/rxe.c). We hold locks, in a function that must not be left.
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

void VerbsChannel::note_behind_locked(bool behind) noexcept {
  if (behind != behind_) device_->count_behind(behind ? 1 : -1);
  behind_ = behind;
}

/// Posts what there is. False: something is left that a completion has to push out. `more`: this
/// call will push again, so the receiver need not be woken yet.
bool VerbsChannel::push_locked(bool more) noexcept {
  const bool all = post_what_fits_locked(more);
  note_behind_locked(!all);
  return all;
}

bool VerbsChannel::post_what_fits_locked(bool more) noexcept {
  if (!connected_ || failure_.load(memory_order_relaxed) != nullptr) return true;
  push_credit_locked();
  for (;;) {
    // acquire pairs with the writer's publish: the bytes are in the ring.
    const uint64_t left = tx_.tail.load(memory_order_acquire) - posted_.load(memory_order_relaxed);
    if (left == 0) return credit_sent_ == credit_wanted_.load(memory_order_relaxed);
    if (used_ + slots_for(1) > pair_.data_slots || (signals_in_flight_ >= kEager && left < kBulk))
      return false;
    const uint64_t from = posted_.load(memory_order_relaxed);
    const uint64_t writes =
        std::min<uint64_t>(kChain, pair_.data_slots - used_ - (pair_.has_immediate ? 0 : 1));
    const uint64_t n = std::min({left, uint64_t{kLongestWrite}, writes * longest_write_,
                                 capacity() - (from & (capacity() - 1))});
    // The last of what there is: it tells that all is delivered, and what gathers meanwhile waits
    // for it.
    const bool signal = n == left || unsignalled_ + slots_for(n) + 1 > kSignalEvery;
    // Waking a sleeper costs more than a few pages take; a longer way behind would cost bandwidth.
    quiet_bytes_ += n;
    const bool solicited = (n == left && !more) || quiet_bytes_ >= kLongestQuiet;
    if (solicited) quiet_bytes_ = 0;
    if (!post_locked(from, static_cast<uint32_t>(n), static_cast<uint32_t>(n), signal, solicited))
      return true;
    posted_.store(from + n, memory_order_relaxed);
  }
}

void VerbsChannel::push_credit_locked() noexcept {
  const uint64_t wanted = credit_wanted_.load(memory_order_acquire);  // pairs with credit()
  if (wanted == credit_sent_ || used_ + slots_for(0) > pair_.data_slots + kCreditSlots) return;
  const uint32_t n = static_cast<uint32_t>(wanted - credit_sent_);
  const bool signal = unsignalled_ + 2 * slots_for(0) > kSignalEvery;
  if (post_locked(delivered_.load(memory_order_relaxed), 0, kCreditBit | n, signal, true))
    credit_sent_ = wanted;
}

/// True: all is posted. False: the keeper will hear of the completion that posts the rest, if no
/// thread does.
bool VerbsChannel::push(bool more) noexcept {
  {
    MutexLock lock(post_mutex_);
    if (push_locked(more)) return true;
  }
  (void)device_->progress();
  {
    MutexLock lock(post_mutex_);
    if (push_locked(more)) return true;
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
  (void)push_locked(false);
}

}  // namespace rsock::transport::verbs
