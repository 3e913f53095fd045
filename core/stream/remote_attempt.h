// One stream that looks for its peer on another host: shared by remote_*.cc, rdma_host.cc and
// rdma_ports.cc only. Keeper thread only.
//
// Who called connect() is the caller: its peer's address is where RDMA is asked. PROTOCOL.md,
// "Across hosts".
//
//   caller: [kLibrary] kFind --FOUND--> kLine --open--> kOffer --OFFER--> kRoute --> kJoin
//   --established--> lifted
//           (a known keeper: begins at kOffer)            kRetry: from the start, with back-off
//   callee: [kLibrary] kListen --WANT, our OFFER--> kWanted --JOIN, accepted--> kAccepted
//   --established--> lifted
//
// The life of an attempt is in remote_attempt.cc. Ownership: the list in RdmaHost. `id` is ours
// until a queue pair has it; `pair` until a channel has it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "core/os/owned_fd.h"
#include "core/stream/attempt.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/line.h"
#include "core/transport/verbs/connection_manager.h"
#include "core/transport/verbs/verbs_channel.h"
#include "core/wire/cm_data.h"

namespace rsock::stream {

namespace verbs = transport::verbs;

inline constexpr uint64_t kRemoteNs = 3'000 * kMs;  // one answer over the network
inline constexpr uint32_t kMostRemoteTries = 25;    // about 8 s in all

enum class RemotePhase : uint8_t {
  kLibrary,
  kRetry,
  kFind,
  kLine,
  kOffer,
  kRoute,
  kJoin,
  kListen,
  kWanted,
  kAccepted,
};

struct RemoteAttempt final : Seeker, KeeperSource {
  /// The callee's Unix listener, or who asks WHERE on it.
  void on_event(uint32_t events) noexcept override;

  RemotePhase phase = RemotePhase::kLibrary;
  bool caller = false;
  bool asked_known = false;  // caller: the keeper of before was asked, it does not hold this one
  bool not_mine = false;     // caller: the peer said once that it has no such connection
  uint32_t ring_size = 0;
  uint32_t ring_most = UINT32_MAX;  // caller: the peer had no memory for more
  uint64_t key = 0;                 // names `id`, later the channel's, in events
  rdma_cm_id* id = nullptr;
  uint64_t find_nonce = 0;
  uint64_t nonce = 0;        // the channel's
  uint64_t peer_keeper = 0;  // who the line must lead to
  std::shared_ptr<Line> line;
  std::shared_ptr<verbs::Device> device;
  verbs::QueuePair pair;
  std::shared_ptr<verbs::VerbsChannel> channel;
  // Words that came before the channel was there.
  static constexpr size_t kEarly = 16;
  std::array<wire::WordMessage, kEarly> early;
  size_t early_count = 0;
  os::OwnedFd listener;  // callee: WHERE comes here
  os::OwnedFd asker;
  uint8_t inbox[64];
  size_t inbox_size = 0;
};

// --- remote_attempt.cc ---
/// Takes over what examine() found.
void start_remote_attempt(const Seeker& found) noexcept;
/// There is a device now; or, for a reason, none.
void begin_remote(RemoteAttempt& a) noexcept;
/// From the start after a while, or not for long.
void try_again(RemoteAttempt& a, Reason reason) noexcept;
/// Nobody asks at this address and port for a while.
void not_there(RemoteAttempt& a, Reason reason) noexcept;
void set_phase(RemoteAttempt& a, RemotePhase phase, uint64_t wait_ns) noexcept;
/// Lets go of everything that the attempt holds at the peer and the device; not of what it listens
/// on.
void drop_remote(RemoteAttempt& a) noexcept;
void on_remote_due(RemoteAttempt& a) noexcept;
void on_remote_event(RemoteAttempt& a, const verbs::CmEvent& e) noexcept;
/// `id`'s device, a queue pair on it. A reason if that can't be. *later: it may be otherwise soon.
Reason make_pair(RemoteAttempt& a, bool* later) noexcept;
wire::Join own_join(const RemoteAttempt& a) noexcept;
/// With the peer's JOIN. False: it is not what was agreed on.
bool check_join(const RemoteAttempt& a, const wire::Join& join) noexcept;
/// One of the two ends has no queue pair left: the stream waits for one on TCP (heat.h).
void no_room(RemoteAttempt& a) noexcept;
inline constexpr char kNoRoom[] = "too many streams on queue pairs";
/// pair becomes channel. False: no descriptor left.
bool make_channel(RemoteAttempt& a, const wire::Join& theirs) noexcept;
/// The channel goes under the stream.
void lift_remote(RemoteAttempt& a) noexcept;
/// The same host: the line's other end must be the user who has the other end of the stream.
bool line_may_speak(const RemoteAttempt& a, const Line& line) noexcept;

// --- remote_caller.cc ---
void call_remote(RemoteAttempt& a) noexcept;
void on_caller_event(RemoteAttempt& a, const verbs::CmEvent& e) noexcept;
void on_line_open(RemoteAttempt& a) noexcept;
void on_line_down(RemoteAttempt& a, Reason reason) noexcept;
void on_offer(RemoteAttempt& a, const wire::Offer& offer) noexcept;

// --- remote_callee.cc ---
void await_remote(RemoteAttempt& a) noexcept;
/// For another caller, or the same once more. `reason` is why the stream is not lifted until then.
void back_to_waiting(RemoteAttempt& a, Reason reason) noexcept;
/// Some line wants a channel: one of our streams, or nobody.
void answer_want(Line& line, const wire::Want& want) noexcept;
/// A queue pair comes: the event's id is ours.
void answer_join(const verbs::CmEvent& e) noexcept;
void on_callee_event(RemoteAttempt& a, const verbs::CmEvent& e) noexcept;

}  // namespace rsock::stream
