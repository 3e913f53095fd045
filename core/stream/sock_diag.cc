#include "core/stream/sock_diag.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>

#include "core/os/os.h"
#include "core/os/owned_fd.h"

namespace rsock::stream {
namespace {

constexpr uint8_t kTcpListen = 10;  // include/net/tcp_states.h
constexpr uint8_t kTcpTimeWait = 6;

struct Request {
  nlmsghdr header;
  inet_diag_req_v2 body;
};

void put_address(const wire::Endpoint& e, bool v4, __be32* out) noexcept {
  if (v4) {
    memcpy(out, e.address.data() + 12, 4);
  } else {
    memcpy(out, e.address.data(), 16);
  }
}

Request make_request(const wire::FourTuple& tuple) noexcept {
  Request request{};
  request.header.nlmsg_len = sizeof(request);
  request.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  request.header.nlmsg_flags = NLM_F_REQUEST;
  const bool v4 = tuple.is_v4();
  request.body.sdiag_family = v4 ? AF_INET : AF_INET6;
  request.body.sdiag_protocol = IPPROTO_TCP;
  request.body.idiag_states = ~0u;
  request.body.id.idiag_sport = htons(tuple.local.port);
  request.body.id.idiag_dport = htons(tuple.remote.port);
  put_address(tuple.local, v4, request.body.id.idiag_src);
  put_address(tuple.remote, v4, request.body.id.idiag_dst);
  request.body.id.idiag_if = tuple.scope;
  request.body.id.idiag_cookie[0] = INET_DIAG_NOCOOKIE;
  request.body.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  return request;
}

Result<PeerFacts> parse(const char* data, size_t n, const wire::FourTuple& tuple) noexcept {
  const auto* header = reinterpret_cast<const nlmsghdr*>(data);
  if (n < sizeof(nlmsghdr) || header->nlmsg_len > n) return fail(EPROTO);
  if (header->nlmsg_type == NLMSG_ERROR) {
    if (header->nlmsg_len < NLMSG_LENGTH(sizeof(nlmsgerr))) return fail(EPROTO);
    const auto* error = reinterpret_cast<const nlmsgerr*>(NLMSG_DATA(header));
    return fail(error->error == 0 ? EPROTO : -error->error);
  }
  if (header->nlmsg_type != SOCK_DIAG_BY_FAMILY ||
      header->nlmsg_len < NLMSG_LENGTH(sizeof(inet_diag_msg))) {
    return fail(EPROTO);
  }
  const auto* msg = reinterpret_cast<const inet_diag_msg*>(NLMSG_DATA(header));
  // Without an exact match the kernel offers a listener on that port (inet_lookup): not the other
  // end.
  if (msg->idiag_state == kTcpListen || msg->idiag_state == kTcpTimeWait) return fail(ENOENT);
  if (msg->id.idiag_dport != htons(tuple.remote.port)) return fail(ENOENT);
  return PeerFacts{msg->idiag_uid, msg->idiag_inode,
                   static_cast<uint64_t>(msg->id.idiag_cookie[1]) << 32 | msg->id.idiag_cookie[0]};
}

}  // namespace

Result<PeerFacts> find_socket(const wire::FourTuple& tuple) noexcept {
  const auto socket = os::make_internal(
      [] { return os::socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG); });
  if (!socket) return fail(socket.error());
  const Request request = make_request(tuple);
  sockaddr_nl kernel{};
  kernel.nl_family = AF_NETLINK;
  const auto sent = os::sendto(socket->get(), &request, sizeof(request), MSG_DONTWAIT,
                               reinterpret_cast<const sockaddr*>(&kernel), sizeof(kernel));
  if (!sent) return fail(sent.error());
  alignas(nlmsghdr) char answer[4096];
  // The answer to an exact request is queued before sendto returns.
  const auto got = os::recv(socket->get(), answer, sizeof(answer), MSG_DONTWAIT);
  if (!got) return fail(got.error() == EAGAIN ? EPROTO : value(got.error()));
  return parse(answer, *got, tuple);
}

}  // namespace rsock::stream
