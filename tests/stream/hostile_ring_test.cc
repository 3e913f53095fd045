// A peer that agreed on a channel honestly and then writes lies into the memory that both ends map.
// What TCP bytes mean after that nobody can know, so the stream fails with ECONNRESET; it never
// crashes, hangs, or hands out bytes from outside the ring.

#include <linux/futex.h>

#include <climits>
#include <random>
#include <thread>

#include "tests/stream/impostor.h"

namespace rsock {
namespace {

using namespace rsock::testing;

/// A stream that listens for its caller, an impostor that has called, and the memory between them.
struct Agreed {
  Agreed() : connection(connect_to_impostor(StreamIs::kCallee)), peer(connection.right) {
    wake_interest(connection);
    EXPECT_TRUE(peer.agree_as_caller());
    EXPECT_TRUE(eventually([this] { return has_channel(connection.left); }));
    page = peer.memory.page;
  }
  wire::DirectionWords& to_stream() { return page->direction[0]; }
  wire::DirectionWords& from_stream() { return page->direction[1]; }
  std::byte* ring_to_stream() {
    return reinterpret_cast<std::byte*>(page) + wire::kControlPageSize;
  }
  int fd() const { return connection.left; }
  Stream& stream() const { return *FdTable::stream(connection.left); }

  /// The stream's keeper looks, and whoever sleeps wakes.
  void make_it_look() {
    peer.kick(peer.good_hello().nonce);
    for (wire::DirectionWords* d : {&to_stream(), &from_stream()}) {
      for (std::atomic<uint32_t>* bell : {&d->rx_bell, &d->tx_bell}) {
        bell->fetch_add(1, std::memory_order_release);
        ask_kernel(SYS_futex, bell, FUTEX_WAKE, INT_MAX, 0, 0, 0);
      }
    }
  }
  /// The stream sends into the ring: the impostor is ready, and no send is in the kernel.
  void lift_sending() {
    from_stream().ready.store(1, std::memory_order_release);
    make_it_look();
    EXPECT_TRUE(eventually([this] { return sends_in_ring(stream()); }));
  }
  /// The impostor sends into the ring from here on, like an honest peer. It has sent nothing on
  /// TCP.
  void start_sending() {
    EXPECT_TRUE(
        eventually([this] { return to_stream().ready.load(std::memory_order_acquire) != 0; }));
    to_stream().start.store(1, std::memory_order_release);
  }
  void publish(uint64_t tail) { to_stream().tail.store(tail, std::memory_order_seq_cst); }

