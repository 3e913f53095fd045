// The RDMA connection manager as the keeper uses it: requests go out, events come back, nothing
// waits.
//
// Purpose: a thin layer over librdmacm that owns the event channel, knows what each event means,
// copies what it carries and acknowledges it at once (rdma_destroy_id() waits for
// acknowledgements). An interface, so that tests play the fabric. Ownership: an id belongs to
// whoever has its pointer: destroy() it, or give it to a QueuePair, whose device destroys it. Each
// id has a key, a number of the caller's; events carry it, so a late one names nothing rather than
// freed memory. Thread safety: keeper only; calls hold an InsideLibrary. Errors: errno of the
// library. Trust: private data of a peer is handed on as it came; wire/cm_data.h judges it.
#pragma once

#include <rdma/rdma_cma.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/base/result.h"
#include "core/wire/four_tuple.h"

namespace rsock::transport::verbs {

struct CmEvent {
  enum class Kind : uint8_t {
    kNone,           // nothing that anybody needs to know
    kResolved,       // address and route: connect() may follow
    kNoRoute,        // no RDMA device leads there; status says more
    kRequest,        // on a listener (key): `id` is the caller's, and now the receiver's
    kResponse,       // the peer accepted; data: its reply's. establish() must follow
    kEstablished,    // at the end that accepted; on iWARP at both, with data of the reply
    kRejected,       // data: the peer's, if `status` says that a consumer rejected
    kUnreachable,    // no answer, or the connection manager gave up
    kDisconnected,   // the peer left, or its path
    kTimeWaitExit,   // a connection is over, at the peer and in the network too
    kDeviceRemoved,  // the id must be destroyed soon
  };
  static constexpr size_t kMaxData = 256;

  Kind kind = Kind::kNone;
  uint64_t key = 0;
  int status = 0;  // -errno, or the reason of a rejection (ib_cm.h, enum ib_cm_rej_reason)
  rdma_cm_id* id = nullptr;
  wire::Endpoint local;   // kRequest
  wire::Endpoint remote;  // kRequest
  size_t size = 0;
  uint8_t data[kMaxData];

  std::span<const uint8_t> private_data() const noexcept { return {data, size}; }
};

/// Nobody listens at that port (IB_CM_REJ_INVALID_SERVICE_ID).
inline constexpr int kRejectedNobodyThere = 8;
/// The kernel there knows a connection from the same queue pair number (cm_match_req() in
/// drivers/infiniband/core/cm.c): it has not yet heard that the one before is over.
inline constexpr int kRejectedStale = 10;
/// A program said no (IB_CM_REJ_CONSUMER_DEFINED).
inline constexpr int kRejectedByPeer = 28;

class ConnectionManager {
 public:
  virtual ~ConnectionManager() = default;

  /// Readable when there is an event. -1: a fake's.
  virtual int event_fd() const noexcept = 0;
  /// Takes one event off the channel. False: no more.
  virtual bool next(CmEvent* event) noexcept = 0;

  /// Listens on all addresses of both families. port 0: any; port_of() tells. EADDRINUSE: another
  /// process has it.
  virtual Result<rdma_cm_id*> listen(uint16_t port, uint64_t key) noexcept = 0;
  virtual uint16_t port_of(rdma_cm_id* listener) noexcept = 0;
  /// Looks for the way: kResolved, kNoRoute. `from` without a port.
  virtual Result<rdma_cm_id*> resolve(const wire::Endpoint& from, const wire::Endpoint& to,
                                      uint64_t key) noexcept = 0;
  /// For `qp`, which has a shared receive queue. Null: only to ask, and the answer is a rejection;
  /// such an id is to be ended by destroy().
  virtual Result<void> connect(rdma_cm_id* id, const ibv_qp* qp,
                               std::span<const uint8_t> data) noexcept = 0;
  /// After kResponse: `qp` can send and receive, and the peer hears of it (kEstablished).
  virtual Result<void> establish(rdma_cm_id* id, ibv_qp* qp) noexcept = 0;
  /// Before a queue pair is made on it: names the id of a kRequest.
  virtual void adopt(rdma_cm_id* id, uint64_t key) noexcept = 0;
  /// `qp` can receive, and send once kEstablished has come.
  virtual Result<void> accept(rdma_cm_id* id, ibv_qp* qp,
                              std::span<const uint8_t> data) noexcept = 0;
  /// Rejects and destroys.
  virtual void reject(rdma_cm_id* id, std::span<const uint8_t> data) noexcept = 0;
  virtual void destroy(rdma_cm_id* id) noexcept = 0;
  /// A device that the library opened since the last call, or null. It stays open for the life of
  /// the process; its async_fd (high, non-blocking) tells of its removal, which the kernel may make
  /// wait for close_context().
  virtual ibv_context* new_context() noexcept = 0;
  /// Reads events of a device that nobody else reads. True: it is removed.
  virtual bool is_removed(ibv_context* context) noexcept = 0;
  virtual void close_context(ibv_context* context) noexcept = 0;
  /// In a forked child: closes the descriptors, destroys nothing.
  virtual void after_fork_child() noexcept = 0;

  /// The real one; RdmaLibrary::load() was called. No lock of ours is held: it opens providers and
  /// devices. Errors: ENODEV, what the library said.
  static Result<std::unique_ptr<ConnectionManager>> open() noexcept;
};

}  // namespace rsock::transport::verbs
