// The end that calls: HELLO with the memory, WELCOME, CONFIRM. PROTOCOL.md, "Rendezvous".

#include <cstring>

#include "core/base/clock.h"
#include "core/base/config.h"
#include "core/os/os.h"
#include "core/stream/attempt.h"
#include "core/stream/counters.h"
#include "core/stream/keeper_loop.h"

namespace rsock::stream {
namespace {

/// The size of each ring of the next channel, unless RSOCK_RING_BYTES says it. A ring larger than a
/// core's own cache moves bytes through the shared one: measured 250 to 310 Gbit/s at 4 MiB against
/// 100 at 1 MiB (`bare_ring copy --ring`). It is also what TCP lets a buffer grow to (tcp_wmem[2],
/// 4 MiB). But a ring is memory for as long as its stream lives, so a process with many gets less.
uint32_t ring_bytes_now() noexcept {
  if (config().ring_bytes != 0) return config().ring_bytes;
  const int live = transport::live_segments();
  if (live < 32) return 4 << 20;
  return live < 256 ? 1 << 20 : 256 << 10;
}

wire::Checked<transport::CreatedSegment> segment_for(const Attempt& a, size_t ring_bytes) noexcept {
  if (auto parked = transport::take_segment(ring_bytes, a.partner)) return std::move(*parked);
  return transport::create_segment(ring_bytes);
}

void say_hello(Attempt& a) noexcept {
  const uint32_t ring_bytes = ring_bytes_now();
  auto created = segment_for(a, ring_bytes);
  if (!created) return not_now(a, "no memory for a channel");
  if (!os::getrandom(&a.nonce, sizeof(a.nonce)) || a.nonce == 0) a.nonce = 1;
  wire::Hello hello;
  hello.nonce = a.nonce;
  hello.socket_cookie = a.own_cookie;
  hello.ring_size = ring_bytes;
  hello.tuple = a.tuple;
  hello.keeper = keeper().kick_name;
  uint8_t bytes[wire::kHelloSize];
  wire::encode(hello, bytes);
  if (!send_message(a, bytes, sizeof(bytes), created->memfd.get())) {
    return retry_later(a, "the peer does not answer");
  }
  a.segment = std::make_unique<transport::ShmSegment>(std::move(created->segment));
  a.memfd = std::move(created->memfd);
  a.phase = Phase::kAwaitWelcome;
  a.due = monotonic_ns() + kAnswerNs;
  watch(a, a.connection.get());
}

}  // namespace

void call_peer(Attempt& a) noexcept {
  auto owned = unix_socket();
  if (!owned) return not_now(a, "no descriptor left");
  a.connection = std::move(*owned);
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(a.name, &address);
  if (!os::connect(a.connection.get(), reinterpret_cast<sockaddr*>(&address), len)) {
    return retry_later(a, "the peer does not answer");
  }
  if (!peer_may_speak(a)) {
    count_refusal("rendezvous name held by another user");
    return give_up(a, "the peer's rendezvous is held by another user");
  }
  say_hello(a);
}

void on_welcome(Attempt& a) noexcept {
  const int state = read_message(a, wire::kWelcomeSize, nullptr);
  if (state == 0) return;
  if (state < 0) return retry_later(a, "the peer does not answer");
  const auto welcome = wire::decode_welcome(a.inbox, wire::kWelcomeSize);
  if (!welcome) {
    count_refusal(welcome.error().reason);
    return give_up(a, "the peer's answer is not understood");
  }
  if (welcome->nonce != a.nonce) {
    count_refusal("answer to another question");
    return give_up(a, "the peer's answer is not understood");
  }
  if (welcome->verdict == wire::Verdict::kNotNow || welcome->verdict == wire::Verdict::kNotMine) {
    return retry_later(a, "the peer is not ready");
  }
  if (welcome->verdict == wire::Verdict::kMemory)
    return not_now(a, "the peer has no memory for it");
  if (welcome->verdict != wire::Verdict::kOk) return give_up(a, "the peer refused");
  if (welcome->socket_cookie != a.peer.cookie) {
    count_refusal("answer by another socket");
    return give_up(a, "the peer does not hold the other end");
  }
  a.peer_kick = welcome->keeper;
  // CONFIRM goes first: on the doorbell a ring of ours must not overtake it.
  uint8_t bytes[wire::kConfirmSize];
  wire::encode(
      wire::Confirm{still_wanted(a) ? wire::Verdict::kOk : wire::Verdict::kNotNow, a.nonce}, bytes);
  if (!send_message(a, bytes, sizeof(bytes), -1)) return retry_later(a, "the peer does not answer");
  // If attaching fails now the doorbell closes, and the callee lets go as after any hang-up.
  if (!lift(a, true)) not_now(a, "closed or shared meanwhile");
}

}  // namespace rsock::stream
