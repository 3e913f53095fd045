// wire::Endpoint and the kernel's socket addresses.
#pragma once

#include <sys/socket.h>

#include <optional>

#include "core/wire/four_tuple.h"

namespace rsock::transport {

/// A v4-mapped one becomes AF_INET. Returns the length.
socklen_t to_sockaddr(const wire::Endpoint& endpoint, sockaddr_storage* out) noexcept;
/// Nothing if it is no internet address.
std::optional<wire::Endpoint> to_endpoint(const sockaddr* address) noexcept;
/// The same address without its port.
inline wire::Endpoint without_port(wire::Endpoint endpoint) noexcept {
  endpoint.port = 0;
  return endpoint;
}

}  // namespace rsock::transport
