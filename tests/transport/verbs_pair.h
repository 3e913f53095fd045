// Both ends of a verbs channel in one process, connected by hand over a device's own port: for
// machines and lab guests that have one. Words go by a line that hands them over at once.
#pragma once

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "core/transport/verbs/device.h"
#include "core/transport/verbs/rdma_library.h"
#include "core/transport/verbs/verbs_channel.h"
#include "tests/transport/pairs.h"

namespace rsock::transport {

/// Gives each word to the other end's channel, in the caller's thread.
class DirectLine final : public WordLine {
 public:
  void say(uint64_t, wire::Word word, uint64_t value) noexcept override {
    if (peer) peer->on_word(word, value);
  }
  void attention(uint64_t) noexcept override {}
  verbs::VerbsChannel* peer = nullptr;
};

/// What the keeper is in a program: sleeps on the completion channel.
class TestKeeper {
 public:
  explicit TestKeeper(std::shared_ptr<verbs::Device> device)
      : device_(std::move(device)), thread_([this] { run(); }) {}
  ~TestKeeper() {
    quit_ = true;
    thread_.join();
  }
  /// How often an event woke it.
  uint64_t events() const { return events_; }

 private:
  void run() {
    const int epoll = epoll_create1(EPOLL_CLOEXEC);
    epoll_event wanted{};
    wanted.events = EPOLLIN | EPOLLEXCLUSIVE;  // behind the threads that wait themselves
    EXPECT_EQ(epoll_ctl(epoll, EPOLL_CTL_ADD, device_->event_fd(), &wanted), 0);
    uint64_t nap = 0;
    while (!quit_) {
      epoll_event found{};
      const int ms = nap != 0 ? static_cast<int>(nap / 1'000'000 + 1) : 10;
      if (epoll_wait(epoll, &found, 1, ms) > 0) ++events_;
      nap = device_->on_event();
    }
    close(epoll);
  }
  std::shared_ptr<verbs::Device> device_;
  std::atomic<bool> quit_{false};
  std::atomic<uint64_t> events_{0};
  std::thread thread_;
};

/// Of test_device(), made with it.
inline std::unique_ptr<TestKeeper>& test_keeper() {
  static std::unique_ptr<TestKeeper> keeper;
  return keeper;
}

/// The first device with an address, or null.
inline std::shared_ptr<verbs::Device> test_device() {
  const verbs::RdmaLibrary* lib = verbs::RdmaLibrary::load();
  if (lib == nullptr) return nullptr;
  static ibv_context* context = [lib]() -> ibv_context* {
    int count = 0;
    ibv_device** list = lib->ibv_get_device_list(&count);
    return list != nullptr && count > 0 ? lib->ibv_open_device(list[0]) : nullptr;
  }();
  if (context == nullptr) return nullptr;
  auto device = verbs::Device::open(context, 64);
  if (!device) return nullptr;
  if (!test_keeper()) test_keeper() = std::make_unique<TestKeeper>(*device);
  return *device;
}

/// Index 1 is the one with the IPv4 address on RoCE (rdma-lab.md); the first port.
inline bool connect_by_hand(verbs::Device& device, ibv_qp* qp, ibv_qp* peer) {
  const verbs::RdmaLibrary& lib = *verbs::RdmaLibrary::get();
  ibv_gid gid{};
  constexpr int kGid = 1;
  if (lib.ibv_query_gid(device.context(), 1, kGid, &gid) != 0) return false;
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_INIT;
  a.port_num = 1;
  a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  if (lib.ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) != 0)
    return false;
  a = {};
  a.qp_state = IBV_QPS_RTR;
  a.path_mtu = IBV_MTU_1024;
  a.dest_qp_num = peer->qp_num;
  a.max_dest_rd_atomic = 1;
  a.min_rnr_timer = 1;
  a.ah_attr.is_global = 1;
  a.ah_attr.grh.dgid = gid;
  a.ah_attr.grh.sgid_index = kGid;
  a.ah_attr.grh.hop_limit = 1;
  a.ah_attr.port_num = 1;
  if (lib.ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) !=
      0) {
    return false;
  }
  a = {};
  a.qp_state = IBV_QPS_RTS;
  a.timeout = 14;
  a.retry_cnt = 7;
  a.rnr_retry = 7;
  a.max_rd_atomic = 1;
  return lib.ibv_modify_qp(qp, &a,
                           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                               IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0;
}

inline verbs::RemoteRing ring_of(const verbs::QueuePair& p) {
  return {p.memory.rx_address(), p.memory.rx_key(), static_cast<uint32_t>(p.memory.ring_size())};
}

/// Both ends of a connection, with their lines.
struct VerbsEnds {
  std::shared_ptr<DirectLine> line_a = std::make_shared<DirectLine>();
  std::shared_ptr<DirectLine> line_b = std::make_shared<DirectLine>();
  std::shared_ptr<verbs::VerbsChannel> a;
  std::shared_ptr<verbs::VerbsChannel> b;

  /// The other end of a line hears of a channel that went; here it is simply not there any more.
  Pair join() {
    line_a->peer = b.get();
    line_b->peer = a.get();
    return {std::shared_ptr<Channel>(a.get(),
                                     [a = a, line_b = line_b](Channel*) mutable {
                                       a->let_go();
                                       line_b->peer = nullptr;
                                       a.reset();
                                     }),
            std::shared_ptr<Channel>(b.get(), [b = b, line_a = line_a](Channel*) mutable {
              b->let_go();
              line_a->peer = nullptr;
              b.reset();
            })};
  }
};

inline Pair make_verbs_pair_with(bool immediate) {
  auto device = test_device();
  if (!device) {
    ADD_FAILURE() << "no RDMA device";
    return {};
  }
  while (device->bury()) break;
  auto one = device->make_queue_pair(nullptr, kTestCapacity, 0, immediate);
  auto two = device->make_queue_pair(nullptr, kTestCapacity, 0, immediate);
  if (!one || !two) {
    ADD_FAILURE() << "no queue pair";
    return {};
  }
  // Both ends are on one device, where a soft one may send what between hosts it must not: this
  // way the suite sees either.
  if (!immediate && one->packets == verbs::Packets::kOneBetweenHosts)
    one->packets = two->packets = verbs::Packets::kOne;
  EXPECT_TRUE(connect_by_hand(*device, one->qp, two->qp) &&
              connect_by_hand(*device, two->qp, one->qp));
  const auto first = ring_of(*one);
  const auto second = ring_of(*two);
  VerbsEnds ends;
  ends.a = verbs::make_verbs_channel(device, std::move(*one), second, 1, ends.line_a);
  ends.b = verbs::make_verbs_channel(device, std::move(*two), first, 2, ends.line_b);
  Pair pair = ends.join();
  ends.a->connected();
  ends.b->connected();
  return pair;
}

inline Pair make_verbs_pair() { return make_verbs_pair_with(true); }
inline Pair make_verbs_pair_without_immediate() { return make_verbs_pair_with(false); }

}  // namespace rsock::transport
