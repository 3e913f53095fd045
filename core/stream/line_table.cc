#include "core/stream/line_table.h"

#include <netinet/in.h>
#include <sys/epoll.h>

#include <algorithm>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/transport/endpoint.h"

namespace rsock::stream {
namespace {

constexpr int kBacklog = 64;
constexpr int kAcceptsAtOnce = 16;
constexpr uint64_t kPauseNs = 1'000'000'000;
constexpr char kTooMany[] = "too many lines from other hosts";

Result<os::OwnedFd> tcp_socket(int family) noexcept {
  return os::make_internal(
      [=] { return os::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
}

bool same_address(const wire::Endpoint& a, const wire::Endpoint& b) noexcept {
  return a.address == b.address;
}

}  // namespace

bool LineTable::bind_any(int family) noexcept {
  auto fd = tcp_socket(family);
  if (!fd) return false;
  sockaddr_storage any{};
  any.ss_family = static_cast<sa_family_t>(family);
  if (family == AF_INET6) {
    const int only = 0;  // both families, whatever net.ipv6.bindv6only says
    (void)os::setsockopt(fd->get(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only));
  }
  socklen_t len = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  auto* address = reinterpret_cast<sockaddr*>(&any);
  if (!os::bind(fd->get(), address, len) || !os::listen(fd->get(), kBacklog)) return false;
  len = sizeof(any);
  if (!os::getsockname(fd->get(), address, &len)) return false;
  port_ = transport::to_endpoint(address).value_or(wire::Endpoint{}).port;
  listener_ = std::move(*fd);
  return port_ != 0;
}

bool LineTable::listen() noexcept {
  if (listener_) return true;
  if (!bind_any(AF_INET6) && !bind_any(AF_INET)) {
    listener_.reset();
    return false;
  }
  (void)keeper_watch(listener_.get(), EPOLLIN,
                     tagged(static_cast<KeeperSource*>(this), KeeperTag::kSource));
  return true;
}

std::shared_ptr<Line> LineTable::find(uint64_t keeper, const wire::Endpoint& local,
                                      const wire::Endpoint& remote) const noexcept {
  for (const auto& line : lines_) {
    if (line->is_open() && line->keeper() == keeper && same_address(line->local(), local) &&
        same_address(line->remote(), remote)) {
      return line;
    }
  }
  return nullptr;
}

std::shared_ptr<Line> LineTable::shared(const Line& line) const noexcept {
  for (const auto& each : lines_) {
    if (each.get() == &line) return each;
  }
  return nullptr;
}

std::shared_ptr<Line> LineTable::open(const wire::Endpoint& local,
                                      const wire::Endpoint& remote) noexcept {
  for (const auto& line : lines_) {
    if (line->opener() && !line->is_down() && line->target() == remote &&
        same_address(line->source(), local)) {
      return line;
    }
  }
  sockaddr_storage from;
  sockaddr_storage to;
  // What is asked for over this line is compared with its addresses: those of the stream.
  const socklen_t from_len = transport::to_sockaddr(transport::without_port(local), &from);
  const socklen_t to_len = transport::to_sockaddr(remote, &to);
  auto fd = tcp_socket(to.ss_family);
  if (!fd) return nullptr;
  if (!os::bind(fd->get(), reinterpret_cast<sockaddr*>(&from), from_len)) return nullptr;
  const auto begun = os::connect(fd->get(), reinterpret_cast<sockaddr*>(&to), to_len);
  if (!begun && !(begun.error() == EINPROGRESS)) return nullptr;
  auto line = std::make_shared<Line>(owner_, std::move(*fd), true, key_, own_);
  line->aim(local, remote);
  lines_.push_back(line);
  line->begin();
  return line;
}

size_t LineTable::unproved() const noexcept {
  return static_cast<size_t>(std::count_if(lines_.begin(), lines_.end(), [](const auto& line) {
    return !line->opener() && !line->is_open() && !line->is_down();
  }));
}

size_t LineTable::accepted(const wire::Endpoint* from) const noexcept {
  return static_cast<size_t>(std::count_if(lines_.begin(), lines_.end(), [=](const auto& line) {
    return !line->opener() && !line->is_down() &&
           (from == nullptr || same_address(line->remote(), *from));
  }));
}

void LineTable::make_room(const wire::Endpoint* from, Line& newcomer) noexcept {
  static constinit bool told = false;
  if (!std::exchange(told, true))
    RSOCK_LOG(kWarn, "%s: those without a stream are ended", kTooMany);
  count_refusal(kTooMany);
  Line* victim = &newcomer;
  for (const auto& line : lines_) {
    // Ours alone: no channel and no attempt has it.
    if (line->opener() || line->is_down() || line.use_count() > 1 || line.get() == &newcomer ||
        (from != nullptr && !same_address(line->remote(), *from))) {
      continue;
    }
    if (victim == &newcomer || line->used_ns() < victim->used_ns()) victim = line.get();
  }
  victim->end(kTooMany);
}

void LineTable::on_event(uint32_t) noexcept {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    auto fd = os::make_internal(
        [&] { return os::accept4(listener_.get(), SOCK_CLOEXEC | SOCK_NONBLOCK); });
    if (!fd) {
      const Errno e = fd.error();
      // Else the caller stays in the queue, and epoll would say so again and again.
      if (e == EMFILE || e == ENFILE || e == ENOMEM || e == ENOBUFS) {
        keeper_unwatch(listener_.get());
        paused_ = true;
      }
      return;
    }
    if (unproved() >= kMostUnproved) {
      count_refusal("too many unproved lines");
      continue;  // closed
    }
    auto line = std::make_shared<Line>(owner_, std::move(*fd), false, key_, own_);
    lines_.push_back(line);
    line->begin();
    if (line->is_down()) continue;
    const wire::Endpoint from = line->remote();
    const auto limit = static_cast<size_t>(os::rlimit_nofile_soft());
    if (accepted(&from) > std::min(kMostOfOneAddress, limit / 16)) make_room(&from, *line);
    if (accepted(nullptr) > std::min(kMostAccepted, limit / 8)) make_room(nullptr, *line);
  }
}

uint64_t LineTable::run_timers(uint64_t now) noexcept {
  uint64_t next = UINT64_MAX;
  // Not by iterator: an end may begin something, and a line with it.
  for (size_t i = 0; i < lines_.size(); ++i) {
    const bool used = lines_[i].use_count() > 1;
    const std::shared_ptr<Line> line = lines_[i];
    if (now >= line->deadline()) line->end("the peer's keeper does not answer");
    next = std::min(next, line->deadline());
    if (used) {
      line->note_use(now);
    } else if (!line->opener() && line->is_open()) {
      if (now >= line->used_ns() + kIdleNs) line->end("no stream uses it");
      next = std::min(next, line->used_ns() + kIdleNs);
    }
  }
  std::erase_if(lines_, [](const auto& line) { return line->is_down(); });
  if (paused_) {
    paused_ = !keeper_watch(listener_.get(), EPOLLIN,
                            tagged(static_cast<KeeperSource*>(this), KeeperTag::kSource));
    next = std::min(next, now + kPauseNs);
  }
  return next;
}

void LineTable::forget_in_child() noexcept {
  listener_.reset();
  for (const auto& line : lines_) line->forget_in_child();
}

}  // namespace rsock::stream
