#include "core/stream/line.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <cstring>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/transport/endpoint.h"
#include "core/wire/mac.h"

namespace rsock::stream {
namespace {

constexpr int kReadsAtOnce = 16;  // then others have their turn
constexpr char kWrongKey[] = "wrong or missing shared key";

bool in_common(const wire::Greeting& a, const wire::Greeting& b) noexcept {
  return a.version_min <= b.version_max && b.version_min <= a.version_max;
}

wire::Endpoint name_of(int fd, Result<void> (*ask)(int, sockaddr*, socklen_t*) noexcept) noexcept {
  sockaddr_storage address{};
  socklen_t len = sizeof(address);
  if (!ask(fd, reinterpret_cast<sockaddr*>(&address), &len)) return {};
  return transport::to_endpoint(reinterpret_cast<sockaddr*>(&address)).value_or(wire::Endpoint{});
}

void set_option(int fd, int level, int name, int value) noexcept {
  (void)os::setsockopt(fd, level, name, &value, sizeof(value));
}

/// A peer that vanished without a word (power, network) is found also on a line that is silent for
/// days.
void keep_alive(int fd) noexcept {
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 20);
  // Firewalls hear of it often, but it dies no sooner than the streams would over TCP
  // (tcp_retries2: some 15 minutes).
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 20);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 45);
}

}  // namespace

Line::Line(LineOwner& owner, os::OwnedFd fd, bool opener, std::span<const uint8_t> key,
           uint64_t own) noexcept
    : owner_(owner),
      opener_(opener),
      key_(key),
      fd_(std::move(fd)),
      queue_(new uint8_t[kQueueBytes]) {
  mine_.keyed = !key.empty();
  mine_.keeper = own;
  used_ns_ = monotonic_ns();
  deadline_ = used_ns_ + kGreetNs;
}

Line::~Line() = default;

void Line::begin() noexcept RSOCK_NO_TSA {
  const int fd = fd_.get();  // nobody else has it yet
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  keep_alive(fd);
  if (!opener_) {
    on_connected();
    if (is_down()) return;
  }
  const uint32_t room = state_ == State::kConnecting ? static_cast<uint32_t>(EPOLLOUT) : 0;
  (void)keeper_watch(fd, EPOLLIN | EPOLLRDHUP | room,
                     tagged(static_cast<KeeperSource*>(this), KeeperTag::kSource));
}

void Line::on_connected() noexcept {
  {
    MutexLock lock(mutex_);
    local_ = name_of(fd_.get(), &os::getsockname);
    remote_ = name_of(fd_.get(), &os::getpeername);
  }
  if (remote_.port == 0) return end("the peer's keeper can't be reached");
  greet();
}

void Line::greet() noexcept {
  if (!os::getrandom(&mine_.challenge, sizeof(mine_.challenge))) return end("no random numbers");
  state_ = State::kGreeting;
  uint8_t bytes[wire::kGreetingSize];
  wire::encode(mine_, bytes);
  send_message(bytes, sizeof(bytes));
}

void Line::on_event(uint32_t events) noexcept {
  if (is_down()) return;
  if (state_ == State::kConnecting) {
    if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) == 0) return;
    int fd;
    {
      MutexLock lock(mutex_);
      fd = fd_.get();
    }
    const auto error = os::getsockopt_int(fd, SOL_SOCKET, SO_ERROR);
    if (!error || *error != 0) return end("the peer's keeper can't be reached");
    on_connected();
    if (is_down()) return;
  }
  flush();
  if (!is_down()) read_some();
}

void Line::end(Reason reason) noexcept {
  if (is_down()) return;
  state_ = State::kDown;
  {
    MutexLock lock(mutex_);
    keeper_unwatch(fd_.get());
    // A forked child may hold a copy: the peer shall know all the same.
    (void)os::shutdown(fd_.get(), SHUT_RDWR);
    fd_.reset();
    queued_ = 0;
  }
  RSOCK_LOG(kDebug, "line: %s", reason);
  owner_.on_down(*this, reason);
}

void Line::refuse(Reason reason) noexcept {
  count_refusal(reason);
  end(reason);
}

// --- what comes --------------------------------------------------------------------------------

void Line::read_some() noexcept {
  int fd;
  {
    MutexLock lock(mutex_);
    fd = fd_.get();
  }
  for (int i = 0; i < kReadsAtOnce; ++i) {
    const auto got = os::recv(fd, inbox_ + inbox_size_, sizeof(inbox_) - inbox_size_, MSG_DONTWAIT);
    if (!got) {
      if (got.error() == EAGAIN || got.error() == EINTR) return;
      return end("the line to the peer's keeper broke");
    }
    if (*got == 0) return end("the peer's keeper is gone");
    inbox_size_ += *got;
    if (!parse()) return;
  }
}

bool Line::parse() noexcept {
  size_t at = 0;
  while (inbox_size_ - at >= sizeof(wire::HeaderWire)) {
    const auto head = wire::decode_line_head(inbox_ + at, inbox_size_ - at);
    if (!head) {
      refuse(head.error().reason);
      return false;
    }
    if (inbox_size_ - at < head->size) break;
    take_message(*head, inbox_ + at);
    if (is_down()) return false;
    at += head->size;
  }
  inbox_size_ -= at;
  memmove(inbox_, inbox_ + at, inbox_size_);
  return true;
}

