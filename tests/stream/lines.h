// Lines without a keeper: their owner notes what it hears, the test turns the crank. And a peer
// that is a plain socket.
#pragma once

#include <netinet/tcp.h>
#include <sys/epoll.h>

#include "core/stream/line.h"
#include "tests/stream/loopback.h"

namespace rsock::testing {

using stream::Line;

struct NotingOwner final : stream::LineOwner {
  void on_open(Line&) noexcept override { ++opened; }
  void on_down(Line&, stream::Reason r) noexcept override {
    ++downs;
    reason = r;
  }
  void on_want(Line&, const wire::Want& m) noexcept override { wants.push_back(m); }
  void on_offer(Line&, const wire::Offer& m) noexcept override { offers.push_back(m); }
  void on_word(Line&, const wire::WordMessage& m) noexcept override { words.push_back(m); }

  int opened = 0;
  int downs = 0;
  std::string reason;
  std::vector<wire::Want> wants;
  std::vector<wire::Offer> offers;
  std::vector<wire::WordMessage> words;
};

/// A connection of loopback, both ends plain and non-blocking.
struct Sockets {
  Sockets() {
    Connection c = Connection::make(false, false);
    left = std::exchange(c.left, -1);
    right = std::exchange(c.right, -1);
    set_nonblocking(left);
    set_nonblocking(right);
    const int on = 1;  // what is said is there when the line is turned
    ::setsockopt(right, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  int left;
  int right;
};

inline std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

/// The line on one end of a connection; the other is a socket that the test speaks on.
struct LineAndSocket {
  explicit LineAndSocket(std::string shared_key = "", bool opener = false) : key(shared_key) {
    line = std::make_shared<Line>(owner, os::OwnedFd(sockets.left), opener, bytes_of(key), 11);
    line->begin();
    turn();
  }
  ~LineAndSocket() { ::close(sockets.right); }
  void turn() { line->on_event(EPOLLIN | EPOLLOUT); }
  void say(const void* data, size_t n) {
    EXPECT_EQ(::send(sockets.right, data, n, MSG_NOSIGNAL), static_cast<ssize_t>(n));
    turn();
  }
  template <typename M, size_t N>
  void say_message(const M& m, uint8_t (&bytes)[N]) {
    wire::encode(m, bytes);
    say(bytes, N);
  }
  /// What the line has said, exactly so many bytes.
  std::string hear(size_t n) {
    std::string in(n, '\0');
    const ssize_t got = ::recv(sockets.right, in.data(), n, MSG_DONTWAIT);
    in.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return in;
  }
  wire::Greeting hear_greeting() {
    const std::string in = hear(wire::kGreetingSize);
    const auto m = wire::decode_greeting(reinterpret_cast<const uint8_t*>(in.data()), in.size());
    EXPECT_TRUE(m);
    return m ? *m : wire::Greeting{};
  }
  void greet(const wire::Greeting& g) {
    uint8_t bytes[wire::kGreetingSize];
    say_message(g, bytes);
  }
  void prove(const wire::Mac& mac) {
    uint8_t bytes[wire::kProofSize];
    say_message(wire::Proof{mac}, bytes);
  }
  void say_word(const wire::WordMessage& m) {
    uint8_t bytes[wire::kWordSize];
    say_message(m, bytes);
  }

  std::string key;
  NotingOwner owner;
  Sockets sockets;
  std::shared_ptr<Line> line;
};

}  // namespace rsock::testing
