// How two keepers on one host find each other and agree on a channel. PROTOCOL.md, "Rendezvous".
//
// The end with the smaller address calls; the other listens on an abstract socket named after the
// connection. One Attempt per stream that looks for its peer; all of it runs on the keeper's
// thread.

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "core/base/clock.h"
#include "core/base/config.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/holders.h"
#include "core/stream/keeper.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/moves.h"
#include "core/stream/sock_diag.h"
#include "core/transport/shm/shm_channel.h"
#include "core/transport/shm/shm_segment.h"

#ifndef SO_NETNS_COOKIE
#define SO_NETNS_COOKIE 71
#endif

namespace rsock::stream {
namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kFirstRetryNs =
    kMs / 2;  // the peer's threshold is passed at about the same time
constexpr uint64_t kLastRetryNs = 2'000 * kMs;
constexpr uint32_t kMaxRetries = 14;         // about 6 s in all
constexpr uint64_t kListenNs = 8'000 * kMs;  // as long as a caller goes on trying
constexpr uint64_t kAnswerNs = 1'000 * kMs;  // one message of a peer's keeper
constexpr size_t kMaxAttempts = 256;         // each may hold a descriptor

enum class Phase : uint8_t { kRetry, kListen, kAwaitHello, kAwaitWelcome, kAwaitConfirm };

struct alignas(8) Attempt {
  Stream* stream = nullptr;
  uint32_t generation = 0;
  Phase phase = Phase::kRetry;
  bool over = false;
  uint32_t tries = 0;
  uint64_t due = 0;    // kRetry: when to call again; else when the wait for this message is over
  uint64_t until = 0;  // callee: when to stop listening
  wire::FourTuple tuple;
  wire::SocketName name;
  PeerFacts peer{};
  uint64_t own_cookie = 0;
  os::OwnedFd listener;
  os::OwnedFd connection;
  os::OwnedFd memfd;  // came with HELLO
  uint64_t nonce = 0;
  wire::SocketName peer_kick;
  std::unique_ptr<transport::ShmSegment> segment;
  uint8_t inbox[256];
  size_t inbox_size = 0;
};

std::vector<std::unique_ptr<Attempt>>& attempts() {
  static auto* list = new std::vector<std::unique_ptr<Attempt>>;
  return *list;
}

bool still_wanted(const Attempt& a) noexcept {
  return a.stream->owned_by(a.generation) && !a.stream->closed.load(std::memory_order_acquire) &&
         !a.stream->pinned.load(std::memory_order_relaxed);
}

void watch(Attempt& a, int fd) noexcept {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = reinterpret_cast<uint64_t>(&a) | static_cast<uint64_t>(KeeperTag::kAttempt);
  (void)os::epoll_ctl(keeper().epoll.get(), EPOLL_CTL_ADD, fd, &event);
}

void unwatch(int fd) noexcept {
  (void)os::epoll_ctl(keeper().epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
}

/// The attempt ends without a channel; the stream stays on TCP for `reason`.
void give_up(Attempt& a, Reason reason) noexcept {
  if (a.over) return;
  a.over = true;
  if (a.stream->owned_by(a.generation)) {
    a.stream->not_lifted.store(reason, std::memory_order_relaxed);
    RSOCK_LOG(kInfo, "fd %d: stays on TCP: %s", a.stream->fd.load(std::memory_order_relaxed),
              reason);
  }
}

void drop_connection(Attempt& a) noexcept {
  a.connection.reset();
  a.memfd.reset();
  a.segment.reset();
  a.inbox_size = 0;
}

void retry_later(Attempt& a, Reason reason) noexcept {
  drop_connection(a);
  if (++a.tries > kMaxRetries) return give_up(a, reason);
  a.phase = Phase::kRetry;
  a.due = monotonic_ns() + std::min(kLastRetryNs, kFirstRetryNs << std::min(a.tries, 20u));
}

void back_to_listening(Attempt& a) noexcept {
  drop_connection(a);
  a.phase = Phase::kListen;
  a.due = a.until;
}

// --- checks
// ------------------------------------------------------------------------------------------

/// Options set before the stream was known, whose effect only the kernel reproduces.
Reason kernel_only_option(int fd) noexcept {
  if (const auto flags = os::fcntl(fd, F_GETFL); flags && (*flags & O_ASYNC) != 0) return "O_ASYNC";
  const auto on = [fd](int level, int name) {
    const auto v = os::getsockopt_int(fd, level, name);
    return v && *v > 0;
  };
  if (const auto v = os::getsockopt_int(fd, SOL_SOCKET, SO_RCVLOWAT); v && *v > 1)
    return "SO_RCVLOWAT";
  if (on(SOL_SOCKET, SO_ZEROCOPY)) return "SO_ZEROCOPY";
  if (on(SOL_SOCKET, SO_TIMESTAMP)) return "SO_TIMESTAMP";
  if (on(SOL_SOCKET, SO_OOBINLINE)) return "SO_OOBINLINE";
  if (on(IPPROTO_TCP, TCP_INQ)) return "TCP_INQ";
  return nullptr;
}

std::optional<wire::FourTuple> tuple_of(int fd) noexcept {
  sockaddr_storage local;
  sockaddr_storage remote;
  socklen_t local_len = sizeof(local);
  socklen_t remote_len = sizeof(remote);
  if (!os::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &local_len) ||
      !os::getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &remote_len)) {
    return std::nullopt;
  }
  return wire::FourTuple::from(reinterpret_cast<sockaddr*>(&local), local_len,
                               reinterpret_cast<sockaddr*>(&remote), remote_len);
}

