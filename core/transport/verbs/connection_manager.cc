#include "core/transport/verbs/connection_manager.h"

#include <fcntl.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "core/base/inside.h"
#include "core/os/os.h"
#include "core/os/owned_fd.h"
#include "core/transport/endpoint.h"
#include "core/transport/verbs/descriptors.h"
#include "core/transport/verbs/queue_pair.h"
#include "core/transport/verbs/rdma_library.h"

namespace rsock::transport::verbs {
namespace {

constexpr int kResolveMs = 2'000;
constexpr int kBacklog = 128;
constexpr uint8_t kForever = 7;  // RNR retries: a receiver that is slow is no error
// Of a packet, each after the acknowledge timeout. Not 7: rxe takes that for ever (rxe_comp.c,
// COMPST_ERROR_RETRY), and a dead link would never be noticed.
constexpr uint8_t kRetries = 6;
constexpr uint8_t kAckTimeout =
    16;  // 4.096 us << 16: 0.27 s; a lost path is known within some two seconds
constexpr uint8_t kReads = 1;  // RDMA READs in flight: none is needed, some devices refuse 0

/// errno where a foreign call returned -1.
Errno last_error() noexcept { return Errno{errno != 0 ? errno : EIO}; }

const RdmaLibrary& library() noexcept { return *RdmaLibrary::get(); }

void* context_of(uint64_t key) noexcept { return reinterpret_cast<void*>(key); }
uint64_t key_of(const rdma_cm_id* id) noexcept { return reinterpret_cast<uint64_t>(id->context); }

rdma_conn_param parameters(const ibv_qp* qp, std::span<const uint8_t> data) noexcept {
  rdma_conn_param p{};
  // Where the queue pair is the library's it takes its own word for both.
  p.qp_num = qp != nullptr ? qp->qp_num : 0;
  p.srq = 1;
  p.private_data = data.data();
  p.private_data_len = static_cast<uint8_t>(std::min<size_t>(data.size(), UINT8_MAX));
  p.responder_resources = kReads;
  p.initiator_depth = kReads;
  p.retry_count = kRetries;
  p.rnr_retry_count = kForever;
  return p;
}

class RealManager final : public ConnectionManager {
 public:
  explicit RealManager(rdma_event_channel* channel) noexcept : channel_(channel) {}
  ~RealManager() override {
    const InsideLibrary guard;
    library().rdma_destroy_event_channel(channel_);
  }

  int event_fd() const noexcept override { return channel_->fd; }
  bool next(CmEvent* event) noexcept override;
  Result<rdma_cm_id*> listen(uint16_t port, uint64_t key) noexcept override;
  uint16_t port_of(rdma_cm_id* listener) noexcept override {
    return ntohs(library().rdma_get_src_port(listener));
  }
  Result<rdma_cm_id*> resolve(const wire::Endpoint& from, const wire::Endpoint& to,
                              uint64_t key) noexcept override;
  Result<void> connect(rdma_cm_id* id, const ibv_qp* qp,
                       std::span<const uint8_t> data) noexcept override;
  Result<void> establish(rdma_cm_id* id, ibv_qp* qp) noexcept override;
  void adopt(rdma_cm_id* id, uint64_t key) noexcept override {
    id->context = context_of(key);
    set_ack_timeout(id);
  }
  Result<void> accept(rdma_cm_id* id, ibv_qp* qp, std::span<const uint8_t> data) noexcept override;
  void reject(rdma_cm_id* id, std::span<const uint8_t> data) noexcept override;
  void destroy(rdma_cm_id* id) noexcept override;
  ibv_context* new_context() noexcept override;
  bool is_removed(ibv_context* context) noexcept override;
  void close_context(ibv_context* context) noexcept override;
  void after_fork_child() noexcept override {
    abandon_fd(channel_->fd);
    for (const Known& k : contexts_) {
      abandon_fd(k.context->cmd_fd);
      abandon_fd(k.context->async_fd);
    }
  }

 private:
  Result<rdma_cm_id*> make_id(uint64_t key) noexcept;
  Result<void> bind_and_listen(rdma_cm_id* id, const sockaddr* address) noexcept;
  void set_ack_timeout(rdma_cm_id* id) noexcept;
  void read_event(const rdma_cm_event& from, CmEvent* to) noexcept;

