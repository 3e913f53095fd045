#include "core/wire/rendezvous.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace rsock::wire {
namespace {

using Bytes = std::vector<uint8_t>;

FourTuple some_tuple() {
  FourTuple t;
  t.local.address = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1};
  t.remote.address = t.local.address;
  t.local.port = 5201;
  t.remote.port = 43210;
  return t;
}

FourTuple some_v6_tuple() {
  FourTuple t;
  t.local.address = {0xfe, 0x80, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};
  t.remote.address = {0xfe, 0x80, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15};
  t.local.port = 65535;
  t.remote.port = 1;
  t.scope = 0xffffffff;
  return t;
}

Hello some_hello() {
  Hello m;
  m.nonce = 0x0123456789abcdef;
  m.socket_cookie = 77;
  m.ring_size = 1 << 20;
  m.tuple = some_tuple();
  m.keeper = keeper_name(1, 2);
  return m;
}

template <typename M>
Bytes bytes_of(const M& m) {
  constexpr size_t kSize = std::is_same_v<M, Hello>     ? kHelloSize
                           : std::is_same_v<M, Welcome> ? kWelcomeSize
                           : std::is_same_v<M, Confirm> ? kConfirmSize
                           : std::is_same_v<M, Kick>    ? kKickSize
                           : std::is_same_v<M, Where>   ? kWhereSize
                                                        : kHereSize;
  Bytes b(kSize);
  encode(m, b.data());
  return b;
}

std::string text(const SocketName& n) { return std::string(n.text, n.size); }

TEST(RendezvousHello, ComesBackAsItWasSent) {
  const Hello m = some_hello();
  const Bytes b = bytes_of(m);
  const auto back = decode_hello(b.data(), b.size());
  ASSERT_TRUE(back) << back.error().reason;
  EXPECT_EQ(back->nonce, m.nonce);
  EXPECT_EQ(back->socket_cookie, m.socket_cookie);
  EXPECT_EQ(back->ring_size, m.ring_size);
  EXPECT_EQ(back->tuple, m.tuple);
  EXPECT_EQ(text(back->keeper), text(m.keeper));
}

TEST(RendezvousHello, LayoutIsLittleEndianAtFixedPlaces) {
  const Bytes b = bytes_of(some_hello());
  ASSERT_EQ(b.size(), 120u);
  EXPECT_EQ(Bytes(b.begin(), b.begin() + 16),
            (Bytes{'R', 'K', 'S', 'K', 120, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0x10, 0}));
  EXPECT_EQ(Bytes(b.begin() + 16, b.begin() + 24),
            (Bytes{0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01}));
  EXPECT_EQ(b[64] | b[65] << 8, 5201);
}

/// A valid HELLO with one thing changed, and the reason with which it must be refused.
void refused(const char* reason, const std::function<void(HelloWire&)>& change,
             int error = EPROTO) {
  const Bytes b = bytes_of(some_hello());
  HelloWire w;
  std::memcpy(&w, b.data(), sizeof(w));
  change(w);
  const auto back = decode_hello(reinterpret_cast<const uint8_t*>(&w), sizeof(w));
  ASSERT_FALSE(back) << reason;
  EXPECT_STREQ(back.error().reason, reason);
  EXPECT_TRUE(back.error().error == error);
}

TEST(RendezvousHello, RefusesEveryFieldOutOfBounds) {
  refused("message magic", [](HelloWire& w) { w.header.magic ^= 1; });
  refused("message length", [](HelloWire& w) { w.header.length += 1; });
  refused("message type", [](HelloWire& w) { w.header.type = 2; });
  refused("version range upside down", [](HelloWire& w) { w.version_min = kProtocolVersion + 1; });
  refused(
      "no version in common", [](HelloWire& w) { w.version_min = w.version_max = kProtocolVersion + 1; },
      EPROTONOSUPPORT);
  refused(
      "no version in common", [](HelloWire& w) { w.version_min = w.version_max = 0; },
      EPROTONOSUPPORT);
  refused("ring size out of range", [](HelloWire& w) { w.ring_size = 0; });
  refused("ring size out of range", [](HelloWire& w) { w.ring_size = 1 << 15; });
  refused("ring size out of range", [](HelloWire& w) { w.ring_size = (1 << 20) + 1; });
  refused("ring size out of range", [](HelloWire& w) { w.ring_size = 1u << 31; });
  refused("port 0", [](HelloWire& w) { w.caller_port = 0; });
  refused("port 0", [](HelloWire& w) { w.callee_port = 0; });
  refused("ends of two families", [](HelloWire& w) { w.callee_address[0] = 1; });
  refused("the wrong end calls", [](HelloWire& w) { std::swap(w.caller_port, w.callee_port); });
  refused("the wrong end calls", [](HelloWire& w) { w.callee_port = w.caller_port; });
  refused("no keeper name", [](HelloWire& w) { w.keeper = {}; });
  refused("keeper name too long", [](HelloWire& w) { w.keeper.size = 48; });
  refused("keeper name too long", [](HelloWire& w) { w.keeper.size = 255; });
  refused("bytes behind the keeper name", [](HelloWire& w) { w.keeper.size -= 1; });
}

