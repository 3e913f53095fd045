// The end that called connect(): FIND, a line, WANT, JOIN. PROTOCOL.md, "Across hosts".

#include <algorithm>

#include "core/base/clock.h"
#include "core/base/config.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/rdma_host.h"
#include "core/stream/remote_attempt.h"
#include "core/wire/mac.h"

namespace rsock::stream {
namespace {

// Some four seconds: a peer passes its threshold at about the same time, and may have rdma-core to
// load.
constexpr uint32_t kTriesAtAClosedPort = 22;
// A service that starts again has much to load at once, and whoever gives up before waits for ten
// seconds and more.
constexpr uint32_t kTriesAtOneOpenBefore = kMostRemoteTries;
// Where nobody was at the port the last time.
constexpr uint32_t kTriesAtOneClosedBefore = 6;
// More would wait for each other, with their time limits running: registering memory takes the
// keeper's time.
constexpr int kMostAtOnce = 8;
constexpr uint64_t kTurnNs = 5 * kMs;

/// Of each direction. Pinned memory, so less than on shared memory, and less when there are many.
uint32_t ring_bytes_now(const RdmaHost& h) noexcept {
  uint32_t bytes = config().ring_bytes;
  if (bytes == 0) {
    const size_t live = h.riders.size();
    bytes = live < 16 ? 1 << 20 : live < 128 ? 256 << 10 : 64 << 10;
  }
  return std::min(bytes, h.largest_ring);
}

bool too_many_at_once() noexcept {
  int n = 0;
  for (const auto& a : rdma_host()->attempts) {
    n += !a->over && a->caller && a->phase >= RemotePhase::kFind && a->phase <= RemotePhase::kJoin;
    if (n >= kMostAtOnce) return true;  // each of the crowd behind them asks, again and again
  }
  return false;
}

bool random_nonce(uint64_t* out) noexcept {
  return os::getrandom(out, sizeof(*out)).has_value() && *out != 0;
}

void find(RemoteAttempt& a) noexcept {
  RdmaHost& h = *rdma_host();
  if (!random_nonce(&a.find_nonce)) return not_now(a, "no random numbers");
  a.key = h.fresh_key();
  const auto id = h.manager->resolve(a.tuple.local, a.tuple.remote, a.key);
  if (!id) return not_there(a, "no RDMA device leads to the peer");
  a.id = *id;
  set_phase(a, RemotePhase::kFind, kRemoteNs);
}

void ask_find(RemoteAttempt& a) noexcept {
  uint8_t bytes[wire::kFindSize];
  wire::encode(wire::Find{a.find_nonce, a.tuple}, bytes);
  if (!rdma_host()->manager->connect(a.id, nullptr, bytes)) {
    return not_there(a, "the RDMA device refused");
  }
}

void say_want(RemoteAttempt& a) noexcept {
  RdmaHost& h = *rdma_host();
  if (!line_may_speak(a, *a.line)) {
    count_refusal("the peer's keeper is another user's");
    return give_up(a, "the peer's keeper is another user's");
  }
  if (!random_nonce(&a.nonce)) return not_now(a, "no random numbers");
  a.ring_size = std::min(ring_bytes_now(h), a.ring_most);
  set_phase(a, RemotePhase::kOffer, kRemoteNs);
  const auto line = a.line;  // an end of it takes the attempt's
  line->want(wire::Want{a.nonce, a.ring_size, a.tuple});
}

void on_found(RemoteAttempt& a, const wire::Found& found) noexcept {
  RdmaHost& h = *rdma_host();
  h.manager->destroy(std::exchange(a.id, nullptr));
  a.key = 0;
  switch (found.verdict) {
    case wire::Verdict::kOk:
      break;
    case wire::Verdict::kNotNow:
      return try_again(a, "the peer is not ready");
    case wire::Verdict::kNotMine:  // it sees other addresses than we do, or the connection is over
      // An answer may come before the FIN that was sent before it. Then it is here the next time.
      if (!std::exchange(a.not_mine, true)) return try_again(a, "the peer is not ready");
      return not_there(a, "the peer sees other addresses (NAT or a proxy)");
    case wire::Verdict::kVersion:
      return not_there(a, "no protocol version in common");
    default:
      return not_now(a, "the peer refused");
  }
  h.reach.found(a.tuple.remote, found.keeper, monotonic_ns());
  for (const auto& other : h.attempts) {  // whoever waits for the same service need not any more
    if (!other->over && other->phase == RemotePhase::kRetry &&
        other->tuple.remote == a.tuple.remote)
      other->due = 0;
  }
  a.peer_keeper = found.keeper;
  a.line = h.lines.find(found.keeper, a.tuple.local, a.tuple.remote);
  if (a.line) return say_want(a);
  wire::Endpoint there = a.tuple.remote;
  there.port = found.line_port;
  a.line = h.lines.open(a.tuple.local, there);
  if (!a.line || a.line->is_down()) return not_there(a, "the peer's keeper can't be reached");
  set_phase(a, RemotePhase::kLine, Line::kGreetNs + kRemoteNs);
}

void on_rejected_find(RemoteAttempt& a, const verbs::CmEvent& e) noexcept {
  const auto found = wire::decode_found(e.data, e.size);
  if (!found) {
    // Nobody there yet. Or a program that is none of ours.
    const Reach& reach = rdma_host()->reach;
    const uint32_t most = reach.answered_before(a.tuple.remote) ? kTriesAtOneOpenBefore
                          : reach.failed_before(a.tuple.remote) ? kTriesAtOneClosedBefore
                                                                : kTriesAtAClosedPort;
    if (e.status == verbs::kRejectedNobodyThere && a.tries < most) {
      return try_again(a, "the peer's library is not there or not listening");
    }
    if (e.status == verbs::kRejectedStale) return try_again(a, "the peer is not ready");
    return not_there(a, "the peer's library is not there or not listening");
  }
  if (found->nonce != a.find_nonce) {
    count_refusal("answer to another question");
    return not_there(a, "the peer's answer is not understood");
  }
  on_found(a, *found);
}

void on_find_event(RemoteAttempt& a, const verbs::CmEvent& e) noexcept {
  using Kind = verbs::CmEvent::Kind;
  switch (e.kind) {
    case Kind::kResolved:
      return ask_find(a);
    case Kind::kRejected:
      return on_rejected_find(a, e);
    case Kind::kNoRoute:
      return not_there(
          a, e.status == -ENODEV ? "no RDMA device leads to the peer" : "the peer has no RDMA");
    case Kind::kUnreachable:
      return not_there(a, "the peer does not answer over RDMA");
    default:  // whoever accepts a question is none of ours
      return not_there(a, "the peer's library is not there or not listening");
  }
}

/// Not ok, and not about who holds the connection.
void on_refusal(RemoteAttempt& a, wire::Verdict verdict) noexcept {
  switch (verdict) {
    case wire::Verdict::kNotMine:
    case wire::Verdict::kNotNow:
      return try_again(a, "the peer is not ready");
    case wire::Verdict::kLimit:
      return no_room(a);
    case wire::Verdict::kMemory:
      a.ring_most = a.ring_size / 4;
      return a.ring_most < wire::kMinRingSize ? not_now(a, "the peer has no memory for it")
                                              : try_again(a, "the peer has no memory for it");
    default:
      return not_now(a, "the peer refused");
  }
}

void on_rejected_join(RemoteAttempt& a, const verbs::CmEvent& e) noexcept {
  const auto why = wire::decode_found(e.data, e.size);
  if (!why || why->nonce != a.nonce) return try_again(a, "the peer refused");
  on_refusal(a, why->verdict);
}

void join(RemoteAttempt& a) noexcept {
  bool later = false;
  if (const Reason reason = make_pair(a, &later)) {
    if (reason == kNoRoom) return no_room(a);
    return later ? try_again(a, reason) : not_now(a, reason);
  }
  uint8_t bytes[wire::kJoinSize];
  wire::encode(own_join(a), bytes);
  set_phase(a, RemotePhase::kJoin, kRemoteNs);
  if (!rdma_host()->manager->connect(a.pair.id, a.pair.qp, bytes))
    return not_now(a, "the RDMA device refused");
}

void on_joined(RemoteAttempt& a, const verbs::CmEvent& e) noexcept {
  const auto theirs = wire::decode_join(e.data, e.size);
  if (!theirs) {
    count_refusal(theirs.error().reason);
    return not_now(a, "the peer's answer is not understood");
  }
  if (!check_join(a, *theirs)) return not_now(a, "the peer's answer is not understood");
  if (!make_channel(a, *theirs)) return not_now(a, "no descriptor left");
  // With the channel there: the peer may write as soon as it hears of it.
  const verbs::QueuePair& pair = a.channel->pair();
  if (!rdma_host()->manager->establish(pair.id, pair.qp)) {
    return not_now(a, "the RDMA device refused");
  }
  lift_remote(a);
}

void on_join_event(RemoteAttempt& a, const verbs::CmEvent& e) noexcept {
  using Kind = verbs::CmEvent::Kind;
  switch (e.kind) {
    case Kind::kResolved:
      return a.phase == RemotePhase::kRoute ? join(a) : void();
    case Kind::kResponse:
    case Kind::kEstablished:
      return a.phase == RemotePhase::kJoin ? on_joined(a, e) : void();
    case Kind::kRejected:
      return on_rejected_join(a, e);
    case Kind::kNoRoute:
    case Kind::kUnreachable:
      a.tries += 8;  // it does on the line: some tries more, not all
      return try_again(a, "the peer does not answer over RDMA");
    case Kind::kDisconnected:
      return try_again(a, "the peer left");
    default:
      return;
  }
}

}  // namespace

void call_remote(RemoteAttempt& a) noexcept {
  RdmaHost& h = *rdma_host();
  if (const Reason r = h.reach.blocked(a.tuple.remote, monotonic_ns())) return not_now(a, r);
  if (too_many_at_once()) return set_phase(a, RemotePhase::kRetry, kTurnNs);
  // Who answered for this service before is asked at once, each second time: it may be one of many.
  const auto known = h.reach.keeper_of(a.tuple.remote);
  a.line = known && !a.asked_known ? h.lines.find(*known, a.tuple.local, a.tuple.remote) : nullptr;
  a.asked_known = a.line != nullptr;
  if (!a.line) return find(a);
  a.peer_keeper = *known;
  say_want(a);
}

void on_caller_event(RemoteAttempt& a, const verbs::CmEvent& e) noexcept {
  switch (a.phase) {
    case RemotePhase::kFind:
      return on_find_event(a, e);
    case RemotePhase::kRoute:
    case RemotePhase::kJoin:
      return on_join_event(a, e);
    default:
      return;
  }
}

void on_line_open(RemoteAttempt& a) noexcept {
  if (a.line->keeper() != a.peer_keeper) {
    count_refusal("the line leads to another keeper");
    return not_there(a, "the peer's answer is not understood");
  }
  say_want(a);
}

void on_line_down(RemoteAttempt& a, Reason reason) noexcept {
  if (!a.caller) return back_to_waiting(a, reason);
  // Before it was open: a key, a version, a firewall. They stay.
  if (a.phase == RemotePhase::kLine) return not_there(a, reason);
  try_again(a, reason);
}

void on_offer(RemoteAttempt& a, const wire::Offer& offer) noexcept {
  switch (offer.verdict) {
    case wire::Verdict::kOk:
      break;
    case wire::Verdict::kNotMine:
      if (a.asked_known) {
        drop_remote(a);
        return find(a);
      }
      return try_again(a, "the peer is not ready");
    default:
      if (offer.verdict == wire::Verdict::kNotNow) a.asked_known = false;  // it is the right one
      return on_refusal(a, offer.verdict);
  }
  RdmaHost& h = *rdma_host();
  wire::Endpoint there = a.tuple.remote;
  there.port = offer.rdma_port;
  a.key = h.fresh_key();
  const auto id = h.manager->resolve(a.tuple.local, there, a.key);
  if (!id) return not_there(a, "no RDMA device leads to the peer");
  a.id = *id;
  set_phase(a, RemotePhase::kRoute, kRemoteNs);
}

}  // namespace rsock::stream
