// How two keepers on one host find each other and agree on a channel. PROTOCOL.md, "Rendezvous".
//
// The end with the smaller address calls; the other listens on an abstract socket named after the
// connection. One Attempt per stream that looks for its peer; all of it runs on the keeper's
// thread.

#include <algorithm>
#include <memory>
#include <vector>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/attempt.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/moves.h"
#include "core/stream/remote_attempt.h"
#include "core/transport/shm/shm_channel.h"

namespace rsock::stream {
namespace {

// The peer's threshold is passed at about the same time: soon, and each second time twice as late.
constexpr uint64_t kFirstRetryNs = kMs / 20;
constexpr uint64_t kLastRetryNs = 2'000 * kMs;
constexpr uint32_t kMaxRetries = 31;  // about 6 s in all
constexpr size_t kMaxAttempts = 256;  // each may hold a descriptor

using Attempts = std::vector<std::unique_ptr<Attempt>>;

/// A pointer, so that a forked child can leave the parent's list where it is. Under the keeper's
/// mutex.
constinit Attempts* g_attempts = nullptr;

Attempts& attempts() noexcept {
  if (g_attempts == nullptr) g_attempts = new Attempts;
  return *g_attempts;
}

void begin(Attempt& a) noexcept {
  if (!still_wanted(a)) return give_up(a, "closed or pinned");
  if (a.tuple.is_caller()) {
    call_peer(a);
  } else {
    listen_for_peer(a);
  }
}

void on_due(Attempt& a) noexcept {
  switch (a.phase) {
    case Phase::kRetry:
      return begin(a);
    case Phase::kAwaitWelcome:
      return retry_later(a, "the peer does not answer");
    case Phase::kAwaitHello:
    case Phase::kAwaitConfirm:
      if (monotonic_ns() < a.until) return back_to_listening(a);
      return not_now(a, "the peer does not answer");
    case Phase::kListen:
      return not_now(a, "the peer does not answer");
  }
}

}  // namespace

bool still_wanted(const Seeker& a) noexcept {
  return a.stream->owned_by(a.generation) && !a.stream->closed.load(std::memory_order_acquire) &&
         !a.stream->pinned.load(std::memory_order_relaxed);
}

void give_up(Seeker& a, Reason reason) noexcept {
  if (a.over) return;
  a.over = true;
  if (a.stream->owned_by(a.generation)) {
    a.stream->not_lifted.store(reason, std::memory_order_relaxed);
    RSOCK_LOG(kInfo, "fd %d: stays on TCP: %s", a.stream->fd.load(std::memory_order_relaxed),
              reason);
  }
}

void not_now(Seeker& a, Reason reason) noexcept {
  if (a.over) return;
  give_up(a, reason);
  ask_again_later(*a.stream, a.generation, a.shared);
}

void retry_later(Attempt& a, Reason reason) noexcept {
  drop_connection(a);
  if (++a.tries > kMaxRetries) return not_now(a, reason);
  a.phase = Phase::kRetry;
  a.due = monotonic_ns() + std::min(kLastRetryNs, kFirstRetryNs << std::min(a.tries / 2, 20u));
}

bool lift(Attempt& a, bool caller) noexcept {
  Stream& s = *a.stream;
  keeper_unwatch(a.connection.get());
  // A parked segment needs its descriptor. Who has many channels at once needs descriptors more.
  constexpr int kFew = 32;
  const bool reuse = caller && a.partner.is_known() && transport::live_segments() <= kFew;
  std::shared_ptr<Channel> channel = transport::make_shm_channel(
      std::move(*a.segment), std::move(a.connection), caller,
      reuse ? transport::Reuse{std::move(a.memfd), a.partner, os::getpid()} : transport::Reuse{});
  a.segment.reset();
  if (!attach(s, a.generation, a.own_cookie, std::move(channel), a.nonce, a.peer_kick))
    return false;
  remember_attached(s, a.nonce);
  a.over = true;
  RSOCK_LOG(kInfo, "fd %d: on shared memory", s.fd.load(std::memory_order_relaxed));
  return true;
}

void start_attempt(Stream& s, uint32_t generation) noexcept {
  auto attempt = std::make_unique<Attempt>();
  attempt->stream = &s;
  attempt->generation = generation;
  if (attempts().size() >= kMaxAttempts) return not_now(*attempt, "too many lifts at once");
  if (!still_wanted(*attempt)) return give_up(*attempt, "closed or pinned");
  if (const Reason reason = examine(*attempt); reason != nullptr) {
    return attempt->may_pass ? not_now(*attempt, reason) : give_up(*attempt, reason);
  }
  if (attempt->by_rdma) return start_remote_attempt(*attempt);
  begin(*attempt);
  if (!attempt->over) attempts().push_back(std::move(attempt));
}

void on_attempt_event(void* object, uint32_t events) noexcept {
  Attempt* a = nullptr;
  for (const auto& candidate : attempts()) {
    if (candidate.get() == object) a = candidate.get();  // a stale event names one that is gone
  }
  if (a == nullptr || a->over) return;
  switch (a->phase) {
    case Phase::kRetry:
      break;
    case Phase::kListen:
      on_caller(*a);
      break;
    case Phase::kAwaitHello:
      on_caller(*a);
      if (!a->over) on_hello(*a);
      break;
    case Phase::kAwaitWelcome:
      on_welcome(*a);
      break;
    case Phase::kAwaitConfirm:
      on_caller(*a);
      if (!a->over) on_confirm(*a);
      break;
  }
}

uint64_t run_attempt_timers(uint64_t now) noexcept {
  uint64_t next = UINT64_MAX;
  for (const auto& a : attempts()) {
    if (!a->over && (a->due <= now || !still_wanted(*a))) {
      if (still_wanted(*a)) {
        on_due(*a);
      } else {
        give_up(*a, "closed or pinned");
      }
    }
    if (!a->over) next = std::min(next, a->due);
  }
  std::erase_if(attempts(), [](const std::unique_ptr<Attempt>& a) { return a->over; });
  return next;
}

void forget_attempts() noexcept {
  if (g_attempts == nullptr) return;
  for (auto& a : *g_attempts) {
    a->listener.reset();
    a->connection.reset();
    a->memfd.reset();
  }
  // Nothing is freed: malloc may be locked for ever in a child of _Fork.
  g_attempts = nullptr;
}

}  // namespace rsock::stream
