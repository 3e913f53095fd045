// What is known of other hosts: who could not be reached over RDMA, and which keeper answered.
//
// Purpose: a peer without RDMA or without the library costs one question now and then, not one for
// each connection. And a peer that was found is asked directly the next time. Keys are the address
// and port that the connection was made to. Ownership: values. Thread safety: keeper only. Bounds:
// kMost entries; the one that is due first makes room.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/stream/stream.h"
#include "core/wire/four_tuple.h"

namespace rsock::stream {

class Reach {
 public:
  static constexpr uint64_t kFirstPauseNs = 5'000'000'000;
  static constexpr uint64_t kLongestPauseNs = 300'000'000'000;
  static constexpr size_t kMost = 256;

  /// Why nobody should ask for this service now, or null.
  Reason blocked(const wire::Endpoint& service, uint64_t now) const noexcept;
  /// Nobody was there the last time either.
  bool failed_before(const wire::Endpoint& service) const noexcept;
  /// Somebody answered, and nobody has been missed for good since: who is not there now restarts.
  bool answered_before(const wire::Endpoint& service) const noexcept;
  /// Nobody asks for 5 s, then twice as long each time, up to 5 minutes.
  void failed(const wire::Endpoint& service, Reason reason, uint64_t now) noexcept;

  /// The keeper that holds connections of this service: a guess, as several may.
  std::optional<uint64_t> keeper_of(const wire::Endpoint& service) const noexcept;
  void found(const wire::Endpoint& service, uint64_t keeper, uint64_t now) noexcept;
  /// It said that a connection is not its.
  void not_there(const wire::Endpoint& service) noexcept;

 private:
  struct Entry {
    wire::Endpoint service;
    Reason reason = nullptr;
    uint64_t until = 0;  // blocked; or when it was found
    uint64_t pause = 0;
    std::optional<uint64_t> keeper;
    bool answered = false;
  };
  const Entry* look(const wire::Endpoint& service) const noexcept;
  Entry& entry(const wire::Endpoint& service) noexcept;

  std::vector<Entry> entries_;
};

}  // namespace rsock::stream
