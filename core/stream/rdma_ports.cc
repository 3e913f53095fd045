#include "core/stream/rdma_ports.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/rdma_host.h"
#include "core/stream/sock_diag.h"

namespace rsock::stream {
namespace {

using wire::Verdict;

constexpr uint64_t kTryAgainNs = 1'000 * kMs;
constexpr uint64_t kKeepNs = 60'000 * kMs;

/// Who holds an RDMA port of ours listens here too; it says whose it is, and nothing else.
wire::SocketName port_name(uint16_t port) noexcept {
  wire::SocketName name;
  const int n = snprintf(name.text, sizeof(name.text), "%sp/%u", wire::kNamePrefix, port);
  name.size = static_cast<uint8_t>(n);
  return name;
}

Result<ucred> owner_of_peer(int fd) noexcept {
  ucred credentials{};
  socklen_t len = sizeof(credentials);
  const auto r = os::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &len);
  if (!r) return fail(r.error());
  return credentials;
}

void send_found(rdma_cm_id* id, const wire::Find& find, Verdict verdict) noexcept {
  RdmaHost& h = *rdma_host();
  wire::Found found;
  found.nonce = find.nonce;
  found.verdict = verdict;
  if (verdict == Verdict::kOk) {
    found.line_port = h.lines.port();
    found.keeper = h.lines.own_keeper();
  }
  uint8_t bytes[wire::kFoundSize];
  wire::encode(found, bytes);
  h.manager->reject(id, bytes);
}

bool is_ours(const wire::Find& find) noexcept {
  for (const auto& a : rdma_host()->attempts) {
    if (!a->over && !a->caller && a->phase != RemotePhase::kLibrary &&
        a->tuple == find.tuple.reverse()) {
      return true;
    }
  }
  return false;
}

}  // namespace

// --- holding ports -----------------------------------------------------------------------------

void RdmaPorts::Port::on_event(uint32_t) noexcept {
  for (int i = 0; i < 16; ++i) {
    const auto visitor =
        os::make_internal([&] { return os::accept4(name.get(), SOCK_CLOEXEC | SOCK_NONBLOCK); });
    if (visitor) continue;
    // Else epoll would say so again and again. Whose the name is they see also in the queue, and
    // when it is full.
    if (visitor.error() == EMFILE || visitor.error() == ENFILE) keeper_unwatch(name.get());
    return;
  }
}

bool RdmaPorts::announce(Port& p) noexcept {
  auto fd = unix_socket();
  if (!fd || !listen_on(*fd, port_name(p.port), 16)) return false;
  p.name = std::move(*fd);
  return keeper_watch(p.name.get(), EPOLLIN,
                      tagged(static_cast<KeeperSource*>(&p), KeeperTag::kSource));
}

bool RdmaPorts::is_one_of_us(const Port& p) noexcept {
  const auto fd = unix_socket();
  if (!fd) return true;  // we can't know
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(port_name(p.port), &address);
  const auto r = os::connect(fd->get(), reinterpret_cast<sockaddr*>(&address), len);
  if (!r && r.error() == EAGAIN) return true;  // so many look
  if (!r) return false;
  const auto owner = owner_of_peer(fd->get());
  return owner && (owner->uid == 0 || owner->uid == static_cast<uid_t>(os::geteuid()));
}

void RdmaPorts::take(Port& p) noexcept {
  RdmaHost& h = *rdma_host();
  p.key = h.fresh_key();
  const auto id = h.manager->listen(p.port, p.key);
  if (id) {
    p.listener = *id;
    p.held = Held::kByUs;
    (void)announce(p);
    return;
  }
  p.again_at = monotonic_ns() + kTryAgainNs;
  if (id.error() == EACCES) {
    p.held = Held::kNotAllowed;
  } else if (!(id.error() == EADDRINUSE || id.error() == EADDRNOTAVAIL) || is_one_of_us(p)) {
    // The kernel says the second where one of the two is for all addresses (cma_check_port(),
    // drivers/infiniband/core/cma.c).
    p.held = Held::kByAnother;
    p.strange = 0;
  } else if (++p.strange == 2) {  // whoever has just taken the port is about to take the name
    p.held = Held::kByStranger;
    count_refusal("the RDMA port is held by another user's process");
    RSOCK_LOG(kWarn, "RDMA port %u is held by another user's process", p.port);
  }
}

RdmaPorts::Held RdmaPorts::hold(uint16_t port) noexcept {
  const uint64_t now = monotonic_ns();
  auto at =
      std::find_if(ports_.begin(), ports_.end(), [=](const auto& p) { return p->port == port; });
  if (at == ports_.end()) {
    ports_.push_back(std::make_unique<Port>());
    at = ports_.end() - 1;
    (*at)->port = port;
  }
  Port& p = **at;
  p.used = now;
  if (p.listener == nullptr && now >= p.again_at) take(p);
  return p.held;
}

// --- FIND --------------------------------------------------------------------------------------