  void note_context(const rdma_cm_id& id) noexcept;
  void drop_sentinel(const ibv_context* context) noexcept;
  /// The peer's kernel knows a caller by its queue pair's number: a second request with the same is
  /// stale to it, and even ends the connection that has it (ib_cm, cm_match_req). So a question has
  /// a number of its own, a real one.
  Result<void> make_number(rdma_cm_id* id) noexcept;

  rdma_event_channel* const channel_;
  /// librdmacm opens one per device and keeps it until it finds the device gone.
  struct Known {
    ibv_context* context;
    int fd;  // tells a new one at an old address
    bool told;
    rdma_cm_id* sentinel;  // bound to the device, so that its removal is heard of
  };
  std::vector<Known> contexts_;
  /// Ids that only ask, with the queue pair and queue that they need for it.
  struct Question {
    rdma_cm_id* id;
    ibv_cq* cq;
  };
  std::vector<Question> questions_;
};

void RealManager::set_ack_timeout(rdma_cm_id* id) noexcept {
  const InsideLibrary guard;
  uint8_t timeout = kAckTimeout;
  // Linux 5.1; an older kernel takes the subnet's value.
  (void)library().rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout,
                                  sizeof(timeout));
}

Result<rdma_cm_id*> RealManager::make_id(uint64_t key) noexcept {
  rdma_cm_id* id = nullptr;
  if (library().rdma_create_id(channel_, &id, context_of(key), RDMA_PS_TCP) != 0) {
    return fail(last_error());
  }
  return id;
}

Result<void> RealManager::bind_and_listen(rdma_cm_id* id, const sockaddr* address) noexcept {
  if (library().rdma_bind_addr(id, const_cast<sockaddr*>(address)) != 0) return fail(last_error());
  if (library().rdma_listen(id, kBacklog) != 0) return fail(last_error());
  return {};
}

Result<rdma_cm_id*> RealManager::listen(uint16_t port, uint64_t key) noexcept {
  const InsideLibrary guard;
  Errno why{EADDRNOTAVAIL};
  for (const int family : {AF_INET6, AF_INET}) {
    const auto id = make_id(key);
    if (!id) return id;
    sockaddr_storage any{};
    any.ss_family = static_cast<sa_family_t>(family);
    if (family == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&any)->sin6_port = htons(port);
      int only = 0;  // both families, whatever net.ipv6.bindv6only says
      (void)library().rdma_set_option(*id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &only,
                                      sizeof(only));
    } else {
      reinterpret_cast<sockaddr_in*>(&any)->sin_port = htons(port);
    }
    const auto done = bind_and_listen(*id, reinterpret_cast<sockaddr*>(&any));
    if (done) return *id;
    why = done.error();
    (void)library().rdma_destroy_id(*id);
    // Without IPv6 the first try fails in another way.
    if (why == EADDRINUSE || why == EACCES) break;
  }
  return fail(why);
}

Result<rdma_cm_id*> RealManager::resolve(const wire::Endpoint& from, const wire::Endpoint& to,
                                         uint64_t key) noexcept {
  const InsideLibrary guard;
  const auto id = make_id(key);
  if (!id) return id;
  sockaddr_storage source;
  sockaddr_storage target;
  (void)to_sockaddr(without_port(from), &source);
  (void)to_sockaddr(to, &target);
  set_ack_timeout(*id);
  if (library().rdma_resolve_addr(*id, reinterpret_cast<sockaddr*>(&source),
                                  reinterpret_cast<sockaddr*>(&target), kResolveMs) != 0) {
    const Errno why = last_error();
    (void)library().rdma_destroy_id(*id);
    return fail(why);
  }
  return id;
}

Result<void> RealManager::make_number(rdma_cm_id* id) noexcept {
  ibv_cq* cq = library().ibv_create_cq(id->verbs, 2, nullptr, nullptr, 0);
  if (cq == nullptr) return fail(last_error());
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = cq;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = wanted.cap.max_recv_wr = 1;
  wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
  if (library().rdma_create_qp(id, id->pd, &wanted) != 0) {
    const Errno why = last_error();
    (void)library().ibv_destroy_cq(cq);
    return fail(why);
  }
  questions_.push_back(Question{id, cq});
  return {};
}

