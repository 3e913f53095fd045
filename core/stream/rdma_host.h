// What the keeper has for other hosts: the connection manager, devices, lines, attempts and their
// channels.
//
// Life: made with the first stream whose peer is to be reached over RDMA; never destroyed. A forked
// child leaves its parent's behind, with the descriptors closed, and makes its own. Thread safety:
// keeper only, under KeeperInside::mutex, unless stated. The library: opening rdma-core's libraries
// takes the loader's lock, which a thread may hold whose constructor forks; a fork takes the
// keeper's mutex. So the keeper does that without its mutex, between two rounds (look_for_rdma()),
// and the fork waits for it a second at most.
#pragma once

#include <memory>
#include <vector>

#include "core/stream/line_table.h"
#include "core/stream/rdma_ports.h"
#include "core/stream/reach.h"
#include "core/stream/remote_attempt.h"

namespace rsock::stream {

/// A channel, to find it when something comes for it: words by (line, nonce), events by key.
struct Rider {
  std::shared_ptr<Line> line;
  uint64_t nonce;
  uint64_t key;
  std::weak_ptr<verbs::VerbsChannel> channel;
  std::shared_ptr<verbs::Device> device;
  Stream* stream;
  uint32_t generation;
};

/// The completions of a device, in the keeper's epoll.
struct WatchedDevice final : KeeperSource {
  explicit WatchedDevice(std::shared_ptr<verbs::Device> d) noexcept : device(std::move(d)) {}
  void on_event(uint32_t events) noexcept override;
  const std::shared_ptr<verbs::Device> device;
  uint64_t nap_until = UINT64_MAX;
  bool watched = true;
};

/// A device that rdma-core opened, for whatever: its events, in the keeper's epoll.
struct WatchedContext final : KeeperSource {
  explicit WatchedContext(ibv_context* c) noexcept : context(c) {}
  void on_event(uint32_t events) noexcept override;
  void on_removed() noexcept;
  ibv_context* const context;
  bool removed = false;
};

struct RdmaHost final : LineOwner, KeeperSource {
  RdmaHost(std::span<const uint8_t> shared_key, uint64_t own) noexcept
      : key(shared_key), lines(*this, shared_key, own) {}

  // --- LineOwner ---
  void on_open(Line& line) noexcept override;
  void on_down(Line& line, Reason reason) noexcept override;
  void on_want(Line& line, const wire::Want& want) noexcept override;
  void on_offer(Line& line, const wire::Offer& offer) noexcept override;
  void on_word(Line& line, const wire::WordMessage& word) noexcept override;
  /// The connection manager's channel.
  void on_event(uint32_t events) noexcept override;

  uint64_t fresh_key() noexcept { return ++last_key; }

  const std::span<const uint8_t> key;
  LineTable lines;
  RdmaPorts ports;
  Reach reach;
  std::unique_ptr<verbs::ConnectionManager> manager;  // null until there was a device
  bool manager_watched = false;
  rdma_cm_id* listener = nullptr;  // JOIN comes here
  uint64_t listener_key = 0;
  uint16_t listener_port = 0;
  std::vector<std::unique_ptr<RemoteAttempt>> attempts;
  std::vector<Rider> riders;
  std::vector<std::unique_ptr<WatchedDevice>> devices;
  std::vector<std::unique_ptr<WatchedContext>> contexts;
  uint32_t largest_ring = UINT32_MAX;  // memlock did not allow for more
  uint64_t last_key = 0;
};

/// Null: there is no way to other hosts (no random numbers, no key where one is demanded); *why
/// says it.
RdmaHost* rdma_host(Reason* why = nullptr) noexcept;
/// A device was there the last time, or: look_for_rdma() is due; or, with a reason, there is none.
enum class Rdma : uint8_t { kThere, kAsking, kNone };
Rdma rdma_there(Reason* why) noexcept;
/// A device went: the next stream asks anew.
void rdma_gone() noexcept;
/// For tests, before the keeper runs: this fabric, and no library.
void set_fabric(std::unique_ptr<verbs::ConnectionManager> fake) noexcept;
/// Our listener for queue pairs. False: the connection manager has none for us.
bool listen_for_joins(RdmaHost& h) noexcept;
/// Its completions come to the keeper.
void watch_device(RdmaHost& h, const std::shared_ptr<verbs::Device>& device) noexcept;

}  // namespace rsock::stream