bool RdmaPorts::on_request(const transport::verbs::CmEvent& e) noexcept {
  const auto at = std::find_if(ports_.begin(), ports_.end(), [&](const auto& p) {
    return p->listener != nullptr && p->key == e.key;
  });
  if (at == ports_.end()) return false;
  RdmaHost& h = *rdma_host();
  (*at)->used = monotonic_ns();
  const auto find = wire::decode_find(e.data, e.size);
  if (!find) {
    count_refusal(find.error().reason);
    h.manager->reject(e.id, {});
    return true;
  }
  // Behind a translator the caller knows other addresses than this host: no name in common.
  if (find->tuple.remote.port != (*at)->port || find->tuple.remote.address != e.local.address ||
      find->tuple.local.address != e.remote.address) {
    send_found(e.id, *find, Verdict::kNotMine);
  } else if (is_ours(*find)) {
    send_found(e.id, *find, h.lines.listen() ? Verdict::kOk : Verdict::kLimit);
  } else {
    ask_owner(*find, e.id);
  }
  return true;
}

void RdmaPorts::ask_owner(const wire::Find& find, rdma_cm_id* id) noexcept {
  const auto socket = find_socket(find.tuple.reverse());
  if (!socket) return send_found(id, find, Verdict::kNotMine);
  if (askers_.size() >= kMostAskers) return send_found(id, find, Verdict::kNotNow);
  auto fd = unix_socket();
  if (!fd) return send_found(id, find, Verdict::kNotNow);
  const int ours = rdma_host()->lines.listener_fd();  // of this network namespace
  const auto name = wire::rendezvous_name(
      find.tuple, ours < 0 ? 0 : os::netns_cookie(ours));
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(name, &address);
  if (!os::connect(fd->get(), reinterpret_cast<sockaddr*>(&address), len)) {
    return send_found(id, find, Verdict::kNotNow);  // it does not look for its peer yet
  }
  const auto owner = owner_of_peer(fd->get());
  if (!owner || !is_peer(owner->uid, *socket)) {
    count_refusal("rendezvous name held by another user");
    return send_found(id, find, Verdict::kCredentials);
  }
  uint8_t bytes[wire::kWhereSize];
  wire::encode(wire::Where{find.nonce}, bytes);
  if (!os::send(fd->get(), bytes, sizeof(bytes), MSG_DONTWAIT | MSG_NOSIGNAL)) {
    return send_found(id, find, Verdict::kNotNow);
  }
  auto asker = std::make_unique<Asker>();
  asker->find = find;
  asker->id = id;
  asker->fd = std::move(*fd);
  asker->due = monotonic_ns() + kAnswerNs;
  (void)keeper_watch(asker->fd.get(), EPOLLIN | EPOLLRDHUP,
                     tagged(static_cast<KeeperSource*>(asker.get()), KeeperTag::kSource));
  askers_.push_back(std::move(asker));
}

void RdmaPorts::Asker::answer(const wire::Found& found) noexcept {
  if (id == nullptr) return;
  uint8_t bytes[wire::kFoundSize];
  wire::encode(found, bytes);
  rdma_host()->manager->reject(std::exchange(id, nullptr), bytes);
  keeper_unwatch(fd.get());
  fd.reset();
}

void RdmaPorts::Asker::on_event(uint32_t) noexcept {
  if (id == nullptr) return;
  wire::Found found;
  found.nonce = find.nonce;
  found.verdict = Verdict::kNotNow;
  const auto got =
      os::recv(fd.get(), inbox + inbox_size, wire::kHereSize - inbox_size, MSG_DONTWAIT);
  if (!got && got.error() == EAGAIN) return;
  if (!got || *got == 0) return answer(found);
  inbox_size += *got;
  if (inbox_size < wire::kHereSize) return;
  const auto here = wire::decode_here(inbox, wire::kHereSize);
  if (!here) {
    count_refusal(here.error().reason);
  } else if (here->nonce == find.nonce) {
    found.verdict = here->verdict;
    found.line_port = here->line_port;
    found.keeper = here->keeper;
  }
  answer(found);
}

uint64_t RdmaPorts::run_timers(uint64_t now) noexcept {
  uint64_t next = UINT64_MAX;
  for (const auto& a : askers_) {
    if (a->id != nullptr && now >= a->due) {
      wire::Found late;
      late.nonce = a->find.nonce;
      late.verdict = Verdict::kNotNow;
      a->answer(late);
    }
    if (a->id != nullptr) next = std::min(next, a->due);
  }
  std::erase_if(askers_, [](const auto& a) { return a->id == nullptr; });
  for (const auto& p : ports_) {
    if (now >= p->used + kKeepNs) {
      if (p->listener != nullptr) {
        rdma_host()->manager->destroy(std::exchange(p->listener, nullptr));
        keeper_unwatch(p->name.get());
        p->name.reset();
      }
      p->used = 0;
      continue;
    }
    next = std::min(next, p->used + kKeepNs);
    if (p->listener == nullptr) {
      if (now >= p->again_at) take(*p);
      if (p->listener == nullptr) next = std::min(next, p->again_at);
    }
  }
  std::erase_if(ports_, [](const auto& p) { return p->used == 0; });
  return next;
}

void RdmaPorts::forget_in_child() noexcept {
  for (const auto& p : ports_) p->name.reset();
  for (const auto& a : askers_) a->fd.reset();
}

}  // namespace rsock::stream