  Connection connection;
  Impostor peer;
  wire::ControlPage* page = nullptr;
};

class HostileRing : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536", summary_.setting()}); }
  void TearDown() override { EXPECT_FALSE(summary_.line().empty()); }
  Summary summary_;
};

/// What recv() says when it has stopped saying EAGAIN.
long first_answer(int fd) {
  char buffer[256 * 1024];
  long r = -EAGAIN;
  EXPECT_TRUE(eventually(
      [&] { return (r = do_recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT)) != -EAGAIN; }));
  return r;
}
/// The first error of send(), when it has taken what it takes.
long first_refusal(int fd) {
  static const char bytes[200'000] = {};
  long r = 0;
  EXPECT_TRUE(eventually([&] {
    r = do_send(fd, bytes, sizeof(bytes), MSG_DONTWAIT);
    return r < 0 && r != -EAGAIN;
  }));
  return r;
}
/// A stream that was reset stays so: no byte in or out any more.
void expect_dead(int fd) {
  char byte;
  EXPECT_LE(do_recv(fd, &byte, 1, MSG_DONTWAIT), 0);
  EXPECT_NE(do_recv(fd, &byte, 1, MSG_DONTWAIT), -EAGAIN);
  EXPECT_LT(do_send(fd, "x", 1, MSG_DONTWAIT), 0);
  EXPECT_NE(do_send(fd, "x", 1, MSG_DONTWAIT), -EAGAIN);
}

TEST_F(HostileRing, AnHonestImpostorIsUnderstood) {
  Agreed a;
  a.start_sending();
  memcpy(a.ring_to_stream(), "hello", 5);
  a.publish(5);
  char buffer[16] = {};
  ASSERT_TRUE(
      eventually([&] { return do_recv(a.fd(), buffer, sizeof(buffer), MSG_DONTWAIT) == 5; }));
  EXPECT_STREQ(buffer, "hello");
  a.lift_sending();
  EXPECT_EQ(do_send(a.fd(), "back", 4), 4);
  EXPECT_EQ(a.from_stream().tail.load(), 4u);
}

TEST_F(HostileRing, ATailBeyondTheRingResetsTheStream) {
  for (const uint64_t tail :
       {uint64_t{kRing} + 1, uint64_t{1} << 40, ~uint64_t{0}, uint64_t{1} << 63}) {
    Agreed a;
    a.start_sending();
    a.publish(tail);
    EXPECT_EQ(first_answer(a.fd()), -ECONNRESET) << tail;
    expect_dead(a.fd());
    char byte;
    EXPECT_LE(do_recv(a.connection.right, &byte, 1), 0) << "the peer's kernel hears of it";
  }
}

TEST_F(HostileRing, ATailThatMovesBackResetsTheStream) {
  Agreed a;
  a.start_sending();
  a.publish(1000);
  EXPECT_EQ(first_answer(a.fd()), 1000);
  a.publish(999);
  EXPECT_EQ(first_answer(a.fd()), -ECONNRESET);
  expect_dead(a.fd());
}

TEST_F(HostileRing, ABlockedReaderWakesUpAndFails) {
  Agreed a;
  a.start_sending();
  a.publish(1);
  EXPECT_EQ(first_answer(a.fd()), 1);
  std::atomic<long> answer{1};
  std::thread reader([&] {
    char buffer[64];
    answer = do_recv(a.fd(), buffer, sizeof(buffer));
  });
  nap_us(20'000);
  a.publish(~uint64_t{0});
  EXPECT_TRUE(eventually([&] {
    a.make_it_look();
    return answer != 1;
  }));
  reader.join();
  EXPECT_EQ(answer, -ECONNRESET);
}

TEST_F(HostileRing, AHeadBeyondTheTailResetsTheSender) {
  for (const uint64_t head : {uint64_t{1} << 40, wire::kHeadCount, uint64_t{kRing} * 4}) {
    Agreed a;
    a.lift_sending();
    EXPECT_EQ(do_send(a.fd(), "some", 4), 4);
    a.from_stream().head.store(head, std::memory_order_seq_cst);
    EXPECT_EQ(first_refusal(a.fd()), -ECONNRESET) << head;
    expect_dead(a.fd());
  }
}

TEST_F(HostileRing, AHeadThatMovesBackResetsTheSender) {
  Agreed a;
  a.lift_sending();
  EXPECT_EQ(do_send(a.fd(), std::string(60'000, 'x').data(), 60'000), 60'000);
  a.from_stream().head.store(50'000, std::memory_order_seq_cst);
  EXPECT_EQ(do_send(a.fd(), std::string(30'000, 'x').data(), 30'000), 30'000);
  a.from_stream().head.store(10, std::memory_order_seq_cst);
  EXPECT_EQ(first_refusal(a.fd()), -ECONNRESET);
  expect_dead(a.fd());
}

TEST_F(HostileRing, AFreezeAtAnImpossibleByteResetsTheStream) {
  for (const uint64_t x : {uint64_t{1} << 40, uint64_t{5}, wire::kHeadCount}) {
    Agreed a;
    a.lift_sending();
    EXPECT_EQ(do_send(a.fd(), "some", 4), 4);
    a.from_stream().head.store(wire::kHeadSealed | x, std::memory_order_seq_cst);
    a.make_it_look();
    // A send before that would make the fifth byte a possible one: a short one does not look.
    EXPECT_TRUE(eventually([&] { return !sends_in_ring(a.stream()); }));
    const long r = do_send(a.fd(), "more", 4, MSG_DONTWAIT);
    EXPECT_TRUE(r == -ECONNRESET || first_refusal(a.fd()) == -ECONNRESET) << x;
    expect_dead(a.fd());
  }
}

TEST_F(HostileRing, AFreezeBehindWhatWasReleasedResetsTheStream) {
  Agreed a;
  a.lift_sending();
  const std::string bytes(40'000, 'x');
  EXPECT_EQ(do_send(a.fd(), bytes.data(), bytes.size()), 40'000);
  a.from_stream().head.store(40'000, std::memory_order_seq_cst);
  EXPECT_EQ(do_send(a.fd(), bytes.data(), bytes.size()), 40'000);
  // Byte 0 was overwritten by the second send: it can't be replayed.
  a.from_stream().head.store(wire::kHeadSealed | 0, std::memory_order_seq_cst);
  a.make_it_look();
  EXPECT_EQ(first_refusal(a.fd()), -ECONNRESET);
  expect_dead(a.fd());
}

TEST_F(HostileRing, AStartBeforeWhatTcpBroughtResetsTheStream) {
  Agreed a;
  EXPECT_TRUE(eventually([&] { return a.to_stream().ready.load(std::memory_order_acquire) != 0; }));
  ASSERT_EQ(::send(a.connection.right, "12345", 5, 0), 5);
  EXPECT_EQ(first_answer(a.fd()), 5);
  a.to_stream().start.store(1, std::memory_order_release);
  a.publish(3);
  EXPECT_EQ(first_answer(a.fd()), -ECONNRESET);
  expect_dead(a.fd());
}

TEST_F(HostileRing, AStartThatTcpNeverReachesIsNoCleanEnd) {
  Agreed a;
  EXPECT_TRUE(eventually([&] { return a.to_stream().ready.load(std::memory_order_acquire) != 0; }));
  a.to_stream().start.store(1'000'001, std::memory_order_release);
  ASSERT_EQ(::send(a.connection.right, "12345", 5, 0), 5);
  EXPECT_EQ(first_answer(a.fd()), 5);
  ::shutdown(a.connection.right, SHUT_WR);
  EXPECT_EQ(first_answer(a.fd()), -ECONNRESET);
}

TEST_F(HostileRing, AScribbledHeadOfTheReaderResetsTheStream) {
  for (const uint64_t head : {uint64_t{17}, uint64_t{1} << 61, wire::kHeadEnded | 99}) {
    Agreed a;
    a.start_sending();
    a.publish(1000);
    EXPECT_EQ(first_answer(a.fd()), 1000);
    a.to_stream().head.store(head, std::memory_order_seq_cst);
    a.publish(2000);
    EXPECT_EQ(first_answer(a.fd()), -ECONNRESET) << head;
  }
}

TEST_F(HostileRing, ARecallWithoutItsReplayIsNoCleanEnd) {
  Agreed a;
  a.start_sending();
  a.publish(1000);
  EXPECT_EQ(first_answer(a.fd()), 1000);
  a.publish(2000);
  a.to_stream().head.fetch_or(wire::kHeadSealed, std::memory_order_seq_cst);
  a.make_it_look();
  ::shutdown(a.connection.right, SHUT_WR);
  EXPECT_EQ(first_answer(a.fd()), -ECONNRESET);
}

TEST_F(HostileRing, BytesOnTcpBesideAnOpenRingResetTheStream) {
  Agreed a;
  a.start_sending();
  a.publish(10);
  EXPECT_EQ(first_answer(a.fd()), 10);
  ASSERT_EQ(::send(a.connection.right, "behind both backs", 17, 0), 17);
  EXPECT_EQ(first_answer(a.fd()), -ECONNRESET);
}

TEST_F(HostileRing, ATailThatMovesAfterTheEndHurtsNobody) {
  Agreed a;
  a.start_sending();
  a.publish(100);
  a.to_stream().head.fetch_or(wire::kHeadEnded, std::memory_order_seq_cst);
  for (uint64_t tail = 200; tail < 20 * kRing; tail += 7777) {
    char buffer[4096];
    a.publish(tail);
    const long r = do_recv(a.fd(), buffer, sizeof(buffer), MSG_DONTWAIT);
    ASSERT_TRUE(r > 0 || r == -EAGAIN || r == -ECONNRESET) << r;
    if (r == -ECONNRESET) break;
  }
}

TEST_F(HostileRing, ADoorbellFloodDelaysNobody) {
  Agreed a;
  a.start_sending();
  const std::string rings(100'000, '\1');
  for (int i = 0; i < 20; ++i)
    (void)::send(a.peer.call, rings.data(), rings.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  EXPECT_EQ(poll_one(a.fd(), POLLIN, 20), 0);
  a.publish(1);
  (void)::send(a.peer.call, "\1", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  EXPECT_EQ(poll_one(a.fd(), POLLIN, 10'000), POLLIN);
  EXPECT_EQ(first_answer(a.fd()), 1);
}

TEST_F(HostileRing, LettingGoWithoutAWordPutsUnreadBytesOnTcp) {
  Agreed a;
  a.lift_sending();
  EXPECT_EQ(do_send(a.fd(), "unread", 6), 6);
  a.peer.hang_up();
  char buffer[16] = {};
  size_t got = 0;
  while (got < 6) {
    const ssize_t r = ::recv(a.connection.right, buffer + got, sizeof(buffer) - got, 0);
    ASSERT_GT(r, 0);
    got += static_cast<size_t>(r);
  }
  EXPECT_STREQ(buffer, "unread");
  EXPECT_TRUE(echoes(a.connection.left, a.connection.right, 100'000));
}

TEST_F(HostileRing, KicksOfAnyKindAreHints) {
  Agreed a;
  sockaddr_un to;
  const socklen_t len = wire::to_sockaddr(a.peer.peer_keeper, &to);
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  std::mt19937 random(7);
  for (int i = 0; i < 500; ++i) {
    uint8_t bytes[300];
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    (void)::sendto(fd, bytes, random() % sizeof(bytes), MSG_DONTWAIT,
                   reinterpret_cast<sockaddr*>(&to), len);
    a.peer.kick(random() % 2 == 0 ? a.peer.good_hello().nonce : random());
  }
  ::close(fd);
  a.start_sending();
  a.publish(10);
  EXPECT_EQ(first_answer(a.fd()), 10);
  EXPECT_NE(summary_.line().find("\"message of the wrong size\":"), std::string::npos);
}

/// Any word, any value, at any moment: the stream may fail, but nothing else may happen.
TEST_F(HostileRing, AMadPeerNeitherCrashesNorHangsUs) {
  std::mt19937_64 random(std::random_device{}());
  for (int round = 0; round < 60; ++round) {
    Agreed a;
    a.from_stream().ready.store(1, std::memory_order_release);
    a.start_sending();
    a.make_it_look();
    std::atomic<bool> stop{false};
    std::thread mad([&, dice = random()] {
      std::mt19937_64 r(dice);
      while (!stop.load()) {
        auto& d = a.page->direction[r() % 2];
        const uint64_t small = r() % (3 * kRing);
        const uint64_t values[] = {small, small | wire::kHeadSealed, small | wire::kHeadEnded, r(),
                                   0};
        const uint64_t v = values[r() % 5];
        switch (r() % 9) {
          case 0:
            d.tail = v;
            break;
          case 1:
            d.head = v;
            break;
          case 2:
            d.start = v;
            break;
          case 3:
            d.ready = static_cast<uint32_t>(v);
            break;
          case 4:
            d.replayed = static_cast<uint32_t>(v);
            break;
          case 5:
            d.rx_sleep = static_cast<uint32_t>(v);
            break;
          case 6:
            d.tx_sleep = static_cast<uint32_t>(v);
            break;
          case 7:
            a.page->ring_size = static_cast<uint32_t>(v);
            break;
          case 8:
            (void)::send(a.connection.right, "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
            break;
        }
        if (r() % 16 == 0) a.make_it_look();
        if (r() % 16 == 0) nap_us(50);
      }
    });
    char buffer[100'000];
    for (int i = 0; i < 200; ++i) {
      (void)do_send(a.fd(), buffer, 1 + random() % sizeof(buffer), MSG_DONTWAIT);
      (void)do_recv(a.fd(), buffer, 1 + random() % sizeof(buffer), MSG_DONTWAIT);
      (void)poll_one(a.fd(), POLLIN | POLLOUT, 0);
      if (i == 150) stream::set_down(a.stream(), "test");
      if (i % 50 == 49) nap_us(200);
    }
    stop = true;
    mad.join();
  }
}

}  // namespace
}  // namespace rsock
