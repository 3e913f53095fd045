// The end that accepted: waits for WANT on a line, offers its port, takes JOIN. PROTOCOL.md,
// "Across hosts".

#include <sys/epoll.h>

#include <algorithm>

#include "core/base/clock.h"
#include "core/base/config.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/moves.h"
#include "core/stream/rdma_host.h"
#include "core/stream/remote_attempt.h"
#include "core/transport/endpoint.h"
#include "core/wire/mac.h"

namespace rsock::stream {
namespace {

/// Another process of this host may hold the port at which FIND arrives: it asks here.
void listen_for_where(RemoteAttempt& a) noexcept {
  auto owned = unix_socket();
  if (!owned) return;
  if (!listen_on(*owned, a.name, 4)) return count_refusal("rendezvous name taken");
  a.listener = std::move(*owned);
  (void)keeper_watch(a.listener.get(), EPOLLIN,
                     tagged(static_cast<KeeperSource*>(&a), KeeperTag::kSource));
}

void drop_asker(RemoteAttempt& a) noexcept {
  if (a.asker) keeper_unwatch(a.asker.get());
  a.asker.reset();
  a.inbox_size = 0;
}

void answer_where(RemoteAttempt& a) noexcept {
  const auto got = os::recv(a.asker.get(), a.inbox + a.inbox_size, wire::kWhereSize - a.inbox_size,
                            MSG_DONTWAIT);
  if (!got && got.error() == EAGAIN) return;
  if (!got || *got == 0) return drop_asker(a);
  a.inbox_size += *got;
  if (a.inbox_size < wire::kWhereSize) return;
  const auto where = wire::decode_where(a.inbox, wire::kWhereSize);
  if (!where) {
    count_refusal(where.error().reason);
    return drop_asker(a);
  }
  const RdmaHost& h = *rdma_host();
  wire::Here here;
  here.nonce = where->nonce;
  here.line_port = h.lines.port();
  here.keeper = h.lines.own_keeper();
  uint8_t bytes[wire::kHereSize];
  wire::encode(here, bytes);
  (void)os::send(a.asker.get(), bytes, sizeof(bytes), MSG_DONTWAIT | MSG_NOSIGNAL);
  drop_asker(a);
}

RemoteAttempt* find_waiting(const wire::FourTuple& as_caller) noexcept {
  for (const auto& a : rdma_host()->attempts) {
    if (!a->over && !a->caller && a->tuple == as_caller.reverse()) return a.get();
  }
  return nullptr;
}

bool at_limit() noexcept {
  for (const auto& d : verbs::Device::all()) {
    if (!d->removed() && d->pairs() >= d->max_streams()) return true;
  }
  return false;
}

bool nonce_in_use(const Line& line, uint64_t nonce) noexcept {
  for (const Rider& r : rdma_host()->riders) {
    if (r.line.get() == &line && r.nonce == nonce && !r.channel.expired()) return true;
  }
  for (const auto& a : rdma_host()->attempts) {
    if (!a->over && a->line.get() == &line && a->nonce == nonce) return true;
  }
  return false;
}

/// A caller takes a crowd of streams in turn, some at a time, and its end waits meanwhile. While
/// that host's turn comes round, those behind it are waited for.
void go_on_listening(const wire::Endpoint& caller) noexcept {
  const uint64_t until = monotonic_ns() + kListenNs;
  for (const auto& a : rdma_host()->attempts) {
    if (a->over || a->caller || a->phase != RemotePhase::kListen ||
        a->tuple.remote.address != caller.address) {
      continue;
    }
    a->until = until;
    a->due = until;
  }
}

wire::Verdict judge_want(RemoteAttempt* a, const Line& line, const wire::Want& want) noexcept {
  // A host speaks for its own addresses only.
  if (want.tuple.local.address != line.remote().address ||
      want.tuple.remote.address != line.local().address) {
    count_refusal("claim to another connection");
    return wire::Verdict::kNotMine;
  }
  if (a == nullptr || a->phase == RemotePhase::kLibrary) return wire::Verdict::kNotMine;
  if (!line_may_speak(*a, line)) {
    count_refusal("the caller's keeper is another user's");
    return wire::Verdict::kCredentials;
  }
  if (nonce_in_use(line, want.nonce)) {
    count_refusal("a nonce twice");
    return wire::Verdict::kMalformed;
  }
  if (a->phase != RemotePhase::kListen || !still_wanted(*a) ||
      a->stream->has_channel.load(std::memory_order_acquire)) {
    return wire::Verdict::kNotNow;
  }
  // The caller says the size, we pin it: not more than we would ask for. It comes back with less.
  constexpr uint32_t kUsual = 1 << 20;
  if (want.ring_size > std::max(config().ring_bytes, kUsual)) return wire::Verdict::kMemory;
  return at_limit() ? wire::Verdict::kLimit : wire::Verdict::kOk;
}

void reject_join(const verbs::CmEvent& e, uint64_t nonce, wire::Verdict verdict) noexcept {
  uint8_t bytes[wire::kFoundSize];
  wire::Found answer;
  answer.nonce = nonce;
  answer.verdict = verdict;
  wire::encode(answer, bytes);
  rdma_host()->manager->reject(e.id, bytes);
}

/// The id is a's from here on.
void accept_join(RemoteAttempt& a, const wire::Join& theirs, const verbs::CmEvent& e) noexcept {
  RdmaHost& h = *rdma_host();
  a.id = e.id;
  a.key = h.fresh_key();
  h.manager->adopt(a.id, a.key);
  bool later = false;
  if (const Reason reason = make_pair(a, &later)) {
    const auto verdict = at_limit() ? wire::Verdict::kLimit : wire::Verdict::kMemory;
    if (a.id != nullptr) reject_join(e, theirs.nonce, verdict);
    a.id = nullptr;
    if (reason == kNoRoom) return no_room(a);
    return later ? back_to_waiting(a, reason) : not_now(a, reason);
  }
  const wire::Join ours = own_join(a);
  if (!make_channel(a, theirs)) return not_now(a, "no descriptor left");
  uint8_t bytes[wire::kJoinSize];
  wire::encode(ours, bytes);
  set_phase(a, RemotePhase::kAccepted, kRemoteNs);
  const verbs::QueuePair& pair = a.channel->pair();
  if (!h.manager->accept(pair.id, pair.qp, bytes)) return not_now(a, "the RDMA device refused");
}

}  // namespace

void await_remote(RemoteAttempt& a) noexcept {
  RdmaHost& h = *rdma_host();
  if (!h.lines.listen()) return not_now(a, "no descriptor left");
  if (!listen_for_joins(h)) return not_now(a, "the RDMA device refused");
  const auto held = h.ports.hold(a.tuple.local.port);
  if (held == RdmaPorts::Held::kNotAllowed)
    return not_now(a, "not allowed to listen on the RDMA port");
  if (held == RdmaPorts::Held::kByStranger) {
    return not_now(a, "the RDMA port is held by another user's process");
  }
  if (held != RdmaPorts::Held::kByUs) listen_for_where(a);
  a.until = monotonic_ns() + kListenNs;
  set_phase(a, RemotePhase::kListen, kListenNs);
}

void back_to_waiting(RemoteAttempt& a, Reason reason) noexcept {
  drop_remote(a);
  if (a.stream->owned_by(a.generation))
    a.stream->not_lifted.store(reason, std::memory_order_relaxed);
  a.phase = RemotePhase::kListen;
  a.due = a.until;
}

void RemoteAttempt::on_event(uint32_t) noexcept {
  if (over) return;
  if (listener) {
    auto owned = os::make_internal(
        [&] { return os::accept4(listener.get(), SOCK_CLOEXEC | SOCK_NONBLOCK); });
    if (owned) {
      // One at a time; an answer fits a queue that is empty, so none is left behind. The former one
      // was silent.
      drop_asker(*this);
      asker = std::move(*owned);
      (void)keeper_watch(asker.get(), EPOLLIN,
                         tagged(static_cast<KeeperSource*>(this), KeeperTag::kSource));
    } else if (owned.error() == EMFILE || owned.error() == ENFILE) {
      keeper_unwatch(listener.get());  // else epoll would say so again and again
      listener.reset();
    }
  }
  if (asker) answer_where(*this);
}

void answer_want(Line& line, const wire::Want& want) noexcept {
  RdmaHost& h = *rdma_host();
  RemoteAttempt* const a = find_waiting(want.tuple);
  wire::Offer offer;
  offer.nonce = want.nonce;
  offer.verdict = judge_want(a, line, want);
  if (offer.verdict == wire::Verdict::kOk) {
    offer.rdma_port = h.listener_port;
    a->line = h.lines.shared(line);
    a->nonce = want.nonce;
    a->ring_size = want.ring_size;
    set_phase(*a, RemotePhase::kWanted, kRemoteNs);
    go_on_listening(line.remote());
  }
  line.offer(offer);
  // The two ends compare what they have: here the coldest may have to go.
  if (offer.verdict == wire::Verdict::kLimit && a != nullptr) no_room(*a);
}

void answer_join(const verbs::CmEvent& e) noexcept {
  RdmaHost& h = *rdma_host();
  const auto join = wire::decode_join(e.data, e.size);
  if (!join) {
    count_refusal(join.error().reason);
    return h.manager->reject(e.id, {});
  }
  for (const auto& each : h.attempts) {
    RemoteAttempt& a = *each;
    if (a.over || a.caller || a.phase != RemotePhase::kWanted || a.nonce != join->nonce) continue;
    // A nonce that leaked is of use to its own host only, and once.
    if (e.remote.address != a.tuple.remote.address || !check_join(a, *join)) break;
    if (!still_wanted(a)) {
      reject_join(e, join->nonce, wire::Verdict::kNotNow);
      return give_up(a, "closed or pinned");
    }
    return accept_join(a, *join, e);
  }
  count_refusal("a queue pair that nobody wants");
  reject_join(e, join->nonce, wire::Verdict::kNotMine);
}

void on_callee_event(RemoteAttempt& a, const verbs::CmEvent& e) noexcept {
  using Kind = verbs::CmEvent::Kind;
  if (a.phase != RemotePhase::kAccepted) return;
  switch (e.kind) {
    case Kind::kEstablished:
      return lift_remote(a);
    case Kind::kRejected:
    case Kind::kUnreachable:
    case Kind::kDisconnected:
      return back_to_waiting(a, "the peer left");
    default:
      return;
  }
}

}  // namespace rsock::stream