Result<void> RealManager::connect(rdma_cm_id* id, const ibv_qp* qp,
                                  std::span<const uint8_t> data) noexcept {
  const InsideLibrary guard;
  if (qp == nullptr) {
    if (const auto made = make_number(id); !made) return made;
  }
  rdma_conn_param p = parameters(qp, data);
  if (library().rdma_connect(id, &p) != 0) return fail(last_error());
  return {};
}

Result<void> RealManager::establish(rdma_cm_id* id, ibv_qp* qp) noexcept {
  if (id->qp != nullptr) return {};  // the library's: it was done before the event
  const InsideLibrary guard;
  if (const auto ready = make_ready(id, qp); !ready) return ready;
  if (library().rdma_establish(id) != 0) return fail(last_error());
  return {};
}

Result<void> RealManager::accept(rdma_cm_id* id, ibv_qp* qp,
                                 std::span<const uint8_t> data) noexcept {
  const InsideLibrary guard;
  if (const auto ready = make_ready(id, qp); !ready) return ready;
  rdma_conn_param p = parameters(qp, data);
  if (library().rdma_accept(id, &p) != 0) return fail(last_error());
  return {};
}

void RealManager::reject(rdma_cm_id* id, std::span<const uint8_t> data) noexcept {
  const InsideLibrary guard;
  (void)library().rdma_reject(id, data.data(), static_cast<uint8_t>(data.size()));
  (void)library().rdma_destroy_id(id);
}

void RealManager::destroy(rdma_cm_id* id) noexcept {
  if (id == nullptr) return;
  const InsideLibrary guard;
  const auto question = std::find_if(questions_.begin(), questions_.end(),
                                     [=](const Question& q) { return q.id == id; });
  if (question != questions_.end()) library().rdma_destroy_qp(id);
  (void)library().rdma_destroy_id(id);
  if (question == questions_.end()) return;
  (void)library().ibv_destroy_cq(question->cq);
  questions_.erase(question);
}

void RealManager::read_event(const rdma_cm_event& from, CmEvent* to) noexcept {
  using Kind = CmEvent::Kind;
  to->status = from.status;
  to->key = key_of(from.listen_id != nullptr ? from.listen_id : from.id);
  switch (from.event) {
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      to->kind = Kind::kResolved;
      break;
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
      to->kind = Kind::kNoRoute;
      break;
    case RDMA_CM_EVENT_CONNECT_REQUEST:
      to->kind = Kind::kRequest;
      to->id = from.id;
      to->local = to_endpoint(&from.id->route.addr.src_addr).value_or(wire::Endpoint{});
      to->remote = to_endpoint(&from.id->route.addr.dst_addr).value_or(wire::Endpoint{});
      break;
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
      to->kind = Kind::kResponse;
      break;
    case RDMA_CM_EVENT_ESTABLISHED:
      to->kind = Kind::kEstablished;
      break;
    case RDMA_CM_EVENT_REJECTED:
      to->kind = Kind::kRejected;
      break;
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
      to->kind = Kind::kUnreachable;
      break;
    case RDMA_CM_EVENT_DISCONNECTED:
      to->kind = Kind::kDisconnected;
      break;
    case RDMA_CM_EVENT_TIMEWAIT_EXIT:
      to->kind = Kind::kTimeWaitExit;
      break;
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      to->kind = Kind::kDeviceRemoved;
      break;
    default:
      return;
  }
  const rdma_conn_param& c = from.param.conn;
  if ((to->kind == Kind::kRequest || to->kind == Kind::kResponse ||
       to->kind == Kind::kEstablished || to->kind == Kind::kRejected) &&
      c.private_data != nullptr) {
    to->size = std::min<size_t>(c.private_data_len, CmEvent::kMaxData);
    memcpy(to->data, c.private_data, to->size);
  }
}

