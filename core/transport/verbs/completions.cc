// The engine of a device: completions become words of channels, and its own events their end.

#include <arpa/inet.h>

#include <algorithm>

#include "core/base/cancel_off.h"
#include "core/base/clock.h"
#include "core/base/fence.h"
#include "core/base/inside.h"
#include "core/base/log.h"
#include "core/base/thread_signals.h"
#include "core/transport/verbs/device.h"
#include "core/transport/verbs/rdma_library.h"
#include "core/transport/verbs/verbs_channel.h"

namespace rsock::transport::verbs {
namespace {

// Between two looks of the keeper while others poll; whoever stops polling arms, so it may be long.
constexpr uint64_t kFirstNapNs = 500'000;
constexpr uint64_t kLongestNapNs = 32'000'000;
// ... if somebody sleeps meanwhile, for whom those who poll may stop at any time.
constexpr uint64_t kLongestNapForOthersNs = 2'000'000;
// While there is traffic the keeper looks so often, beside the arrivals that wake it: for writes of
// ours that failed, which are no arrivals. Without any for so long it sleeps for good.
constexpr uint64_t kWatchNs = 20'000'000;
constexpr uint64_t kQuietNs = 1'000'000'000;

}  // namespace

void Device::dispatch_locked(const ibv_wc& wc) noexcept {
  VerbsChannel* const channel = find_locked(wc.qp_num);
  // Of a failed entry only status, number and queue pair are valid (ibv_poll_cq(3)); an arrival
  // that failed shows as the failure of the queue pair, on what we send or by a device event.
  if (wc.status != IBV_WC_SUCCESS) {
    // A send's number is never so small (post_locked()). An entry of the receive queue that was
    // taken in vain goes back: else each failure would leave fewer, and at last none.
    if (wc.wr_id < receives_count_) (void)post_receive_locked(wc.wr_id);
    if (channel != nullptr) channel->on_sent(wc);
    return;
  }
  if ((wc.opcode & IBV_WC_RECV) == 0) {
    if (channel != nullptr) channel->on_sent(wc);
    return;
  }
  uint32_t immediate = 0;
  if ((wc.wc_flags & IBV_WC_WITH_IMM) != 0) {
    immediate = ntohl(wc.imm_data);
  } else if (wc.byte_len == sizeof(uint32_t) && wc.wr_id < receives_count_) {
    immediate = static_cast<uint32_t>(receives_[wc.wr_id]);
  }
  if (wc.wr_id < receives_count_) (void)post_receive_locked(wc.wr_id);
  if (channel != nullptr) channel->on_arrival(immediate);
}

bool Device::poll_locked() noexcept {
  ibv_wc found[kPollBatch];
  const int n = ibv_poll_cq(cq_, kPollBatch, found);
  for (int i = 0; i < n; ++i) dispatch_locked(found[i]);
  return n > 0;
}

bool Device::progress() noexcept RSOCK_NO_TSA {
  if (!queue_mutex_.try_lock()) {
    // Who is at it may have looked just before what we look for came, and we are about to sleep.
    // seq_cst, here and below: either it finds the word after it let go, or we find it gone.
    look_again_.store(true, std::memory_order_seq_cst);
    full_fence();
    if (!queue_mutex_.try_lock()) return false;
  }
  bool found = false;
  do {
    if (look_again_.load(std::memory_order_relaxed))
      look_again_.store(false, std::memory_order_seq_cst);
    found = poll_locked() || found;
    queue_mutex_.unlock();
  } while (look_again_.load(std::memory_order_seq_cst) && queue_mutex_.try_lock());
  if (found) found_by_others_.fetch_add(1, std::memory_order_relaxed);
  return found;
}

void Device::arm(Armed wanted) noexcept {
  // seq_cst: whoever finds it armed relies on the keeper's poll after the event; whoever does not,
  // on its own call.
  Armed now = armed_.load(std::memory_order_seq_cst);
  if (now >= wanted) return;
  // A handler that did not come back in between would leave it said and not done, for ever.
  const HandlersHeld held;
  do {
    if (now >= wanted) return;
  } while (!armed_.compare_exchange_weak(now, wanted, std::memory_order_seq_cst));
  const CancelOff guard;  // as in post_locked()
  // The wider of two requests holds, in whatever order they come (ibv_req_notify_cq(3)).
  (void)ibv_req_notify_cq(cq_, wanted == Armed::kArrivals ? 1 : 0);
}

/// What is there, without end only while it comes faster than it is taken.
bool Device::poll() noexcept {
  MutexLock lock(queue_mutex_);
  bool any = false;
  for (int i = 0; i < 64 && poll_locked(); ++i) any = true;
  return any;
}

bool Device::take_event_and_poll() noexcept {
  const RdmaLibrary& lib = *RdmaLibrary::get();
  {
    // The lock first: it keeps handlers of the program out until the others are undone. One that
    // left by siglongjmp would also leave libibverbs' lock behind.
    MutexLock lock(queue_mutex_);
    const InsideLibrary guard;
    const CancelOff no_cancel;
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    // There is one for each time it was armed. A second look would be a system call in vain; if
    // there is another event after all, the descriptor stays readable.
    if (lib.ibv_get_cq_event(events_, &cq, &context) == 0) {
      lib.ibv_ack_cq_events(cq_, 1);
      armed_.store(Armed::kNo, std::memory_order_seq_cst);
    }
  }
  return poll();
}

void Device::serve_event() noexcept {
  if (take_event_and_poll()) found_by_others_.fetch_add(1, std::memory_order_relaxed);
  arm_for_others();
  (void)poll();
  // There is traffic again, and the keeper did not see the event.
  if (!watching_.load(std::memory_order_relaxed) && call_keeper_ != nullptr &&
      !keeper_called_.exchange(true, std::memory_order_acq_rel))
    call_keeper_();
}

uint64_t Device::on_event() noexcept {
  const uint64_t now = monotonic_ns();
  bool active = take_event_and_poll();
  // Others poll: as long as they do nobody needs events, and who goes to sleep among them arms.
  const uint64_t others = found_by_others_.load(std::memory_order_relaxed);
  if (others != found_seen_) {
    found_seen_ = others;
    active_ns_ = now;
    watching_.store(true, std::memory_order_seq_cst);
    nap_ns_ =
        std::clamp(2 * nap_ns_, kFirstNapNs, relied_on() ? kLongestNapForOthersNs : kLongestNapNs);
    return nap_ns_;
  }
  nap_ns_ = 0;
  active = active || in_flight();
  if (active) active_ns_ = now;
  if (now - active_ns_ < kQuietNs) {
    watching_.store(true, std::memory_order_seq_cst);
    arm_for_others();
    return poll() ? kFirstNapNs : kWatchNs;
  }
  // Whoever finds it false arms for all completions, also for those of its own writes.
  watching_.store(false, std::memory_order_seq_cst);
  arm(Armed::kAll);
  return poll() || in_flight() ? kFirstNapNs : 0;
}

bool Device::in_flight() noexcept {
  MutexLock lock(queue_mutex_);
  return std::any_of(channels_.begin(), channels_.end(),
                     [](const Entry& e) { return e.channel->in_flight(); });
}

void Device::on_async_event() noexcept {
  const RdmaLibrary& lib = *RdmaLibrary::get();
  const InsideLibrary guard;
  ibv_async_event event{};
  while (lib.ibv_get_async_event(context_, &event) == 0) {
    const ibv_event_type type = event.event_type;
    const char* reason = nullptr;
    uint32_t one = 0;
    switch (type) {
      case IBV_EVENT_DEVICE_FATAL:
        reason = "the RDMA device was removed";
        removed_.store(true, std::memory_order_release);
        break;
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_ACCESS_ERR:
      case IBV_EVENT_QP_REQ_ERR:
        reason = "the queue pair failed";
        one = event.element.qp->qp_num;
        break;
      case IBV_EVENT_CQ_ERR:
      case IBV_EVENT_SRQ_ERR:
        reason = "the completion queue failed";
        removed_.store(true, std::memory_order_release);
        break;
      case IBV_EVENT_PORT_ERR:
        reason = "the RDMA port is down";
        break;
      default:
        break;
    }
    lib.ibv_ack_async_event(&event);
    if (reason != nullptr) fail_channels(reason, one);
    if (type == IBV_EVENT_DEVICE_FATAL) break;  // every further read says the same
  }
}

void Device::fail_channels(const char* reason, uint32_t only) noexcept {
  RSOCK_LOG(kInfo, "%s: %s", context_->device->name, reason);
  MutexLock lock(queue_mutex_);
  for (const Entry& e : channels_) {
    if (only == 0 || e.qp_number == only) e.channel->fail_path(reason);
  }
}

void Device::on_removal() noexcept {
  if (!removed_.exchange(true, std::memory_order_acq_rel))
    fail_channels("the RDMA device was removed", 0);
}

}  // namespace rsock::transport::verbs
