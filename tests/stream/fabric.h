// A connection manager without a device: the network of a test, inside its process.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/stream/rdma_host.h"
#include "core/transport/verbs/connection_manager.h"
#include "core/transport/verbs/device.h"

namespace rsock::testing {

/// Connects callers to listeners of this process, by port. What a queue pair would be for ends in
/// kNoRoute.
class Fabric final : public transport::verbs::ConnectionManager {
 public:
  using CmEvent = transport::verbs::CmEvent;
  using Kind = CmEvent::Kind;
  struct Id {
    rdma_cm_id id{};
    uint64_t key = 0;
    wire::Endpoint from{};
    wire::Endpoint to{};
    Id* other = nullptr;  // of a request: the caller's
  };
  /// What a test changes or looks at.
  struct Shared {
    std::mutex mutex;
    std::map<uint16_t, uint64_t> listeners;  // key by port
    std::set<uint16_t> foreign;              // held by another process
    bool unreachable = false;
    bool silent = false;
    int resolved = 0;
    uint64_t resolved_key = 0;  // the last one's
    int alive = 0;  // ids
    std::deque<CmEvent> events;
    int fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC | EFD_SEMAPHORE);
    std::vector<std::string> rejections;
    int after_fork = 0;

    void push(const CmEvent& e) {
      events.push_back(e);
      const uint64_t one = 1;
      (void)!::write(fd, &one, sizeof(one));
    }
  };

  explicit Fabric(std::shared_ptr<Shared> shared) : s_(std::move(shared)) {}
  int event_fd() const noexcept override { return s_->fd; }
  bool next(CmEvent* event) noexcept override {
    const std::lock_guard lock(s_->mutex);
    uint64_t n;
    (void)!::read(s_->fd, &n, sizeof(n));
    if (s_->events.empty()) return false;
    *event = s_->events.front();
    s_->events.pop_front();
    return true;
  }
  Result<rdma_cm_id*> listen(uint16_t port, uint64_t key) noexcept override {
    const std::lock_guard lock(s_->mutex);
    if (s_->foreign.count(port) != 0 || s_->listeners.count(port) != 0) return fail(EADDRINUSE);
    if (port == 0) port = ++last_port_;
    s_->listeners[port] = key;
    Id* id = make(key);
    id->from.port = port;
    return &id->id;
  }
  uint16_t port_of(rdma_cm_id* listener) noexcept override { return of(listener)->from.port; }
  Result<rdma_cm_id*> resolve(const wire::Endpoint& from, const wire::Endpoint& to,
                              uint64_t key) noexcept override {
    const std::lock_guard lock(s_->mutex);
    ++s_->resolved;
    s_->resolved_key = key;
    Id* id = make(key);
    id->from = from;
    id->to = to;
    if (!s_->silent) {
      CmEvent e;
      e.kind = s_->unreachable || to.port > kOwnPorts ? Kind::kNoRoute : Kind::kResolved;
      e.status = -EHOSTUNREACH;
      if (to.port > kOwnPorts && s_->listeners.count(to.port) != 0) e.status = -ENODEV;
      e.key = key;
      push(e);
    }
    return &id->id;
  }
  Result<void> connect(rdma_cm_id* id, const ibv_qp*,
                       std::span<const uint8_t> data) noexcept override {
    const std::lock_guard lock(s_->mutex);
    Id* caller = of(id);
    CmEvent e;
    const auto at = s_->listeners.find(caller->to.port);
    if (at == s_->listeners.end()) {
      e.kind = Kind::kRejected;
      e.key = caller->key;
      e.status = transport::verbs::kRejectedNobodyThere;
    } else {
      Id* request = make(0);
      request->other = caller;
      e.kind = Kind::kRequest;
      e.key = at->second;
      e.id = &request->id;
      e.local = caller->to;
      e.remote = caller->from;
      e.size = data.size();
      std::copy(data.begin(), data.end(), e.data);
    }
    push(e);
    return {};
  }
  void adopt(rdma_cm_id* id, uint64_t key) noexcept override { of(id)->key = key; }
  Result<void> establish(rdma_cm_id*, ibv_qp*) noexcept override { return fail(ENOTSUP); }
  Result<void> accept(rdma_cm_id*, ibv_qp*, std::span<const uint8_t>) noexcept override {
    return fail(ENOTSUP);
  }
  void reject(rdma_cm_id* id, std::span<const uint8_t> data) noexcept override {
    const std::lock_guard lock(s_->mutex);
    s_->rejections.emplace_back(data.begin(), data.end());
    if (of(id)->other != nullptr) {
      CmEvent e;
      e.kind = Kind::kRejected;
      e.key = of(id)->other->key;
      e.status = transport::verbs::kRejectedByPeer;
      e.size = data.size();
      std::copy(data.begin(), data.end(), e.data);
      push(e);
    }
    --s_->alive;
  }
  void destroy(rdma_cm_id* id) noexcept override {
    if (id == nullptr) return;
    const std::lock_guard lock(s_->mutex);
    s_->listeners.erase(of(id)->from.port);
    --s_->alive;
  }
  ibv_context* new_context() noexcept override { return nullptr; }
  bool is_removed(ibv_context*) noexcept override { return false; }
  void close_context(ibv_context*) noexcept override {}
  void after_fork_child() noexcept override { ++s_->after_fork; }

  static constexpr uint16_t kOwnPorts = 60'999;  // above: queue pairs, which there are none of

 private:
  static Id* of(rdma_cm_id* id) { return reinterpret_cast<Id*>(id); }
  Id* make(uint64_t key) {
    ids_.push_back(std::make_unique<Id>());  // kept: a late event may name it
    ids_.back()->key = key;
    ++s_->alive;
    return ids_.back().get();
  }
  void push(const CmEvent& e) { s_->push(e); }
  const std::shared_ptr<Shared> s_;
  std::vector<std::unique_ptr<Id>> ids_;
  uint16_t last_port_ = kOwnPorts;
};

/// The host of the former test is left behind, as in a forked child.
inline void leave_host_behind() {
  // A child leaves them where they are; here they stay reachable, or they would be leaks.
  static auto* const left_behind = new std::vector<const void*>;
  left_behind->push_back(stream::rdma_host());
  left_behind->push_back(&transport::verbs::Device::all());
  stream::forget_rdma_in_child();
}

}  // namespace rsock::testing
