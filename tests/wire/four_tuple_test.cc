#include "core/wire/four_tuple.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <string>

namespace rsock::wire {
namespace {

sockaddr_storage v4(const char* text, uint16_t port) {
  sockaddr_storage out{};
  auto* in = reinterpret_cast<sockaddr_in*>(&out);
  in->sin_family = AF_INET;
  in->sin_port = htons(port);
  EXPECT_EQ(inet_pton(AF_INET, text, &in->sin_addr), 1);
  return out;
}

sockaddr_storage v6(const char* text, uint16_t port, uint32_t scope = 0) {
  sockaddr_storage out{};
  auto* in = reinterpret_cast<sockaddr_in6*>(&out);
  in->sin6_family = AF_INET6;
  in->sin6_port = htons(port);
  in->sin6_scope_id = scope;
  EXPECT_EQ(inet_pton(AF_INET6, text, &in->sin6_addr), 1);
  return out;
}

std::optional<FourTuple> tuple(const sockaddr_storage& local, const sockaddr_storage& remote) {
  return FourTuple::from(reinterpret_cast<const sockaddr*>(&local), sizeof(local),
                         reinterpret_cast<const sockaddr*>(&remote), sizeof(remote));
}

TEST(FourTuple, BothEndsAgreeOnWhoCalls) {
  const auto here = tuple(v4("10.0.0.1", 40000), v4("10.0.0.2", 80));
  const auto there = tuple(v4("10.0.0.2", 80), v4("10.0.0.1", 40000));
  ASSERT_TRUE(here && there);
  EXPECT_EQ(here->reverse(), *there);
  EXPECT_TRUE(here->is_caller());
  EXPECT_FALSE(there->is_caller());
}

TEST(FourTuple, PortsDecideWhenAddressesAreEqual) {
  EXPECT_TRUE(tuple(v4("127.0.0.1", 80), v4("127.0.0.1", 40000))->is_caller());
  // As numbers, not as bytes: 256 is greater than 255.
  EXPECT_TRUE(tuple(v4("127.0.0.1", 255), v4("127.0.0.1", 256))->is_caller());
}

TEST(FourTuple, MappedAddressOnOneEndIsTheSameConnection) {
  const auto on_v6 = tuple(v6("::ffff:127.0.0.1", 80), v6("::ffff:127.0.0.1", 40000));
  const auto on_v4 = tuple(v4("127.0.0.1", 40000), v4("127.0.0.1", 80));
  ASSERT_TRUE(on_v6 && on_v4);
  EXPECT_EQ(on_v6->reverse(), *on_v4);
  EXPECT_TRUE(on_v6->is_v4());
}

TEST(FourTuple, ScopeCountsForLinkLocalAddressesOnly) {
  EXPECT_NE(*tuple(v6("fe80::1", 1, 2), v6("fe80::2", 3, 2)),
            *tuple(v6("fe80::1", 1, 4), v6("fe80::2", 3, 4)));
  EXPECT_EQ(tuple(v6("2001:db8::1", 1, 2), v6("2001:db8::2", 3))->scope, 0u);
}

TEST(FourTuple, ASocketConnectedToItselfIsRecognised) {
  EXPECT_TRUE(tuple(v4("127.0.0.1", 5), v4("127.0.0.1", 5))->is_to_itself());
  EXPECT_FALSE(tuple(v4("127.0.0.1", 5), v4("127.0.0.1", 6))->is_to_itself());
}

TEST(FourTuple, RefusesWhatIsNoConnection) {
  EXPECT_FALSE(tuple(v4("127.0.0.1", 0), v4("127.0.0.1", 1)));
  EXPECT_FALSE(tuple(v4("0.0.0.0", 1), v4("127.0.0.1", 2)));
  EXPECT_FALSE(tuple(v6("::", 1), v6("::1", 2)));
  EXPECT_FALSE(tuple(v4("127.0.0.1", 1), v6("::1", 2)));
  sockaddr_storage local{};
  local.ss_family = AF_UNIX;
  EXPECT_FALSE(tuple(local, v4("127.0.0.1", 1)));
  const auto remote = v4("127.0.0.1", 1);
  EXPECT_FALSE(FourTuple::from(reinterpret_cast<const sockaddr*>(&remote), 4,
                               reinterpret_cast<const sockaddr*>(&remote), sizeof(remote)));
  EXPECT_FALSE(FourTuple::from(nullptr, 0, nullptr, 0));
}

}  // namespace
}  // namespace rsock::wire
