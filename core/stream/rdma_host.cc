#include "core/stream/rdma_host.h"

#include <sys/epoll.h>

#include <algorithm>

#include "core/base/clock.h"
#include "core/base/config.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/stream/counters.h"
#include "core/stream/shared_key.h"
#include "core/transport/verbs/rdma_library.h"

namespace rsock::stream {
namespace {

constexpr uint64_t kLookAgainNs = 1'000 * kMs;
constexpr uint64_t kBuryNs = 1'000 * kMs;
constexpr int kEventsAtOnce = 64;

/// A pointer, so that a forked child can leave the parent's where it is.
constinit RdmaHost* g_host = nullptr;

/// What is known of devices. `wanted` and the rest by the keeper; the found_ part by
/// look_for_rdma(), without the mutex.
struct Look {
  bool there = false;
  bool wanted = false;
  uint64_t at = 0;
  Reason why = nullptr;
  bool found_there = false;
  Reason found_why = nullptr;
  verbs::ConnectionManager* found_manager = nullptr;
};
constinit Look g_look;

}  // namespace

RdmaHost* rdma_host(Reason* why) noexcept {
  if (g_host != nullptr) return g_host;
  const auto key = shared_key();
  uint64_t own = 0;
  if (!key) {
    if (why != nullptr) *why = "the key file can't be read";
    return nullptr;
  }
  if (!os::getrandom(&own, sizeof(own))) {
    if (why != nullptr) *why = "no random numbers";
    return nullptr;
  }
  g_host = new RdmaHost(*key, own);
  return g_host;
}

// --- is there a device? ------------------------------------------------------------------------

static void watch_manager(RdmaHost& h) noexcept {
  if (std::exchange(h.manager_watched, true)) return;
  (void)keeper_watch(h.manager->event_fd(), EPOLLIN,
                     tagged(static_cast<KeeperSource*>(&h), KeeperTag::kSource));
}

Rdma rdma_there(Reason* why) noexcept {
  if (g_look.there) {
    watch_manager(*g_host);
    return Rdma::kThere;
  }
  if (g_look.wanted) return Rdma::kAsking;
  if (g_look.at != 0 && monotonic_ns() - g_look.at < kLookAgainNs) {
    *why = g_look.why;
    return Rdma::kNone;
  }
  g_look.wanted = true;
  return Rdma::kAsking;
}

void rdma_gone() noexcept { g_look.there = false; }

void set_fabric(std::unique_ptr<verbs::ConnectionManager> fake) noexcept {
  rdma_host()->manager = std::move(fake);
  g_look.there = rdma_host()->manager != nullptr;
}

bool begin_look_for_rdma() noexcept {
  inside().loading = g_look.wanted;
  return g_look.wanted;
}

void look_for_rdma() noexcept {
  using Library = verbs::RdmaLibrary;
  Look& l = g_look;
  l.found_there = Library::load() != nullptr && Library::any_device();
  l.found_why = Library::why_not();
  if (!l.found_there || (g_host != nullptr && g_host->manager != nullptr)) return;
  auto manager = verbs::ConnectionManager::open();
  l.found_there = manager.has_value();
  if (manager) {
    l.found_manager = manager->release();
  } else {
    l.found_why = manager.error() == EMFILE   ? "no descriptor left"
                  : manager.error() == ENODEV ? "no RDMA device"
                                              : "no RDMA connection manager (rdma_ucm)";
  }
}

void end_look_for_rdma() noexcept {
  Look& l = g_look;
  inside().loading = false;
  l.wanted = false;
  l.at = monotonic_ns();
  l.there = l.found_there;
  l.why = l.found_why;
  RdmaHost* const h = g_host;
  if (auto* manager = std::exchange(l.found_manager, nullptr)) {
    h->manager.reset(manager);
  }
  if (h == nullptr) return;
  for (size_t i = 0; i < h->attempts.size(); ++i) {
    RemoteAttempt& a = *h->attempts[i];
    if (!a.over && a.phase == RemotePhase::kLibrary) begin_remote(a);
  }
}

bool listen_for_joins(RdmaHost& h) noexcept {
  if (h.listener != nullptr) return true;
  h.listener_key = h.fresh_key();
  const auto id = h.manager->listen(0, h.listener_key);
  if (!id) return false;
  h.listener = *id;
  h.listener_port = h.manager->port_of(*id);
  return true;
}

// --- devices -----------------------------------------------------------------------------------

void WatchedDevice::on_event(uint32_t) noexcept {
  const uint64_t nap = device->on_event();
  nap_until = nap != 0 ? monotonic_ns() + nap : UINT64_MAX;
}

void watch_device(RdmaHost& h, const std::shared_ptr<verbs::Device>& device) noexcept {
  for (const auto& w : h.devices) {
    if (w->device == device) return;
  }
  auto w = std::make_unique<WatchedDevice>(device);
  device->on_keeper_call(&call_keeper);
  // EXCLUSIVE: only if no thread of the program waits for it (direct_wait.h).
  (void)keeper_watch(device->event_fd(), EPOLLIN | EPOLLEXCLUSIVE,
                     tagged(static_cast<KeeperSource*>(w.get()), KeeperTag::kSource));
  w->on_event(0);  // arms
  h.devices.push_back(std::move(w));
}

static void watch_contexts(RdmaHost& h) noexcept {
  while (ibv_context* context = h.manager->new_context()) {
    auto w = std::make_unique<WatchedContext>(context);
    (void)keeper_watch(context->async_fd, EPOLLIN,
                       tagged(static_cast<KeeperSource*>(w.get()), KeeperTag::kSource));
    h.contexts.push_back(std::move(w));
  }
}

static verbs::Device* device_of(const ibv_context* context) noexcept {
  for (const auto& d : verbs::Device::all()) {
    if (d->context() == context) return d.get();
  }
  return nullptr;
}

void WatchedContext::on_removed() noexcept {
  if (std::exchange(removed, true)) return;
  keeper_unwatch(context->async_fd);  // it says so for ever
  if (verbs::Device* device = device_of(context)) device->on_removal();
  rdma_gone();
}

void WatchedContext::on_event(uint32_t) noexcept {
  if (removed) return;
  verbs::Device* const device = device_of(context);
  if (device != nullptr) device->on_async_event();
  if (device != nullptr ? device->removed() : rdma_host()->manager->is_removed(context))
    on_removed();
}

/// The kernel may wait with the removal of a device until the last who uses it has gone.
static uint64_t let_go_of_removed(RdmaHost& h, uint64_t now) noexcept {
  // Ours and the device list's own: nobody else has it.
  std::erase_if(h.devices, [](const auto& w) { return !w->watched && w->device.use_count() <= 2; });
  bool left = verbs::Device::drop_removed();
  for (const auto& w : h.contexts) {
    const auto asks = [&](const auto& a) { return a->id != nullptr && a->id->verbs == w->context; };
    if (!w->removed || device_of(w->context) != nullptr) continue;
    if (std::any_of(h.attempts.begin(), h.attempts.end(), asks)) {
      left = true;
    } else {
      h.manager->close_context(w->context);
    }
  }
  std::erase_if(h.contexts, [](const auto& w) { return w->removed && w->context->cmd_fd < 0; });
  return left ? now + kBuryNs : UINT64_MAX;
}

static uint64_t run_device_timers(RdmaHost& h, uint64_t now) noexcept {
  uint64_t next = UINT64_MAX;
  for (const auto& w : h.devices) {
    if (w->device->removed() && std::exchange(w->watched, false)) {
      keeper_unwatch(w->device->event_fd());
      w->nap_until = UINT64_MAX;
    }
    const bool called = w->device->take_keeper_call();
    if (called || w->nap_until <= now) w->on_event(0);
    next = std::min(next, w->nap_until);
    if (w->device->bury()) next = std::min(next, now + kBuryNs);
  }
  return std::min(next, let_go_of_removed(h, now));
}

// --- what comes for a channel ------------------------------------------------------------------

static void look_at(Stream& s, uint32_t generation, uint64_t nonce,
                    verbs::VerbsChannel& channel) noexcept {
  if (!s.owned_by(generation) || s.channel_nonce != nonce) return;
  channel.peer_let_go() ? tend_after_hang_up(s) : tend(s);
}

void RdmaHost::on_open(Line& line) noexcept {
  for (size_t i = 0; i < attempts.size(); ++i) {
    RemoteAttempt& a = *attempts[i];
    if (!a.over && a.phase == RemotePhase::kLine && a.line.get() == &line) on_line_open(a);
  }
}

void RdmaHost::on_down(Line& line, Reason reason) noexcept {
  for (size_t i = 0; i < attempts.size(); ++i) {
    RemoteAttempt& a = *attempts[i];
    if (!a.over && a.line.get() == &line) on_line_down(a, reason);
  }
  for (size_t i = 0; i < riders.size(); ++i) {
    const Rider r = riders[i];
    const auto channel = r.channel.lock();
    if (r.line.get() != &line || !channel) continue;
    channel->line_down();
    look_at(*r.stream, r.generation, r.nonce, *channel);
  }
}

void RdmaHost::on_want(Line& line, const wire::Want& want) noexcept { answer_want(line, want); }

void RdmaHost::on_offer(Line& line, const wire::Offer& offer) noexcept {
  for (const auto& a : attempts) {
    if (!a->over && a->phase == RemotePhase::kOffer && a->line.get() == &line &&
        a->nonce == offer.nonce) {
      return stream::on_offer(*a, offer);
    }
  }
}

void RdmaHost::on_word(Line& line, const wire::WordMessage& word) noexcept {
  for (const Rider& r : riders) {
    if (r.nonce != word.nonce || r.line.get() != &line) continue;
    const auto channel = r.channel.lock();
    if (!channel) return;  // it went, and said so: the two crossed
    channel->on_word(word.word, word.value);
    return look_at(*r.stream, r.generation, r.nonce, *channel);
  }
  for (const auto& a : attempts) {
    if (a->over || a->nonce != word.nonce || a->line.get() != &line) continue;
    if (a->channel) return a->channel->on_word(word.word, word.value);
    // It had joined and took that back: the answer on the queue pair will not come (the kernel may
    // have refused it without a word).
    if (a->phase == RemotePhase::kJoin && word.word == wire::Word::kBye)
      return try_again(*a, "the peer is not ready");
    if (a->early_count < RemoteAttempt::kEarly) {
      a->early[a->early_count++] = word;
    } else {
      count_refusal("words without end");
    }
    return;
  }
}

void take_line_calls() noexcept {
  // acq_rel pairs with call_keeper().
  if (!inside().called.exchange(false, std::memory_order_acq_rel) || g_host == nullptr) return;
  RdmaHost& h = *g_host;
  for (size_t i = 0; i < h.lines.all().size(); ++i) {
    const std::shared_ptr<Line> line = h.lines.all()[i];
    const Calls calls = line->take_calls();
    for (size_t j = 0; j < h.riders.size() && (calls.all || calls.count != 0); ++j) {
      const Rider r = h.riders[j];
      const uint64_t* const end = calls.nonce + calls.count;
      if (r.line != line || (!calls.all && std::find(calls.nonce, end, r.nonce) == end)) continue;
      if (const auto channel = r.channel.lock()) {
        look_at(*r.stream, r.generation, r.nonce, *channel);
      }
    }
  }
}

// --- what the connection manager says ----------------------------------------------------------

static void on_rider_event(const Rider& r, const verbs::CmEvent& e) noexcept {
  using Kind = verbs::CmEvent::Kind;
  if (e.kind == Kind::kDeviceRemoved) {
    rdma_gone();
    r.device->on_removal();
  }
  // A disconnection says nothing: a peer that let go or lost its device tells by the line, one that
  // died ends the line.
  const auto channel = r.channel.lock();
  if (!channel || e.kind != Kind::kDeviceRemoved) return;
  channel->fail_path("the RDMA device was removed");
  look_at(*r.stream, r.generation, r.nonce, *channel);
}

static void on_cm_event(RdmaHost& h, const verbs::CmEvent& e) noexcept {
  using Kind = verbs::CmEvent::Kind;
  if (e.kind == Kind::kNone || e.key == 0) return;
  if (e.kind == Kind::kRequest) {
    if (e.key == h.listener_key) return answer_join(e);
    if (!h.ports.on_request(e)) h.manager->reject(e.id, {});
    return;
  }
  for (const auto& w : h.devices) {
    verbs::SpareQueuePairs& spares = w->device->spares();
    if (e.kind == Kind::kDisconnected && spares.on_disconnected(e.key)) return;
    if (e.kind == Kind::kTimeWaitExit && spares.on_time_wait_exit(e.key)) return;
  }
  for (const auto& w : h.contexts) {
    if (e.key == reinterpret_cast<uint64_t>(w->context)) return w->on_removed();
  }
  for (size_t i = 0; i < h.attempts.size(); ++i) {
    RemoteAttempt& a = *h.attempts[i];
    if (!a.over && a.key == e.key) return on_remote_event(a, e);
  }
  for (size_t i = 0; i < h.riders.size(); ++i) {
    const Rider r = h.riders[i];
    if (r.key == e.key) return on_rider_event(r, e);
  }
}

void RdmaHost::on_event(uint32_t) noexcept {
  verbs::CmEvent e;
  for (int i = 0; i < kEventsAtOnce && manager && manager->next(&e); ++i) {
    watch_contexts(*this);
    on_cm_event(*this, e);
  }
}

// --- timers and forks --------------------------------------------------------------------------

static void close_attempt(RemoteAttempt& a) noexcept {
  drop_remote(a);
  for (os::OwnedFd* fd : {&a.listener, &a.asker}) {
    if (*fd) keeper_unwatch(fd->get());
    fd->reset();
  }
}

uint64_t run_rdma_timers(uint64_t now) noexcept {
  if (g_host == nullptr) return UINT64_MAX;
  RdmaHost& h = *g_host;
  uint64_t next = std::min(h.lines.run_timers(now), h.ports.run_timers(now));
  for (size_t i = 0; i < h.attempts.size(); ++i) {
    RemoteAttempt& a = *h.attempts[i];
    if (!a.over && !still_wanted(a)) give_up(a, "closed or pinned");
    if (!a.over && a.due <= now) on_remote_due(a);
    if (a.over) {
      close_attempt(a);
    } else {
      next = std::min(next, a.due);
    }
  }
  std::erase_if(h.attempts, [](const auto& a) { return a->over; });
  std::erase_if(h.riders, [](const Rider& r) { return r.channel.expired(); });
  return std::min(next, run_device_timers(h, now));  // last: it buries what went above
}

void forget_rdma_in_child() noexcept {
  g_look = Look{};
  if (RdmaHost* const h = g_host) {
    for (auto& a : h->attempts) {
      a->listener.reset();
      a->asker.reset();
    }
    h->lines.forget_in_child();
    h->ports.forget_in_child();
    if (h->manager) h->manager->after_fork_child();
    // Nor if the parent was in the loader: its lists may be half built here.
    if (h->manager || inside().loading) verbs::RdmaLibrary::spent_in_child();
  }
  verbs::Device::after_fork_child();
  g_host = nullptr;  // nothing is freed: malloc may be locked for ever in a child of _Fork
}

}  // namespace rsock::stream