TEST(RendezvousHello, AcceptsARangeThatHoldsOurVersion) {
  Hello m = some_hello();
  m.version_min = 0;
  m.version_max = 9;
  const Bytes b = bytes_of(m);
  EXPECT_TRUE(decode_hello(b.data(), b.size()));
}

// Otherwise a peer could make us send datagrams to any program's abstract socket.
TEST(RendezvousHello, RefusesAKeeperNameThatIsNotAKeepers) {
  refused("keeper name without its prefix", [](HelloWire& w) { w.keeper.text[0] = 'x'; });
  refused("keeper name without its prefix", [](HelloWire& w) {
    w.keeper = {};
    w.keeper.size = sizeof(kKeeperPrefix) - 1;
    std::memcpy(w.keeper.text, kKeeperPrefix, w.keeper.size);
  });
}

std::vector<Bytes> one_of_each() {
  return {bytes_of(some_hello()), bytes_of(Welcome{.keeper = keeper_name(3, 4)}),
          bytes_of(Confirm{}),    bytes_of(Kick{5}),
          bytes_of(Where{5}),     bytes_of(Here{.line_port = 1})};
}

int accepted_by(const Bytes& b) {
  return bool(decode_hello(b.data(), b.size())) + bool(decode_welcome(b.data(), b.size())) +
         bool(decode_confirm(b.data(), b.size())) + bool(decode_kick(b.data(), b.size())) +
         bool(decode_where(b.data(), b.size())) + bool(decode_here(b.data(), b.size()));
}

TEST(RendezvousMessages, EveryTruncationIsRefusedWithoutReadingOn) {
  for (const Bytes& b : one_of_each()) {
    for (size_t n = 0; n < b.size(); ++n) {
      const Bytes cut(b.begin(), b.begin() + static_cast<long>(n));  // ASan guards its end
      EXPECT_EQ(accepted_by(cut), 0) << n;
    }
    Bytes longer = b;
    longer.push_back(0);
    EXPECT_EQ(accepted_by(longer), 0);
  }
}

TEST(RendezvousMessages, OneTypeIsNeverTakenForAnother) {
  for (const Bytes& b : one_of_each()) EXPECT_EQ(accepted_by(b), 1);
  ASSERT_EQ(kConfirmSize, kKickSize);
  ASSERT_EQ(kConfirmSize, kWhereSize);
}

TEST(RendezvousWelcome, ComesBackAsItWasSent) {
  Welcome m;
  m.nonce = 9;
  m.socket_cookie = 10;
  m.keeper = keeper_name(5, 6);
  const Bytes b = bytes_of(m);
  const auto back = decode_welcome(b.data(), b.size());
  ASSERT_TRUE(back) << back.error().reason;
  EXPECT_EQ(back->nonce, 9u);
  EXPECT_EQ(back->socket_cookie, 10u);
  EXPECT_EQ(back->verdict, Verdict::kOk);
  EXPECT_EQ(text(back->keeper), text(m.keeper));
}

TEST(RendezvousWelcome, NeedsAKeeperNameOnlyWhenItAgrees) {
  Bytes b = bytes_of(Welcome{.verdict = Verdict::kNotMine});
  EXPECT_TRUE(decode_welcome(b.data(), b.size()));
  b = bytes_of(Welcome{.verdict = Verdict::kOk});
  EXPECT_FALSE(decode_welcome(b.data(), b.size()));
}

TEST(RendezvousWelcome, RefusesUnknownVerdictsVersionsAndReservedBytes) {
  const Bytes good = bytes_of(Welcome{.verdict = Verdict::kNotNow});
  for (const size_t at : {8u, 10u, 12u, 15u}) {
    Bytes b = good;
    b[at] = 200;
    EXPECT_FALSE(decode_welcome(b.data(), b.size())) << at;
  }
}

TEST(RendezvousConfirm, ComesBackAndRefusesWhatItMust) {
  const Bytes good = bytes_of(Confirm{Verdict::kCredentials, 42});
  const auto back = decode_confirm(good.data(), good.size());
  ASSERT_TRUE(back);
  EXPECT_EQ(back->verdict, Verdict::kCredentials);
  EXPECT_EQ(back->nonce, 42u);
  for (const size_t at : {0u, 4u, 6u, 8u, 10u, 12u}) {
    Bytes b = good;
    b[at] = 200;
    EXPECT_FALSE(decode_confirm(b.data(), b.size())) << at;
  }
}

