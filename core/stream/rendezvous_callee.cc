// The end that listens: it is called, looks at HELLO, answers, waits for CONFIRM. PROTOCOL.md,
// "Rendezvous".

#include <cstring>

#include "core/base/clock.h"
#include "core/os/os.h"
#include "core/stream/attempt.h"
#include "core/stream/counters.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/moves.h"

namespace rsock::stream {
namespace {

bool welcome(Attempt& a, wire::Verdict verdict) noexcept {
  wire::Welcome answer;
  answer.verdict = verdict;
  answer.nonce = a.nonce;
  if (verdict == wire::Verdict::kOk) {
    answer.socket_cookie = a.own_cookie;
    answer.keeper = keeper().kick_name;
  }
  uint8_t bytes[wire::kWelcomeSize];
  wire::encode(answer, bytes);
  return send_message(a, bytes, sizeof(bytes), -1);
}

wire::Verdict judge_hello(Attempt& a, const wire::Hello& hello, int memfd) noexcept {
  if (!(hello.tuple == a.tuple.reverse())) {
    count_refusal("claim to another connection");
    return wire::Verdict::kNotMine;
  }
  if (hello.socket_cookie != a.peer.cookie) {
    count_refusal("caller does not hold the other end");
    return wire::Verdict::kCredentials;
  }
  if (!still_wanted(a) || a.stream->has_channel.load(std::memory_order_acquire)) {
    return wire::Verdict::kNotNow;
  }
  if (memfd < 0) {
    count_refusal("no memory passed");
    return wire::Verdict::kMemory;
  }
  auto segment = transport::adopt_segment(memfd, hello.ring_size);
  if (!segment) {
    count_refusal(segment.error().reason);
    return wire::Verdict::kMemory;
  }
  a.segment = std::make_unique<transport::ShmSegment>(std::move(*segment));
  return wire::Verdict::kOk;
}

}  // namespace

void listen_for_peer(Attempt& a) noexcept {
  auto owned = unix_socket();
  if (!owned) return not_now(a, "no descriptor left");
  if (const auto listening = listen_on(*owned, a.name, 4); !listening) {
    if (listening.error() == EADDRINUSE) {
      count_refusal("rendezvous name taken");
      if (a.tries < 4) return retry_later(a, "the rendezvous name is taken");
    }
    return not_now(a, "the rendezvous name is taken");
  }
  a.listener = std::move(*owned);
  a.phase = Phase::kListen;
  a.due = a.until = monotonic_ns() + kListenNs;
  watch(a, a.listener.get());
}

void on_caller(Attempt& a) noexcept {
  auto owned = os::make_internal(
      [&] { return os::accept4(a.listener.get(), SOCK_CLOEXEC | SOCK_NONBLOCK); });
  if (!owned) {
    // Nobody, or somebody who left. Else the caller stays in the queue, and epoll would say so
    // again and again while it can't be taken.
    const Errno e = owned.error();
    if (e == EAGAIN || e == EINTR || e == ECONNABORTED || e == EBADF) return;
    keeper_unwatch(a.listener.get());
    if (a.phase == Phase::kListen) not_now(a, "no descriptor left");
    return;
  }
  if (a.phase != Phase::kListen) return;  // one at a time: a second caller is turned away
  a.connection = std::move(*owned);
  if (!peer_may_speak(a)) {
    count_refusal("caller is another user");
    return back_to_listening(a);
  }
  a.phase = Phase::kAwaitHello;
  a.due = monotonic_ns() + kAnswerNs;
  watch(a, a.connection.get());
}

void back_to_listening(Attempt& a) noexcept {
  drop_connection(a);
  a.phase = Phase::kListen;
  a.due = a.until;
}

void on_hello(Attempt& a) noexcept {
  os::OwnedFd* const memfd = &a.memfd;
  const int state = read_message(a, wire::kHelloSize, memfd);
  if (state == 0) return;
  if (state < 0) {
    memfd->reset();
    return back_to_listening(a);
  }
  const auto hello = wire::decode_hello(a.inbox, wire::kHelloSize);
  a.inbox_size = 0;
  if (!hello) {
    count_refusal(hello.error().reason);
    memfd->reset();
    (void)welcome(a, hello.error().error == EPROTONOSUPPORT ? wire::Verdict::kVersion
                                                            : wire::Verdict::kMalformed);
    return back_to_listening(a);
  }
  a.nonce = hello->nonce;
  a.peer_kick = hello->keeper;
  const wire::Verdict verdict = judge_hello(a, *hello, memfd->get());
  memfd->reset();
  if (!welcome(a, verdict) || verdict != wire::Verdict::kOk) return back_to_listening(a);
  a.phase = Phase::kAwaitConfirm;
}

void on_confirm(Attempt& a) noexcept {
  const int state = read_message(a, wire::kConfirmSize, nullptr);
  if (state == 0) return;
  if (state < 0) return back_to_listening(a);
  const auto confirm = wire::decode_confirm(a.inbox, wire::kConfirmSize);
  if (!confirm || confirm->nonce != a.nonce || confirm->verdict != wire::Verdict::kOk) {
    if (!confirm) count_refusal(confirm.error().reason);
    return back_to_listening(a);
  }
  if (!lift(a, false)) return not_now(a, "closed or shared meanwhile");
  attend(*a.stream);  // the caller may be ready already
}

}  // namespace rsock::stream