/// Its descriptors go up; where no number is left they stay. Reads of events never wait.
void RealManager::note_context(const rdma_cm_id& id) noexcept {
  ibv_context* const context = id.verbs;
  if (context == nullptr) return;
  std::erase_if(contexts_,
                [=](const Known& k) { return k.context == context && k.fd != context->cmd_fd; });
  for (const Known& k : contexts_) {
    if (k.context == context) return;
  }
  for (int* field : {&context->cmd_fd, &context->async_fd}) {
    auto high = os::dup_internal(*field);
    if (high) (void)os::close(std::exchange(*field, high->release()));
  }
  (void)os::fcntl(context->async_fd, F_SETFL, O_NONBLOCK);
  sockaddr_storage here = id.route.addr.src_storage;
  if (here.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&here)->sin6_port = 0;
  } else {
    reinterpret_cast<sockaddr_in*>(&here)->sin_port = 0;
  }
  auto sentinel = make_id(reinterpret_cast<uint64_t>(context));
  if (sentinel && library().rdma_bind_addr(*sentinel, reinterpret_cast<sockaddr*>(&here)) != 0) {
    (void)library().rdma_destroy_id(*sentinel);
    *sentinel = nullptr;
  }
  contexts_.push_back(Known{context, context->cmd_fd, false, sentinel.value_or(nullptr)});
}

void RealManager::drop_sentinel(const ibv_context* context) noexcept {
  for (Known& k : contexts_) {
    if (k.context != context || k.sentinel == nullptr) continue;
    (void)library().rdma_destroy_id(std::exchange(k.sentinel, nullptr));
  }
}

ibv_context* RealManager::new_context() noexcept {
  for (Known& k : contexts_) {
    if (!std::exchange(k.told, true)) return k.context;
  }
  return nullptr;
}

bool RealManager::is_removed(ibv_context* context) noexcept {
  const InsideLibrary guard;
  ibv_async_event event{};
  while (library().ibv_get_async_event(context, &event) == 0) {
    const bool removed = event.event_type == IBV_EVENT_DEVICE_FATAL;
    library().ibv_ack_async_event(&event);
    if (removed) return true;  // every further read says the same
  }
  return false;
}

void RealManager::close_context(ibv_context* context) noexcept {
  // The library closes it when it sees a list of devices without it, and never looks at an empty
  // one (sync_devices_list() in librdmacm/cma.c). Its close of -1 does no harm.
  const InsideLibrary guard;
  drop_sentinel(context);
  abandon_fd(context->async_fd);
  abandon_fd(context->cmd_fd);
  std::erase_if(contexts_, [=](const Known& k) { return k.context == context; });
}

bool RealManager::next(CmEvent* event) noexcept {
  const InsideLibrary guard;
  rdma_cm_event* raw = nullptr;
  {
    const os::MakingInternal making;  // it may open a device
    if (library().rdma_get_cm_event(channel_, &raw) != 0) return false;
    note_context(*raw->id);
  }
  *event = CmEvent{};
  // The second step of resolve(): its outcome is what the caller waits for.
  if (raw->event == RDMA_CM_EVENT_ADDR_RESOLVED &&
      library().rdma_resolve_route(raw->id, kResolveMs) != 0) {
    event->kind = CmEvent::Kind::kNoRoute;
    event->key = key_of(raw->id);
    event->status = -value(last_error());
  } else {
    read_event(*raw, event);
  }
  const rdma_cm_id* const id = raw->id;
  (void)library().rdma_ack_cm_event(raw);
  for (const Known& k : contexts_) {
    if (k.sentinel != id || event->kind != CmEvent::Kind::kDeviceRemoved) continue;
    drop_sentinel(k.context);
    break;
  }
  return true;
}

}  // namespace

Result<std::unique_ptr<ConnectionManager>> ConnectionManager::open() noexcept {
  const RdmaLibrary* l = RdmaLibrary::get();
  if (l == nullptr) return fail(ENODEV);
  const InsideLibrary guard;
  rdma_event_channel* channel = nullptr;
  {
    const os::MakingInternal making;
    channel = l->rdma_create_event_channel();
    if (channel == nullptr) return fail(last_error());
    (void)raise_fd(channel->fd);
  }
  auto manager = std::make_unique<RealManager>(channel);
  if (channel->fd < 0) return fail(EMFILE);
  if (!os::fcntl(channel->fd, F_SETFL, O_NONBLOCK)) return fail(EIO);
  return manager;
}

}  // namespace rsock::transport::verbs
