// A channel within one process, for tests: deterministic, and as bad as the test wants it.
//
// Purpose: behaves like a queue pair. Each end has its own memory; bytes are copied from the
// sender's ring to the receiver's when they are *delivered*, room comes back when credits are. Both
// happen at once, or, when held, at the next pump(). fail() breaks the path: nothing crosses any
// more, not even control words, both ends report failure and hang up. Ownership: both channels and
// the test share the FakeLink. Thread safety: as transport.h; FakeLink's members may be called from
// any thread. What is exact here and may not be on a device: end, freeze and recall cross at once
// while the path is up (tx_end() delivers held bytes first), so invariants 2 and 3 of transport.h
// hold. After fail() each end knows its own side only: a recall freezes at the last credit that
// came.
#pragma once

#include <memory>

#include "core/transport/transport.h"

namespace rsock::transport {

struct FakeOptions {
  size_t capacity = 64 * 1024;      // a power of two
  PathKind kind = PathKind::kFake;  // whose part it plays
  bool hold_bytes = false;          // published bytes wait for pump()
  bool hold_credits = false;        // freed room waits for pump()
};

/// Which end sends in the direction meant.
enum class FakeSide : uint8_t { kCaller = 0, kCallee = 1 };

class FakeLink {
 public:
  virtual ~FakeLink() = default;
  virtual void hold_bytes(bool hold) noexcept = 0;
  virtual void hold_credits(bool hold) noexcept = 0;
  /// Delivers up to `limit` held bytes that `sender` published. Returns how many.
  virtual size_t pump_bytes(FakeSide sender, size_t limit) noexcept = 0;
  /// Tells `sender` of all room that its peer has freed.
  virtual void pump_credits(FakeSide sender) noexcept = 0;
  /// Delivers everything held, both ways.
  virtual void pump() noexcept = 0;
  virtual void fail() noexcept = 0;
};

struct FakePair {
  std::shared_ptr<FakeLink> link;
  std::unique_ptr<Channel> caller;
  std::unique_ptr<Channel> callee;
};

/// Errors: what socketpair(2) says.
Result<FakePair> make_fake_pair(const FakeOptions& options);

}  // namespace rsock::transport
