#include "core/transport/verbs/device.h"

#include <arpa/inet.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>

#include "core/base/clock.h"
#include "core/base/inside.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/os/owned_fd.h"
#include "core/transport/verbs/descriptors.h"
#include "core/transport/verbs/rdma_library.h"
#include "core/transport/verbs/verbs_channel.h"

namespace rsock::transport::verbs {
namespace {

constexpr uint32_t kMostStreams = 256;  // by default; the device may allow fewer
constexpr uint64_t kParkNs = 5'000'000'000;
constexpr size_t kMostParked = 16;
/// rxe, the soft RoCE device (RXE_VENDOR_ID in drivers/infiniband/sw/rxe/rxe_param.h). When it
/// repeats a message of several packets from the middle, it may place the bytes a few packets off
/// and complete, or end with "remote invalid request": seen with Linux 6.1 within seconds at 0.3 %
/// loss. Messages of one packet are never repeated from the middle. Between two queue pairs of one
/// device the packets pass by the network stack (RXE_LOOPBACK_MASK, rxe_net.c): none is dropped.
constexpr uint32_t kSoftRoce = 0xffffff;

/// A pointer, so that a forked child can leave the parent's list where it is.
constinit std::vector<std::shared_ptr<Device>>* g_devices = nullptr;

std::vector<std::shared_ptr<Device>>& devices() noexcept {
  if (g_devices == nullptr) g_devices = new std::vector<std::shared_ptr<Device>>;
  return *g_devices;
}

int numa_node_of(ibv_context* context) noexcept {
  char path[IBV_SYSFS_PATH_MAX + 32];
  const int n = snprintf(path, sizeof(path), "%s/device/numa_node", context->device->ibdev_path);
  if (n < 0 || static_cast<size_t>(n) >= sizeof(path)) return -1;
  auto fd = os::make_internal([&] { return os::open(path, O_RDONLY | O_CLOEXEC, 0); });
  if (!fd) return -1;
  char text[16] = {};
  const auto got = os::read(fd->get(), text, sizeof(text) - 1);
  return got && *got != 0 ? atoi(text) : -1;
}

}  // namespace

const std::vector<std::shared_ptr<Device>>& Device::all() noexcept { return devices(); }

Device::Device(ibv_context* context) noexcept : context_(context), owner_(os::getpid()) {}

bool Device::is_ours() const noexcept { return os::getpid() == owner_; }

Result<std::shared_ptr<Device>> Device::open(ibv_context* context, uint32_t max_streams) noexcept {
  (void)drop_removed();
  for (const auto& d : devices()) {
    if (d->context_ == context && !d->removed()) return d;
  }
  const InsideLibrary guard;
  std::shared_ptr<Device> device(new (std::nothrow) Device(context));
  if (!device) return fail(ENOMEM);
  errno = 0;
  if (!device->set_up(max_streams)) return fail(errno != 0 ? errno : ENOMEM);
  devices().push_back(device);
  return device;
}

bool Device::set_up(uint32_t max_streams) noexcept {
  const RdmaLibrary& lib = *RdmaLibrary::get();
  ibv_device_attr limits{};
  if (lib.ibv_query_device(context_, &limits) != 0) return false;
  if (limits.vendor_id == kSoftRoce) packets_ = Packets::kOneBetweenHosts;
  const uint32_t wanted_streams = max_streams != 0 ? max_streams : kMostStreams;
  const uint32_t most_entries = static_cast<uint32_t>(std::max(limits.max_cqe, 0));
  receives_count_ =
      std::min<uint32_t>(kReceives, static_cast<uint32_t>(std::max(limits.max_srq_wr, 0)));
  data_slots_ = kDataSlots;
  if (packets_ != Packets::kMany && most_entries > receives_count_) {
    // rxe's completion queue has 32767 places: long send queues would leave room for half the
    // streams.
    const uint32_t each = (most_entries - receives_count_) / wanted_streams;
    data_slots_ = std::clamp(each, kDataSlots + kCreditSlots, kDataSlotsOfPackets + kCreditSlots) -
                  kCreditSlots;
  }
  const uint32_t slots = data_slots_ + kCreditSlots;
  if (receives_count_ < 64 || most_entries < receives_count_ + slots) {
    errno = ENOMEM;
    return false;
  }
  max_streams_ = std::min({wanted_streams, static_cast<uint32_t>(limits.max_qp) / 2 + 1,
                           (most_entries - receives_count_) / slots});
  if (is_iwarp()) {
    max_streams_ = std::min(max_streams_, streams_for_receives(receives_count_, data_slots_));
    RSOCK_LOG(kInfo, "iWARP: the shared receive queue has room for %u streams", max_streams_);
    if (max_streams_ == 0) {
      errno = ENOSPC;
      return false;
    }
  }
  numa_node_ = numa_node_of(context_);
  pd_ = lib.ibv_alloc_pd(context_);
  if (pd_ == nullptr) return false;
  common_ = std::make_shared<Domain>(pd_, owner_);
  {
    const os::MakingInternal making;
    events_ = lib.ibv_create_comp_channel(context_);
    if (events_ == nullptr) return false;
    if (!raise_fd(events_->fd)) return false;
  }
  (void)os::fcntl(events_->fd, F_SETFL, O_NONBLOCK);
  wait_.set_up(events_->fd);
  queue_length_ = receives_count_ + max_streams_ * slots;
  cq_ = lib.ibv_create_cq(context_, static_cast<int>(queue_length_), nullptr, events_, 0);
  if (cq_ == nullptr) return false;
  ibv_srq_init_attr wanted{};
  wanted.attr.max_wr = receives_count_;
  wanted.attr.max_sge = 1;
  srq_ = lib.ibv_create_srq(pd_, &wanted);
  if (srq_ == nullptr) return false;
  constexpr size_t kPage = 64 * 1024;  // the largest there is
  const size_t size = (receives_count_ * sizeof(uint64_t) + kPage - 1) / kPage * kPage;
  receives_.reset(static_cast<uint64_t*>(std::aligned_alloc(kPage, size)));
  if (!receives_) return false;
  std::fill_n(receives_.get(), receives_count_, 0);
  receive_mr_ =
      lib.reg_mr(pd_, receives_.get(), receives_count_ * sizeof(uint64_t), IBV_ACCESS_LOCAL_WRITE);
  if (receive_mr_ == nullptr) return false;
  MutexLock lock(queue_mutex_);
  for (uint32_t i = 0; i < receives_count_; ++i) {
    if (!post_receive_locked(i)) return false;
  }
  return true;
}

Device::~Device() {
  if (!is_ours()) {  // a forked child's copy of the pointer
    (void)receives_.release();
    for (Parked& p : parked_) p.memory.abandon();
    spares_.abandon();
    return;
  }
  const InsideLibrary guard;
  const RdmaLibrary& lib = *RdmaLibrary::get();
  spares_.drop_all();
  for (Parked& p : parked_) p.memory = RingMemory();
  if (srq_ != nullptr) (void)lib.ibv_destroy_srq(srq_);
  if (receive_mr_ != nullptr) (void)lib.ibv_dereg_mr(receive_mr_);
  if (cq_ != nullptr) (void)lib.ibv_destroy_cq(cq_);
  if (events_ != nullptr) {
    (void)lib.ibv_destroy_comp_channel(events_);
  }
  common_.reset();
  if (removed()) {
    // The kernel waits for us with the removal. librdmacm keeps the context open until it sees a
    // list of devices without it, and never looks at an empty one (sync_devices_list() in
    // librdmacm/cma.c); closing -1 later does no harm.
    abandon_fd(context_->async_fd);
    abandon_fd(context_->cmd_fd);
  }
}

bool Device::drop_removed() noexcept {
  std::erase_if(devices(), [](const std::shared_ptr<Device>& d) {
    return d->removed() && d.use_count() == 1;
  });
  return std::any_of(devices().begin(), devices().end(),
                     [](const auto& d) { return d->removed(); });
}

bool Device::post_receive_locked(uint64_t slot) noexcept {
  ibv_sge piece{};
  piece.addr = reinterpret_cast<uint64_t>(&receives_[slot]);
  piece.length = sizeof(uint64_t);
  piece.lkey = receive_mr_->lkey;
  ibv_recv_wr receive{};
  receive.wr_id = slot;
  receive.sg_list = &piece;
  receive.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  return ibv_post_srq_recv(srq_, &receive, &bad) == 0;
}

// --- queue pairs -------------------------------------------------------------------------------

std::shared_ptr<Domain> Device::domain_of(uint64_t partner) noexcept {
  std::erase_if(domains_, [](const Known& k) { return k.domain.expired(); });
  for (const Known& k : domains_) {
    if (k.partner == partner) return k.domain.lock();
  }
  ibv_pd* const pd = RdmaLibrary::get()->ibv_alloc_pd(context_);
  if (pd == nullptr) return nullptr;
  auto domain = std::make_shared<Domain>(pd, owner_);
  domains_.push_back(Known{partner, domain});
  return domain;
}

Result<void> Device::find_memory(QueuePair* pair, size_t ring_size) noexcept {
  for (auto p = parked_.begin(); p != parked_.end(); ++p) {
    if (p->partner != pair->partner || p->memory.ring_size() != ring_size) continue;
    pair->memory = std::move(p->memory);
    parked_.erase(p);
    return {};
  }
  // rxe looks for the buffers of the shared receive queue in the queue pair's domain, and a SEND
  // has to find them.
  auto domain = pair->has_immediate ? domain_of(pair->partner) : common_;
  if (!domain) return fail(ENOMEM);
  auto memory = RingMemory::make(std::move(domain), ring_size, numa_node_);
  if (!memory) return fail(memory.error());
  pair->memory = std::move(*memory);
  return {};
}

bool Device::create(QueuePair* pair) noexcept {
  const RdmaLibrary& lib = *RdmaLibrary::get();
  for (const uint32_t inline_bytes : {kWantedInline, 64u, 0u}) {
    ibv_qp_init_attr wanted{};
    wanted.send_cq = wanted.recv_cq = cq_;
    wanted.srq = srq_;
    wanted.qp_type = IBV_QPT_RC;
    wanted.cap.max_send_wr = data_slots_ + kCreditSlots;
    wanted.cap.max_send_sge = 1;
    wanted.cap.max_inline_data = inline_bytes;
    if (is_iwarp() && pair->id != nullptr) {
      if (lib.rdma_create_qp(pair->id, pair->memory.pd(), &wanted) == 0) pair->qp = pair->id->qp;
    } else {
      pair->qp = lib.ibv_create_qp(pair->memory.pd(), &wanted);
    }
    if (pair->qp == nullptr) continue;
    pair->inline_bytes = wanted.cap.max_inline_data;
    return true;
  }
  return false;
}

Result<QueuePair> Device::make_queue_pair(rdma_cm_id* id, size_t ring_size, uint64_t partner,
                                          bool immediate) noexcept {
  if (removed()) return fail(ENODEV);
  if (pairs_ >= max_streams_) return fail(EUSERS);
  const InsideLibrary guard;
  QueuePair pair;
  pair.id = id;
  pair.partner = partner;
  pair.packets = packets_;
  pair.data_slots = data_slots_;
  pair.has_immediate = immediate && !is_iwarp();
  if (const auto found = find_memory(&pair, ring_size); !found) return fail(found.error());
  pair.qp = spares_.take(pair.memory.domain().get(), partner, id, &pair.inline_bytes);
  const bool reused = pair.qp != nullptr;
  if (!reused && !create(&pair)) {
    const int why = errno != 0 ? errno : ENOMEM;
    if (spares_.empty()) return fail(why);
    spares_.drop_all();  // those of other partners: the device may have no more
    if (!create(&pair)) return fail(why);
  }
  count_queue_pair(reused);
  ++pairs_;
  // Without immediates the count travels inline; a device without inline can't be used that way.
  if (!pair.has_immediate && pair.inline_bytes < sizeof(uint32_t)) {
    retire(std::move(pair));
    return fail(EOPNOTSUPP);
  }
  return pair;
}

void Device::destroy(QueuePair& pair) noexcept {
  const RdmaLibrary& lib = *RdmaLibrary::get();
  if (pair.id != nullptr && pair.id->qp != nullptr) {
    lib.rdma_destroy_qp(pair.id);
  } else {
    (void)lib.ibv_destroy_qp(pair.qp);
  }
  pair.qp = nullptr;
}

void Device::retire(QueuePair&& pair) noexcept {
  if (pair.qp == nullptr) return;
  MutexLock lock(retired_mutex_);
  retired_.push_back(std::move(pair));
}

/// Of what was in it when this began: a look takes a batch, or all there is. More comes meanwhile,
/// of others, perhaps without end.
void Device::empty_queue_locked() noexcept {
  for (uint32_t i = 0; i <= queue_length_ / kPollBatch && poll_locked(); ++i) {
  }
}

bool Device::bury() noexcept {
  const InsideLibrary guard;
  const RdmaLibrary& lib = *RdmaLibrary::get();
  const uint64_t now = monotonic_ns();
  for (;;) {
    QueuePair pair;
    {
      MutexLock lock(retired_mutex_);
      if (retired_.empty()) break;
      pair = std::move(retired_.back());
      retired_.pop_back();
    }
    {
      // Under the queue's lock, and the queue emptied behind it: a number that is used again must
      // not meet completions of the stream before.
      MutexLock lock(queue_mutex_);
      // Emptied before as well: some providers throw away what the queue has of a queue pair that
      // is reset or goes (mlx5_cq_clean()), and with it entries of the receive queue, which nobody
      // would post again. In the error state none are added.
      (void)move_to(pair.qp, IBV_QPS_ERR);
      empty_queue_locked();
      // Either waits until the device has let go of our memory, which the next stream may take.
      const bool keep = !is_iwarp() && !removed() && move_to(pair.qp, IBV_QPS_RESET);
      if (!keep) destroy(pair);
      empty_queue_locked();
    }
    if (pair.qp != nullptr && !spares_.put(pair, now)) destroy(pair);
    if (pair.id != nullptr) {
      // The kernel says goodbye to the peer as well, if it was connected.
      (void)lib.rdma_disconnect(pair.id);
      (void)lib.rdma_destroy_id(pair.id);
    }
    --pairs_;
    if (!removed() && parked_.size() < kMostParked && pair.partner != 0) {
      parked_.push_back(Parked{std::move(pair.memory), pair.partner, now + kParkNs});
    }
  }
  std::erase_if(parked_, [&](const Parked& p) { return p.until <= now || removed(); });
  removed() ? spares_.drop_all() : spares_.drop_expired(now);
  return !parked_.empty() || !spares_.empty();
}

void Device::add(VerbsChannel& channel, uint32_t qp_number) noexcept {
  MutexLock lock(queue_mutex_);
  const auto at = std::lower_bound(channels_.begin(), channels_.end(), qp_number,
                                   [](const Entry& e, uint32_t n) { return e.qp_number < n; });
  channels_.insert(at, Entry{qp_number, &channel});
}

void Device::remove(VerbsChannel& channel, uint32_t) noexcept {
  MutexLock lock(queue_mutex_);
  std::erase_if(channels_, [&](const Entry& e) { return e.channel == &channel; });
}

VerbsChannel* Device::find_locked(uint32_t qp_number) noexcept {
  const auto at = std::lower_bound(channels_.begin(), channels_.end(), qp_number,
                                   [](const Entry& e, uint32_t n) { return e.qp_number < n; });
  return at != channels_.end() && at->qp_number == qp_number ? at->channel : nullptr;
}

void Device::after_fork_child() noexcept {
  if (g_devices == nullptr) return;
  for (const auto& d : *g_devices) {
    // Else the queue pairs would live as long as this process.
    abandon_fd(d->events_->fd);
    d->wait_.abandon();
    abandon_fd(d->context_->async_fd);
    abandon_fd(d->context_->cmd_fd);
  }
  forget_queue_pair_counts();
  g_devices = nullptr;  // not freed: malloc may be locked for ever
}

}  // namespace rsock::transport::verbs
