#include "core/stream/remote_attempt.h"

#include <poll.h>

#include <algorithm>

#include "core/base/clock.h"
#include "core/base/config.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/heat.h"
#include "core/stream/moves.h"
#include "core/stream/rdma_host.h"
#include "core/stream/sock_diag.h"
#include "core/wire/mac.h"

namespace rsock::stream {
namespace {

// A question over the network takes some tens of microseconds: no sooner than that makes sense.
constexpr uint64_t kFirstRetryNs = kMs;
constexpr uint64_t kLastRetryNs = 2'000 * kMs;
constexpr size_t kMaxAttempts = 256;  // each may hold descriptors

void no_rdma(RemoteAttempt& a, Reason why) noexcept {
  if (!config().allow_shm) {
    static constinit bool told = false;
    if (!std::exchange(told, true)) {
      RSOCK_LOG(kWarn, "RSOCK_PATH asks for rdma alone, but: %s: connections stay on TCP", why);
    }
    fail_strict_now(*a.stream, a.generation);
  }
  not_now(a, why);
}

}  // namespace

void start_remote_attempt(const Seeker& found) noexcept {
  auto owned = std::make_unique<RemoteAttempt>();
  RemoteAttempt& a = *owned;
  static_cast<Seeker&>(a) = found;
  // The same address may be another host's on the next interface.
  if (a.tuple.scope != 0) return give_up(a, "a link-local address");
  Reason why = nullptr;
  RdmaHost* const h = rdma_host(&why);
  if (h == nullptr) return give_up(a, why);
  if (h->attempts.size() >= kMaxAttempts) return not_now(a, "too many lifts at once");
  a.caller = a.stream->connected_here;
  a.due = UINT64_MAX;
  h->attempts.push_back(std::move(owned));
  switch (rdma_there(&why)) {
    case Rdma::kThere:
      return begin_remote(a);
    case Rdma::kAsking:
      return;
    case Rdma::kNone:
      return no_rdma(a, why);
  }
}

void begin_remote(RemoteAttempt& a) noexcept {
  Reason why = nullptr;
  if (rdma_there(&why) != Rdma::kThere) return no_rdma(a, why != nullptr ? why : "no RDMA device");
  if (!still_wanted(a)) return give_up(a, "closed or pinned");
  if (a.stream->has_channel.load(std::memory_order_acquire)) return try_again(a, "busy");
  if (a.caller) return call_remote(a);
  await_remote(a);
}

void set_phase(RemoteAttempt& a, RemotePhase phase, uint64_t wait_ns) noexcept {
  a.phase = phase;
  a.due = monotonic_ns() + wait_ns;
}

void try_again(RemoteAttempt& a, Reason reason) noexcept {
  drop_remote(a);
  if (++a.tries > kMostRemoteTries) return not_now(a, reason);
  set_phase(a, RemotePhase::kRetry,
            std::min(kLastRetryNs, kFirstRetryNs << std::min(a.tries / 2, 20u)));
}

void not_there(RemoteAttempt& a, Reason reason) noexcept {
  // Its descriptor is gone, or by now another file's: nothing can be asked of it.
  if (!still_wanted(a)) return give_up(a, "closed or pinned");
  // A server that ends, a connection that was shut meanwhile: that the peer knows nothing of it
  // says nothing about the next one.
  if (os::poll_now(a.stream->fd.load(std::memory_order_relaxed), POLLRDHUP) != 0) {
    return not_now(a, "the connection is over");
  }
  rdma_host()->reach.failed(a.tuple.remote, reason, monotonic_ns());
  not_now(a, reason);
}

void drop_remote(RemoteAttempt& a) noexcept {
  RdmaHost& h = *rdma_host();
  // The peer may have its channel already: it shall not wait for this end.
  if (a.channel) {
    a.channel->let_go();
  } else if (a.phase == RemotePhase::kJoin && a.line) {
    a.line->say(a.nonce, wire::Word::kBye, 0);
  }
  a.channel.reset();  // gives the pair back
  if (a.device && a.pair.qp != nullptr) a.device->retire(std::move(a.pair));
  a.pair = verbs::QueuePair{};
  a.device.reset();
  if (h.manager) h.manager->destroy(std::exchange(a.id, nullptr));
  a.key = 0;  // what comes for it now is late
  a.nonce = 0;
  a.line.reset();
  a.early_count = 0;
}

void on_remote_due(RemoteAttempt& a) noexcept {
  switch (a.phase) {
    case RemotePhase::kLibrary:
      return;
    case RemotePhase::kRetry:
      return begin_remote(a);
    case RemotePhase::kFind:
      return not_there(a, "the peer does not answer over RDMA");
    case RemotePhase::kRoute:
    case RemotePhase::kJoin:  // it did: busy, or the path is
      return not_now(a, "the peer does not answer over RDMA");
    case RemotePhase::kLine:
    case RemotePhase::kOffer:
      return try_again(a, "the peer does not answer");
    case RemotePhase::kListen:
      return not_now(a, "the peer does not answer");
    case RemotePhase::kWanted:
    case RemotePhase::kAccepted:
      if (monotonic_ns() < a.until) return back_to_waiting(a, "the peer does not answer");
      return not_now(a, "the peer does not answer");
  }
}

void on_remote_event(RemoteAttempt& a, const verbs::CmEvent& e) noexcept {
  if (e.kind == verbs::CmEvent::Kind::kDeviceRemoved) {
    if (a.device) a.device->on_removal();
    rdma_gone();
    drop_remote(a);  // at once: the kernel's removal waits for the id
    return not_now(a, "the RDMA device was removed");
  }
  if (a.caller) return on_caller_event(a, e);
  on_callee_event(a, e);
}

// --- the queue pair ----------------------------------------------------------------------------

Reason make_pair(RemoteAttempt& a, bool* later) noexcept {
  RdmaHost& h = *rdma_host();
  const Config& c = config();
  const auto why = [](Errno e) -> Reason {
    if (e == ENOMEM) return "locked memory (memlock) is too low";
    if (e == EMFILE || e == ENFILE) return "no descriptor left";
    if (e == ENOSPC) return "the RDMA device has too few receive entries";
    if (e == EUSERS) return kNoRoom;
    if (e == ENODEV) return "the RDMA device was removed";
    return "the RDMA device refused";
  };
  *later = false;
  auto device = verbs::Device::open(a.id->verbs, c.rdma_streams);
  if (!device) return why(device.error());
  watch_device(h, *device);
  auto pair = (*device)->make_queue_pair(a.id, a.ring_size, a.line->keeper(), c.rdma_immediate);
  if (!pair) {
    if (pair.error() == EOPNOTSUPP) a.id = nullptr;  // went with the pair
    if (pair.error() == ENOMEM && a.ring_size > wire::kMinRingSize) {
      h.largest_ring = std::max<uint32_t>(a.ring_size / 4, wire::kMinRingSize);
      *later = true;
    }
    return why(pair.error());
  }
  a.device = std::move(*device);
  a.pair = std::move(*pair);
  a.id = nullptr;
  return nullptr;
}

void no_room(RemoteAttempt& a) noexcept {
  if (a.over) return;
  give_up(a, kNoRoom);
  wait_for_room(*a.stream, a.generation);
}

wire::Join own_join(const RemoteAttempt& a) noexcept {
  wire::Join join;
  join.nonce = a.nonce;
  join.ring_address = a.pair.memory.rx_address();
  join.ring_key = a.pair.memory.rx_key();
  join.ring_size = static_cast<uint32_t>(a.pair.memory.ring_size());
  join.mac = wire::seal_join(rdma_host()->key, a.caller, join);
  return join;
}

bool check_join(const RemoteAttempt& a, const wire::Join& join) noexcept {
  const uint64_t seal = wire::seal_join(rdma_host()->key, !a.caller, join);
  const auto bytes = [](const uint64_t& v) {
    return std::span(reinterpret_cast<const uint8_t*>(&v), sizeof(v));
  };
  if (!wire::equal(bytes(seal), bytes(join.mac))) {
    count_refusal("wrong or missing shared key");
    return false;
  }
  return join.nonce == a.nonce && join.ring_size == a.ring_size;
}

bool make_channel(RemoteAttempt& a, const wire::Join& theirs) noexcept {
  const verbs::RemoteRing ring{theirs.ring_address, theirs.ring_key, theirs.ring_size};
  a.channel = verbs::make_verbs_channel(a.device, std::move(a.pair), ring, a.nonce, a.line);
  a.pair = verbs::QueuePair{};
  return a.channel != nullptr;
}

void lift_remote(RemoteAttempt& a) noexcept {
  RdmaHost& h = *rdma_host();
  Stream& s = *a.stream;
  const auto channel = std::move(a.channel);
  h.riders.push_back(Rider{a.line, a.nonce, a.key, channel, a.device, &s, a.generation});
  a.key = 0;  // events are the rider's, and so is the last word
  a.phase = RemotePhase::kRetry;
  for (size_t i = 0; i < a.early_count; ++i) channel->on_word(a.early[i].word, a.early[i].value);
  channel->connected();
  if (!attach(s, a.generation, a.own_cookie, channel, a.nonce, {})) {
    channel->let_go();  // nobody else has it, and the peer may have its end
    return not_now(a, "closed or shared meanwhile");
  }
  remember_attached(s, a.nonce);
  a.over = true;
  RSOCK_LOG(kInfo, "fd %d: on RDMA", s.fd.load(std::memory_order_relaxed));
  channel->peer_let_go() ? tend_after_hang_up(s) : tend(s);
}

bool line_may_speak(const RemoteAttempt& a, const Line& line) noexcept {
  if (!a.peer_here) return true;
  const auto end = find_socket(wire::FourTuple{line.remote(), line.local(), 0});
  return end && is_peer(end->uid, a.peer);
}

}  // namespace rsock::stream
