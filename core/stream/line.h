// One TCP connection between two keepers: greetings, proofs, then questions and words
// (wire/line.h).
//
// Purpose: carries what must outlive a queue pair. Both ends prove that they know the shared key
// before either says anything else. What comes from the peer is parsed from a buffer of fixed size
// and handed to the owner. Life: an opener's line begins with its connect under way, an acceptor's
// as accepted; open after both proofs; down for good afterwards. The owner is told of both, once.
// Ownership: shared (channels keep their line). The owner outlives it, or is a forked child's.
// Thread safety: say() and attention() from any thread, under any lock of a stream; the rest by the
// keeper. mutex_ is a leaf: it guards the descriptor against its end, and what could not be sent at
// once. Bounds: the words of one channel are few, so what waits for the peer fits kQueueBytes; a
// peer that does not read for so long has its line ended.
#pragma once

#include <atomic>
#include <memory>
#include <span>

#include "core/base/mutex.h"
#include "core/os/owned_fd.h"
#include "core/stream/keeper_loop.h"
#include "core/transport/word_line.h"
#include "core/wire/line.h"

namespace rsock::stream {

class Line;

/// Hears what a line has to tell. Calls may end the line.
class LineOwner {
 public:
  virtual void on_open(Line& line) noexcept = 0;
  virtual void on_down(Line& line, Reason reason) noexcept = 0;
  virtual void on_want(Line& line, const wire::Want& want) noexcept = 0;
  virtual void on_offer(Line& line, const wire::Offer& offer) noexcept = 0;
  virtual void on_word(Line& line, const wire::WordMessage& word) noexcept = 0;

 protected:
  ~LineOwner() = default;
};

/// Nonces whose channels want their keeper's attention.
struct Calls {
  static constexpr size_t kMax = 32;
  uint64_t nonce[kMax];
  size_t count = 0;
  bool all = false;  // more than fit: look at each channel
};

class Line final : public transport::WordLine, public KeeperSource {
 public:
  enum class State : uint8_t { kConnecting, kGreeting, kProving, kOpen, kDown };
  static constexpr size_t kQueueBytes = 64 * 1024;
  static constexpr uint64_t kGreetNs = 3'000'000'000;

  /// fd: non-blocking; `opener`: its connect() was begun. `key` lives as long as the process.
  /// `own`: our keeper's name.
  Line(LineOwner& owner, os::OwnedFd fd, bool opener, std::span<const uint8_t> key,
       uint64_t own) noexcept;
  ~Line() override;

  /// Begins to watch the descriptor, and greets if it is connected.
  void begin() noexcept;
  void on_event(uint32_t events) noexcept override;
  /// kConnecting to kProving: when patience ends. Else UINT64_MAX.
  uint64_t deadline() const noexcept { return state_ < State::kOpen ? deadline_ : UINT64_MAX; }
  void end(Reason reason) noexcept;

  State state() const noexcept { return state_; }
  bool is_open() const noexcept { return state_ == State::kOpen; }
  bool is_down() const noexcept { return state_ == State::kDown; }
  bool opener() const noexcept { return opener_; }
  /// Addresses and ports of this connection. Known when begun.
  const wire::Endpoint& local() const noexcept { return local_; }
  const wire::Endpoint& remote() const noexcept { return remote_; }
  /// An opener's: what it was to be between.
  const wire::Endpoint& source() const noexcept { return source_; }
  const wire::Endpoint& target() const noexcept { return target_; }
  void aim(const wire::Endpoint& source, const wire::Endpoint& target) noexcept {
    source_ = source;
    target_ = target;
  }
  /// The peer's keeper. Known when open.
  uint64_t keeper() const noexcept { return theirs_.keeper; }

  void want(const wire::Want& m) noexcept;
  void offer(const wire::Offer& m) noexcept;

  // --- WordLine ---
  void say(uint64_t nonce, wire::Word word, uint64_t value) noexcept override;
  void attention(uint64_t nonce) noexcept override;
  /// Takes the calls for attention since the last time. Keeper only.
  Calls take_calls() noexcept;

  /// When a channel last had it, or one was about to. Kept by the table.
  uint64_t used_ns() const noexcept { return used_ns_; }
  void note_use(uint64_t now) noexcept { used_ns_ = now; }

  /// In a forked child: the descriptor closes, and nothing is said on it any more.
  void forget_in_child() noexcept;

 private:
  void greet() noexcept;
  void on_connected() noexcept;
  void read_some() noexcept;
  /// Handles whole messages in the buffer. False: the line went down.
  bool parse() noexcept;
  void take_message(const wire::LineHead& head, const uint8_t* data) noexcept;
  void on_greeting(const wire::Greeting& m) noexcept;
  void on_proof(const wire::Proof& m) noexcept;
  void refuse(Reason reason) noexcept;
  void send_message(const uint8_t* data, size_t n) noexcept;
  void flush() noexcept;
  void watch_locked(bool for_room) noexcept RSOCK_REQUIRES(mutex_);
  void break_locked() noexcept RSOCK_REQUIRES(mutex_);

  LineOwner& owner_;
  const bool opener_;
  const std::span<const uint8_t> key_;
  State state_ = State::kConnecting;
  uint64_t deadline_ = 0;
  uint64_t used_ns_ = 0;
  wire::Endpoint local_{};
  wire::Endpoint remote_{};
  wire::Endpoint source_{};
  wire::Endpoint target_{};
  wire::Greeting mine_{};
  wire::Greeting theirs_{};
  size_t inbox_size_ = 0;
  uint8_t inbox_[4096];

  Mutex mutex_;
  os::OwnedFd fd_ RSOCK_GUARDED_BY(mutex_);
  bool broken_ RSOCK_GUARDED_BY(mutex_) = false;  // a send failed, or the queue is full
  const std::unique_ptr<uint8_t[]> queue_;        // its bytes: under mutex_
  size_t queued_ RSOCK_GUARDED_BY(mutex_) = 0;

  Mutex calls_mutex_;
  Calls calls_ RSOCK_GUARDED_BY(calls_mutex_);
};

}  // namespace rsock::stream
