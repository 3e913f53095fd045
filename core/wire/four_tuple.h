// The two ends of a TCP connection, in one canonical spelling for both of them.
//
// Purpose: names a stream between two processes that each see it from their own side. A connection
// that one end holds on an IPv6 socket and the other on an IPv4 socket is one and the same here.
// Thread safety: plain values.
// Invariant: an IPv4 address is held v4-mapped (::ffff:a.b.c.d), so that one comparison serves both
// families; what from() returns is of one family on both ends.
#pragma once

#include <sys/socket.h>

#include <array>
#include <compare>
#include <cstdint>
#include <optional>

namespace rsock::wire {

struct Endpoint {
  std::array<uint8_t, 16> address{};  // network order; IPv4 is v4-mapped
  uint16_t port = 0;                  // host order
  auto operator<=>(const Endpoint&) const = default;
};

struct FourTuple {
  Endpoint local;
  Endpoint remote;
  /// Interface of a link-local connection: the same address may exist on two interfaces. Else 0.
  uint32_t scope = 0;

  /// From getsockname() and getpeername(). Nothing when the families differ or are not internet
  /// ones, or when an address or port is unspecified.
  static std::optional<FourTuple> from(const sockaddr* local, socklen_t local_len,
                                       const sockaddr* remote, socklen_t remote_len);

  bool is_v4() const;
  /// One end IPv4, the other not: impossible, so a peer made it up.
  bool mixed_families() const;
  /// As the other end sees it.
  FourTuple reverse() const { return FourTuple{remote, local, scope}; }
  /// The end with the smaller address, then port, calls; the other listens.
  bool is_caller() const { return local < remote; }
  /// A socket that connected to its own port: nobody else is there to agree with.
  bool is_to_itself() const { return local == remote; }
  bool operator==(const FourTuple&) const = default;
};

}  // namespace rsock::wire