uint64_t option_u64(int fd, int name) noexcept {
  uint64_t v = 0;
  socklen_t len = sizeof(v);
  return os::getsockopt(fd, SOL_SOCKET, name, &v, &len) ? v : 0;
}

/// The Unix peer must be root or who owns the other end of the TCP connection (D11).
bool peer_may_speak(const Attempt& a) noexcept {
  ucred credentials{};
  socklen_t len = sizeof(credentials);
  if (!os::getsockopt(a.connection.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &len))
    return false;
  return credentials.uid == 0 || credentials.uid == a.peer.uid;
}

/// Looks at the stream and its connection; fills the attempt. A reason if it must stay on TCP.
Reason examine(Attempt& a) noexcept {
  Stream& s = *a.stream;
  const int fd = s.fd.load(std::memory_order_relaxed);
  {
    MutexLock lock(s.rx.mutex);
    if (!sole_holder(s)) return "shared with a forked process";
  }
  if (!config().allow_shm) return "no RDMA device";
  if (const Reason r = kernel_only_option(fd); r != nullptr) return r;
  const auto tuple = tuple_of(fd);
  if (!tuple) return "not connected";
  if (tuple->is_to_itself()) return "connected to itself";
  a.tuple = *tuple;
  const auto facts = find_socket(tuple->reverse());
  if (!facts) return facts.error() == ENOENT ? "the peer is on another host" : "sock_diag refused";
  a.peer = *facts;
  a.own_cookie = option_u64(fd, SO_COOKIE);
  a.name = wire::rendezvous_name(*tuple, option_u64(fd, SO_NETNS_COOKIE));
  return nullptr;
}

// --- the agreed end
// ----------------------------------------------------------------------------------

/// Both keepers agree: the channel goes under the stream.
bool lift(Attempt& a, bool caller) noexcept {
  Stream& s = *a.stream;
  unwatch(a.connection.get());
  std::shared_ptr<Channel> channel =
      transport::make_shm_channel(std::move(*a.segment), std::move(a.connection), caller);
  a.segment.reset();
  if (!attach(s, a.generation, std::move(channel), a.nonce, a.peer_kick)) return false;
  remember_attached(s, a.nonce);
  a.over = true;
  RSOCK_LOG(kInfo, "fd %d: on shared memory", s.fd.load(std::memory_order_relaxed));
  return true;
}

bool send_message(Attempt& a, const uint8_t* bytes, size_t n, int passed_fd) noexcept {
  iovec iov{const_cast<uint8_t*>(bytes), n};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr msg{};
  msg.msg_iov = &iov;
  msg.msg_iovlen = 1;
  if (passed_fd >= 0) {
    msg.msg_control = control;
    msg.msg_controllen = sizeof(control);
    cmsghdr* c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &passed_fd, sizeof(int));
  }
  const auto sent = os::sendmsg(a.connection.get(), &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent && *sent == n;
}

