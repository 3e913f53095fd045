// All lines of this process, and the TCP port at which other hosts' keepers open theirs.
//
// Purpose: finds the line to a keeper, opens one, accepts those of others within bounds, and lets
// go of what is down. Two keepers that open a line to each other at the same moment keep both: each
// channel stays on its own. Ownership: lines are shared with the channels that speak on them. A
// line that is down leaves the table in run_timers(), never in the middle of an event. Thread
// safety: keeper only; forget_in_child() in a forked child. Trust: anybody can connect here, and
// without a key prove himself. At most kMostUnproved that have not, each for 3 s; of those that
// have, so many in all and from one address that the program keeps nearly all of its descriptors.
// One that no channel uses goes after kIdleNs, or when another one needs its place: who comes with
// a stream finds one, and a stranger pushes out strangers.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "core/stream/line.h"

namespace rsock::stream {

class LineTable final : public KeeperSource {
 public:
  static constexpr size_t kMostUnproved = 64;
  static constexpr size_t kMostAccepted = 1024;
  static constexpr size_t kMostOfOneAddress = 256;
  static constexpr uint64_t kIdleNs = 60'000'000'000;

  LineTable(LineOwner& owner, std::span<const uint8_t> key, uint64_t own) noexcept
      : owner_(owner), key_(key), own_(own) {}

  /// Opens the listener if it is not there. False: no descriptor, or no socket of this kind.
  bool listen() noexcept;
  /// 0 until listen().
  uint16_t port() const noexcept { return port_; }
  int listener_fd() const noexcept { return listener_.get(); }
  uint64_t own_keeper() const noexcept { return own_; }

  /// The first open line to that keeper between these addresses (ports do not matter), or null.
  std::shared_ptr<Line> find(uint64_t keeper, const wire::Endpoint& local,
                             const wire::Endpoint& remote) const noexcept;
  /// A line to remote, from local's address: one that is being opened, or a new one. Null: no
  /// descriptor.
  std::shared_ptr<Line> open(const wire::Endpoint& local, const wire::Endpoint& remote) noexcept;
  const std::vector<std::shared_ptr<Line>>& all() const noexcept { return lines_; }
  std::shared_ptr<Line> shared(const Line& line) const noexcept;

  /// The listener has somebody.
  void on_event(uint32_t events) noexcept override;
  /// Ends what was silent for too long, lets go of what is down. When to come again.
  uint64_t run_timers(uint64_t now) noexcept;
  void forget_in_child() noexcept;

 private:
  size_t unproved() const noexcept;
  /// Lines that others opened and that live; from this address, or, with null, in all.
  size_t accepted(const wire::Endpoint* from) const noexcept;
  /// Ends one of them that no channel uses, the longest unused first; else `newcomer`.
  void make_room(const wire::Endpoint* from, Line& newcomer) noexcept;
  bool bind_any(int family) noexcept;

  LineOwner& owner_;
  const std::span<const uint8_t> key_;
  const uint64_t own_;
  os::OwnedFd listener_;
  uint16_t port_ = 0;
  bool paused_ = false;  // no descriptor for the next one: the timer looks again
  std::vector<std::shared_ptr<Line>> lines_;
};

}  // namespace rsock::stream