TEST(RendezvousKick, ComesBackAndRefusesWhatItMust) {
  const Bytes good = bytes_of(Kick{0xfedcba9876543210});
  ASSERT_TRUE(decode_kick(good.data(), good.size()));
  EXPECT_EQ(decode_kick(good.data(), good.size())->nonce, 0xfedcba9876543210u);
  EXPECT_EQ(decode_kick(good.data(), good.size())->lane, 0u);
  const Bytes lane = bytes_of(Kick{1, 2});
  ASSERT_TRUE(decode_kick(lane.data(), lane.size()));
  EXPECT_EQ(decode_kick(lane.data(), lane.size())->lane, 2u);
  for (size_t at = 0; at < 16; ++at) {
    Bytes b = good;
    b[at] ^= 0x40;
    EXPECT_FALSE(decode_kick(b.data(), b.size())) << at;
  }
}

TEST(RendezvousWhere, ComesBackAndRefusesWhatItMust) {
  const Bytes good = bytes_of(Where{0xfedcba9876543210});
  ASSERT_TRUE(decode_where(good.data(), good.size()));
  EXPECT_EQ(decode_where(good.data(), good.size())->nonce, 0xfedcba9876543210u);
  for (size_t at = 0; at < 16; ++at) {
    Bytes b = good;
    b[at] ^= 0x40;
    EXPECT_FALSE(decode_where(b.data(), b.size())) << at;
  }
}

TEST(RendezvousHere, ComesBackAsItWasSent) {
  const Bytes b = bytes_of(Here{Verdict::kOk, 4321, 9, 0x0123456789abcdef});
  const auto back = decode_here(b.data(), b.size());
  ASSERT_TRUE(back);
  EXPECT_EQ(back->verdict, Verdict::kOk);
  EXPECT_EQ(back->line_port, 4321);
  EXPECT_EQ(back->nonce, 9u);
  EXPECT_EQ(back->keeper, 0x0123456789abcdefu);
  const Bytes no = bytes_of(Here{.verdict = Verdict::kNotMine, .nonce = 9});
  EXPECT_TRUE(decode_here(no.data(), no.size()));
}

TEST(RendezvousHere, RefusesEveryFieldOutOfBounds) {
  const auto bad = [](const char* reason, const std::function<void(HereWire&)>& change,
                      int error = EPROTO) {
    Bytes b = bytes_of(Here{.line_port = 1});
    change(*reinterpret_cast<HereWire*>(b.data()));
    const auto back = decode_here(b.data(), b.size());
    ASSERT_FALSE(back) << reason;
    EXPECT_STREQ(back.error().reason, reason);
    EXPECT_TRUE(back.error().error == error);
  };
  bad(
      "version not spoken", [](HereWire& w) { w.version = kProtocolVersion + 1; }, EPROTONOSUPPORT);
  bad("agreed without a port", [](HereWire& w) { w.line_port = 0; });
  bad("a port in a refusal", [](HereWire& w) { w.verdict = 2; });
  bad("unknown verdict", [](HereWire& w) { w.verdict = kLastVerdict + 1; });
  bad("reserved bytes used", [](HereWire& w) { w.zero = 0x100; });
}

TEST(RendezvousName, BothEndsComputeTheSame) {
  const FourTuple t = some_tuple();
  EXPECT_EQ(text(rendezvous_name(t, 7)), text(rendezvous_name(t.reverse(), 7)));
  EXPECT_EQ(text(rendezvous_name(t, 7)),
            "rsock1/4"
            "7f0000011451"
            "7f000001a8ca"
            "00000000"
            "0000000000000007");
}

TEST(RendezvousName, DiffersWheneverTheConnectionDiffers) {
  std::set<std::string> names;
  for (FourTuple t : {some_tuple(), some_v6_tuple()}) {
    names.insert(text(rendezvous_name(t, 0)));
    names.insert(text(rendezvous_name(t, 1)));
    for (FourTuple other = t; Endpoint * e : {&other.local, &other.remote}) {
      for (uint8_t& byte : e->address) {
        if (other.is_v4() && &byte < e->address.data() + 12) continue;
        byte ^= 0x10;
        names.insert(text(rendezvous_name(other, 0)));
        byte ^= 0x10;
      }
      e->port ^= 0x101;
      names.insert(text(rendezvous_name(other, 0)));
      e->port ^= 0x101;
    }
    t.scope ^= 0x80;
    names.insert(text(rendezvous_name(t, 0)));
  }
  EXPECT_EQ(names.size(), 2u * 5 + 2 * 4 + 2 * 16);
}

TEST(RendezvousName, TheLongestFitsASocketAddress) {
  const SocketName n = rendezvous_name(some_v6_tuple(), UINT64_MAX);
  sockaddr_un un;
  EXPECT_LE(to_sockaddr(n, &un), sizeof(un));
  EXPECT_EQ(un.sun_path[0], '\0');
  EXPECT_EQ(std::string(un.sun_path + 1, n.size), text(n));
}

TEST(RendezvousName, AKeepersNameIsNoConnectionsName) {
  EXPECT_EQ(text(keeper_name(0xa, 0xb)), "rsock1/k/000000000000000a000000000000000b");
}

}  // namespace
}  // namespace rsock::wire
