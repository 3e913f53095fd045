#include "core/transport/endpoint.h"

#include <netinet/in.h>

#include <algorithm>
#include <cstring>

namespace rsock::transport {
namespace {

constexpr uint8_t kV4Prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

}  // namespace

socklen_t to_sockaddr(const wire::Endpoint& endpoint, sockaddr_storage* out) noexcept {
  memset(out, 0, sizeof(*out));
  if (std::equal(kV4Prefix, kV4Prefix + 12, endpoint.address.begin())) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(out);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(endpoint.port);
    memcpy(&v4->sin_addr, endpoint.address.data() + 12, 4);
    return sizeof(*v4);
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(out);
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(endpoint.port);
  memcpy(&v6->sin6_addr, endpoint.address.data(), 16);
  return sizeof(*v6);
}

std::optional<wire::Endpoint> to_endpoint(const sockaddr* address) noexcept {
  wire::Endpoint e;
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    std::copy(kV4Prefix, kV4Prefix + 12, e.address.begin());
    memcpy(e.address.data() + 12, &v4->sin_addr, 4);
    e.port = ntohs(v4->sin_port);
    return e;
  }
  if (address->sa_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
    memcpy(e.address.data(), &v6->sin6_addr, 16);
    e.port = ntohs(v6->sin6_port);
    return e;
  }
  return std::nullopt;
}

}  // namespace rsock::transport
