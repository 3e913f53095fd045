#include "core/stream/reach.h"

#include <algorithm>

namespace rsock::stream {

const Reach::Entry* Reach::look(const wire::Endpoint& service) const noexcept {
  for (const Entry& e : entries_) {
    if (e.service == service) return &e;
  }
  return nullptr;
}

Reach::Entry& Reach::entry(const wire::Endpoint& service) noexcept {
  if (const Entry* e = look(service)) return const_cast<Entry&>(*e);
  if (entries_.size() >= kMost) {
    const auto first =
        std::min_element(entries_.begin(), entries_.end(),
                         [](const Entry& a, const Entry& b) { return a.until < b.until; });
    entries_.erase(first);
  }
  Entry fresh;
  fresh.service = service;
  entries_.push_back(fresh);
  return entries_.back();
}

Reason Reach::blocked(const wire::Endpoint& service, uint64_t now) const noexcept {
  const Entry* e = look(service);
  return e != nullptr && now < e->until ? e->reason : nullptr;
}

bool Reach::failed_before(const wire::Endpoint& service) const noexcept {
  const Entry* e = look(service);
  return e != nullptr && e->reason != nullptr;
}

bool Reach::answered_before(const wire::Endpoint& service) const noexcept {
  const Entry* e = look(service);
  return e != nullptr && e->answered;
}

void Reach::failed(const wire::Endpoint& service, Reason reason, uint64_t now) noexcept {
  Entry& e = entry(service);
  // Streams that failed side by side are one failure.
  if (e.reason != nullptr && now < e.until) return;
  e.pause = e.pause == 0 ? kFirstPauseNs : std::min(2 * e.pause, kLongestPauseNs);
  e.reason = reason;
  e.until = now + e.pause;
  e.keeper.reset();
  e.answered = false;
}

std::optional<uint64_t> Reach::keeper_of(const wire::Endpoint& service) const noexcept {
  const Entry* e = look(service);
  return e != nullptr ? e->keeper : std::nullopt;
}

void Reach::found(const wire::Endpoint& service, uint64_t keeper, uint64_t now) noexcept {
  Entry& e = entry(service);
  e.reason = nullptr;
  e.pause = 0;
  e.until = now;
  e.keeper = keeper;
  e.answered = true;
}

void Reach::not_there(const wire::Endpoint& service) noexcept {
  if (look(service) != nullptr) entry(service).keeper.reset();
}

}  // namespace rsock::stream