/// Reads towards `want` bytes, never past them (a ring may follow CONFIRM). Takes a passed
/// descriptor. 1: complete, 0: more to come, -1: the peer is gone or misbehaves.
int read_message(Attempt& a, size_t want, os::OwnedFd* passed) noexcept {
  while (a.inbox_size < want) {
    iovec iov{a.inbox + a.inbox_size, want - a.inbox_size};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)];
    msghdr msg{};
    msg.msg_iov = &iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control;
    msg.msg_controllen = sizeof(control);
    const auto got = os::recvmsg(a.connection.get(), &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (!got) return got.error() == EAGAIN ? 0 : -1;
    if (*got == 0) return -1;
    for (cmsghdr* c = CMSG_FIRSTHDR(&msg); c != nullptr; c = CMSG_NXTHDR(&msg, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
        os::OwnedFd owned(fd);
        if (passed != nullptr && !*passed) *passed = std::move(owned);  // surplus ones are closed
      }
    }
    a.inbox_size += *got;
  }
  return 1;
}

// --- caller
// ------------------------------------------------------------------------------------------

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

void say_hello(Attempt& a) noexcept {
  const uint32_t ring_bytes = ring_bytes_now();
  auto created = transport::create_segment(ring_bytes);
  if (!created) return give_up(a, "no memory for a channel");
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
  a.phase = Phase::kAwaitWelcome;
  a.due = monotonic_ns() + kAnswerNs;
  watch(a, a.connection.get());
}

void call_peer(Attempt& a) noexcept {
  const auto fd = os::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (!fd) return give_up(a, "no descriptor left");
  auto owned = os::raise(*fd);
  if (!owned) return give_up(a, "no descriptor left");
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
  if (!lift(a, true)) give_up(a, "closed or shared meanwhile");
}

// --- callee
// ------------------------------------------------------------------------------------------

void listen_for_peer(Attempt& a) noexcept {
  const auto fd = os::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (!fd) return give_up(a, "no descriptor left");
  auto owned = os::raise(*fd);
  if (!owned) return give_up(a, "no descriptor left");
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(a.name, &address);
  const auto bound = os::bind(owned->get(), reinterpret_cast<sockaddr*>(&address), len);
  if (!bound || !os::listen(owned->get(), 4)) {
    if (!bound && bound.error() == EADDRINUSE) {
      count_refusal("rendezvous name taken");
      if (a.tries < 4) return retry_later(a, "the rendezvous name is taken");
    }
    return give_up(a, "the rendezvous name is taken");
  }
  a.listener = std::move(*owned);
  a.phase = Phase::kListen;
  a.due = a.until = monotonic_ns() + kListenNs;
  watch(a, a.listener.get());
}

void on_caller(Attempt& a) noexcept {
  const auto fd = os::accept4(a.listener.get(), SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (!fd) return;
  if (a.phase != Phase::kListen) {  // one at a time: a second caller is turned away
    (void)os::close(*fd);
    return;
  }
  auto owned = os::raise(*fd);
  if (!owned) return;
  a.connection = std::move(*owned);
  if (!peer_may_speak(a)) {
    count_refusal("caller is another user");
    return back_to_listening(a);
  }
  a.phase = Phase::kAwaitHello;
  a.due = monotonic_ns() + kAnswerNs;
  watch(a, a.connection.get());
}

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
  if (!lift(a, false)) return give_up(a, "closed or shared meanwhile");
  attend(*a.stream);  // the caller may be ready already
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
      return give_up(a, "the peer does not answer");
    case Phase::kListen:
      return give_up(a, "the peer does not answer");
  }
}

}  // namespace

void start_attempt(Stream& s, uint32_t generation) noexcept {
  auto attempt = std::make_unique<Attempt>();
  attempt->stream = &s;
  attempt->generation = generation;
  if (attempts().size() >= kMaxAttempts) return give_up(*attempt, "too many lifts at once");
  if (!still_wanted(*attempt)) return give_up(*attempt, "closed or pinned");
  if (const Reason reason = examine(*attempt); reason != nullptr) return give_up(*attempt, reason);
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
      on_hello(*a);
      break;
    case Phase::kAwaitWelcome:
      on_welcome(*a);
      break;
    case Phase::kAwaitConfirm:
      on_caller(*a);
      on_confirm(*a);
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
  for (auto& a : attempts()) {
    a->listener.reset();
    a->connection.reset();
    (void)a.release();  // the parent's thread may have been inside it: leak rather than destroy
  }
  attempts().clear();
}

}  // namespace rsock::stream
