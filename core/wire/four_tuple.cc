#include "core/wire/four_tuple.h"

#include <netinet/in.h>

#include <algorithm>
#include <cstring>

namespace rsock::wire {
namespace {

constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

/// The scope is written for a link-local address only.
std::optional<Endpoint> endpoint(const sockaddr* sa, socklen_t len, uint32_t* scope) {
  Endpoint e;
  if (sa == nullptr || len < sizeof(sa->sa_family)) return std::nullopt;
  if (sa->sa_family == AF_INET && len >= sizeof(sockaddr_in)) {
    sockaddr_in in;
    std::memcpy(&in, sa, sizeof(in));
    std::memcpy(e.address.data(), kMapped, sizeof(kMapped));
    std::memcpy(e.address.data() + sizeof(kMapped), &in.sin_addr, 4);
    e.port = ntohs(in.sin_port);
    if (in.sin_addr.s_addr == INADDR_ANY) return std::nullopt;
  } else if (sa->sa_family == AF_INET6 && len >= sizeof(sockaddr_in6)) {
    sockaddr_in6 in;
    std::memcpy(&in, sa, sizeof(in));
    std::memcpy(e.address.data(), &in.sin6_addr, 16);
    e.port = ntohs(in.sin6_port);
    if (IN6_IS_ADDR_UNSPECIFIED(&in.sin6_addr)) return std::nullopt;
    if (IN6_IS_ADDR_LINKLOCAL(&in.sin6_addr)) *scope = in.sin6_scope_id;
  } else {
    return std::nullopt;
  }
  if (e.port == 0) return std::nullopt;
  return e;
}

bool mapped(const Endpoint& e) {
  return std::equal(std::begin(kMapped), std::end(kMapped), e.address.begin());
}

}  // namespace

std::optional<FourTuple> FourTuple::from(const sockaddr* local, socklen_t local_len,
                                         const sockaddr* remote, socklen_t remote_len) {
  FourTuple t;
  const auto l = endpoint(local, local_len, &t.scope);
  const auto r = endpoint(remote, remote_len, &t.scope);
  if (!l || !r || mapped(*l) != mapped(*r)) return std::nullopt;
  t.local = *l;
  t.remote = *r;
  return t;
}

bool FourTuple::is_v4() const { return mapped(local) && mapped(remote); }
bool FourTuple::mixed_families() const { return mapped(local) != mapped(remote); }

}  // namespace rsock::wire