void Line::take_message(const wire::LineHead& head, const uint8_t* data) noexcept {
  const auto obey = [&](const auto& decoded, auto&& act) {
    if (!decoded) return refuse(decoded.error().reason);
    act(*decoded);
  };
  using wire::LineType;
  // Each state takes one type, the open line the last three.
  const bool due = state_ == State::kGreeting  ? head.type == LineType::kGreeting
                   : state_ == State::kProving ? head.type == LineType::kProof
                                               : head.type >= LineType::kWant;
  if (!due) return refuse("line message out of turn");
  switch (head.type) {
    case LineType::kGreeting:
      return obey(wire::decode_greeting(data, head.size), [&](const auto& m) { on_greeting(m); });
    case LineType::kProof:
      return obey(wire::decode_proof(data, head.size), [&](const auto& m) { on_proof(m); });
    case LineType::kWant:
      return obey(wire::decode_want(data, head.size),
                  [&](const auto& m) { owner_.on_want(*this, m); });
    case LineType::kOffer:
      return obey(wire::decode_offer(data, head.size),
                  [&](const auto& m) { owner_.on_offer(*this, m); });
    case LineType::kWord:
      return obey(wire::decode_word(data, head.size),
                  [&](const auto& m) { owner_.on_word(*this, m); });
  }
}

void Line::on_greeting(const wire::Greeting& m) noexcept {
  theirs_ = m;
  if (!in_common(mine_, m)) return end("no protocol version in common");
  if (!key_.empty() && !m.keyed) return refuse(kWrongKey);
  if (key_.empty() && m.keyed) return end("the peer demands a shared key");
  // A mirror of our own greeting would prove itself with our own words; the role in the proof
  // forbids that, this too.
  if (m.challenge == mine_.challenge) return refuse(kWrongKey);
  state_ = State::kProving;
  uint8_t bytes[wire::kProofSize];
  wire::encode(wire::Proof{wire::prove(key_, opener_, mine_, m)}, bytes);
  send_message(bytes, sizeof(bytes));
}

void Line::on_proof(const wire::Proof& m) noexcept {
  const wire::Mac expected = wire::prove(key_, !opener_, theirs_, mine_);
  if (!wire::equal(expected, m.mac)) return refuse(kWrongKey);
  state_ = State::kOpen;
  owner_.on_open(*this);
}

// --- what goes ---------------------------------------------------------------------------------

void Line::want(const wire::Want& m) noexcept {
  uint8_t bytes[wire::kWantSize];
  wire::encode(m, bytes);
  send_message(bytes, sizeof(bytes));
}

void Line::offer(const wire::Offer& m) noexcept {
  uint8_t bytes[wire::kOfferSize];
  wire::encode(m, bytes);
  send_message(bytes, sizeof(bytes));
}

void Line::say(uint64_t nonce, wire::Word word, uint64_t value) noexcept {
  uint8_t bytes[wire::kWordSize];
  wire::encode(wire::WordMessage{nonce, word, value}, bytes);
  send_message(bytes, sizeof(bytes));
}

void Line::watch_locked(bool for_room) noexcept {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | (for_room ? static_cast<uint32_t>(EPOLLOUT) : 0);
  event.data.u64 = tagged(static_cast<KeeperSource*>(this), KeeperTag::kSource);
  (void)os::epoll_ctl(inside().state.epoll.get(), EPOLL_CTL_MOD, fd_.get(), &event);
}

/// A word was lost, and an order with a gap is none. Both keepers find the end by their next read.
void Line::break_locked() noexcept {
  broken_ = true;
  (void)os::shutdown(fd_.get(), SHUT_RDWR);
}

void Line::send_message(const uint8_t* data, size_t n) noexcept {
  MutexLock lock(mutex_);
  if (!fd_ || broken_) return;
  size_t done = 0;
  if (queued_ == 0) {
    const auto sent = os::send(fd_.get(), data, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent) done = *sent;
    // Of no memory for one packet (ENOBUFS) the connection knows nothing.
    if (!sent && !(sent.error() == EAGAIN) && !(sent.error() == EINTR)) return break_locked();
  }
  if (done == n) return;
  if (n - done > kQueueBytes - queued_) return break_locked();
  memcpy(queue_.get() + queued_, data + done, n - done);
  if (queued_ == 0) watch_locked(true);
  queued_ += n - done;
}

void Line::flush() noexcept {
  MutexLock lock(mutex_);
  const bool waited = state_ == State::kGreeting || queued_ != 0;
  while (queued_ != 0) {
    const auto sent = os::send(fd_.get(), queue_.get(), queued_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (!sent) return;  // EAGAIN; or an error, which the read meets
    queued_ -= *sent;
    memmove(queue_.get(), queue_.get() + *sent, queued_);
  }
  if (waited) watch_locked(false);
}

// --- what its channels call for ------------------------------------------------------------------

void Line::attention(uint64_t nonce) noexcept {
  {
    MutexLock lock(calls_mutex_);
    for (size_t i = 0; i < calls_.count; ++i) {
      if (calls_.nonce[i] == nonce) return;  // the keeper is awake, or will be
    }
    if (calls_.count < Calls::kMax) {
      calls_.nonce[calls_.count++] = nonce;
    } else {
      calls_.all = true;
    }
  }
  call_keeper();
}

Calls Line::take_calls() noexcept {
  MutexLock lock(calls_mutex_);
  return std::exchange(calls_, Calls{});
}

void Line::forget_in_child() noexcept RSOCK_NO_TSA {
  mutex_.reset_after_fork();
  calls_mutex_.reset_after_fork();
  fd_.reset();
  broken_ = true;
}

}  // namespace rsock::stream
