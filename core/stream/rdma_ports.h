// The RDMA ports named after the TCP ports of our streams, at which callers of other hosts ask
// FIND.
//
// Purpose: the caller knows one thing of its peer's process: the address and port that it connected
// to. Whoever holds that port among the processes of the host answers for all of them: for its own
// streams at once, for others after a question (WHERE) on the abstract Unix name of the connection,
// whose holder must be the user who owns that TCP socket. Which process holds the port does not
// matter; those that do not try again now and then. Ownership: listeners go after a minute without
// a stream that waits. Thread safety: keeper only. Trust: who asks may be anybody; at most
// kMostAskers questions wait. Who holds a port that we wanted is looked at through the Unix name
// that goes with it: another user's process could lead callers to itself.
#pragma once

#include <memory>
#include <vector>

#include "core/os/owned_fd.h"
#include "core/stream/keeper_loop.h"
#include "core/transport/verbs/connection_manager.h"
#include "core/wire/cm_data.h"

namespace rsock::stream {

class RdmaPorts {
 public:
  static constexpr size_t kMostAskers = 64;

  enum class Held : uint8_t { kByUs, kByAnother, kByStranger, kNotAllowed };
  /// Holds this port, or knows who does. Asked for each stream that waits.
  Held hold(uint16_t port) noexcept;
  /// True: the event was for one of these listeners, and its id is taken.
  bool on_request(const transport::verbs::CmEvent& e) noexcept;
  uint64_t run_timers(uint64_t now) noexcept;
  /// Descriptors are closed, nothing is destroyed.
  void forget_in_child() noexcept;

 private:
  struct Port final : KeeperSource {
    void on_event(uint32_t events) noexcept override;  // somebody looks whose it is
    uint16_t port = 0;
    rdma_cm_id* listener = nullptr;
    uint64_t key = 0;
    os::OwnedFd name;
    uint64_t used = 0;
    uint64_t again_at = 0;  // not ours: the next try
    Held held = Held::kByAnother;
    int strange = 0;  // looks that found no one of us there
  };
  struct Asker final : KeeperSource {
    void on_event(uint32_t events) noexcept override;
    void answer(const wire::Found& found) noexcept;
    wire::Find find;
    rdma_cm_id* id = nullptr;  // null: answered
    os::OwnedFd fd;
    uint64_t due = 0;
    uint8_t inbox[64];
    size_t inbox_size = 0;
  };
  void take(Port& p) noexcept;
  bool is_one_of_us(const Port& p) noexcept;
  bool announce(Port& p) noexcept;
  void ask_owner(const wire::Find& find, rdma_cm_id* id) noexcept;

  std::vector<std::unique_ptr<Port>> ports_;
  std::vector<std::unique_ptr<Asker>> askers_;
};

}  // namespace rsock::stream
