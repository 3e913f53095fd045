#include "waiter.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/select.h>
#include <unistd.h>

#include <algorithm>

namespace stress {
namespace {

std::mutex registry_mutex;
std::vector<std::shared_ptr<OwnEpoll>> all_epolls;
std::vector<Poke*> all_pokes;

constexpr uint64_t kPokeData = 99;

enum Kind { kLevel, kEdge, kShot, kNestedLevel, kNestedEdge, kReAdded, kKinds };
constexpr const char* kNames[] = {"epoll, level",        "epoll, edge",        "epoll, one shot",
                                  "nested epoll, level", "nested epoll, edge", "epoll, added anew"};

}  // namespace

bool in_child = false;

OwnEpoll::~OwnEpoll() {
  if (epfd >= 0) close(epfd);
  if (outer >= 0) close(outer);
}

void OwnEpoll::set(int which, int fd, uint32_t wanted) {
  epoll_event event{wanted | style, {}};
  event.data.u64 = static_cast<uint64_t>(which);
  if (wanted == 0 && events[which] != 0) {
    CHECKED(epoll_ctl(epfd, EPOLL_CTL_DEL, fds[which], nullptr));
  } else if (wanted != 0) {
    CHECKED(epoll_ctl(epfd, events[which] != 0 ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event));
  }
  fds[which] = fd;
  events[which] = wanted;
}

void OwnEpoll::disturb(Random& random) {
  std::lock_guard lock(mutex);
  for (int which = 0; which < 2; ++which) {
    const uint32_t wanted = events[which];
    if (wanted == 0 || ((style & EPOLLONESHOT) && !armed)) continue;
    if (random.percent(50)) set(which, fds[which], 0);
    set(which, fds[which], wanted);
  }
}

std::shared_ptr<OwnEpoll> random_epoll(Random& random) {
  std::lock_guard lock(registry_mutex);
  return all_epolls.empty() ? nullptr : all_epolls[random.below(all_epolls.size())];
}

Poke::Poke(Doing* of)
    : fd(static_cast<int>(CHECKED(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)))), owner(of) {}

Poke::~Poke() { close(fd); }

const char* missed_poke(int64_t limit_ns) {
  std::lock_guard lock(registry_mutex);
  for (const Poke* poke : all_pokes) {
    const int64_t since = poke->since.load(), now = now_ns();
    const char* call = poke->owner->call.load();
    if (since == 0 || call == nullptr || call[0] == 'a')
      continue;  // "a blocking receive" hears no poke
    if (now - std::max(since, poke->owner->begun.load()) > limit_ns &&
        poke->owner->call.load() == call)
      return call;
  }
  return nullptr;
}

void poke_one(Random& random) {
  std::lock_guard lock(registry_mutex);
  if (all_pokes.empty()) return;
  Poke* poke = all_pokes[random.below(all_pokes.size())];
  int64_t none = 0;
  poke->since.compare_exchange_strong(none, now_ns());
  const uint64_t one = 1;
  (void)!write(poke->fd, &one, sizeof(one));
}

Waiter::Waiter(End& end, bool reads, bool writes, Random& random)
    : end_(end),
      reads_(reads),
      writes_(writes),
      random_(random),
      current_(reads ? end.doing : end.writer_doing),
      poke_(current_) {
  if (end_.quiet || in_child) return;
  std::lock_guard lock(registry_mutex);
  all_pokes.push_back(&poke_);
}

Waiter::~Waiter() {
  if (in_child) return;
  std::lock_guard lock(registry_mutex);
  std::erase(all_pokes, &poke_);
  for (const auto& mine : epolls_) {
    if (mine == nullptr) continue;
    std::erase(all_epolls, mine);
    std::lock_guard entries(mine->mutex);  // movers are through with it
    mine->events[0] = mine->events[1] = 0;
  }
}

void Waiter::run() {
  const size_t pauses = random_.below(4) == 0 ? 50 : 1000;
  for (;;) {
    bool blocked_in = !wants_in(), blocked_out = !wants_out();
    const bool had_out = !blocked_out;
    if (random_.below(pauses) == 0) sleep_us(static_cast<int64_t>(random_.size(20'000)));
    // To the end of what is there: an edge asks for it.
    while (!blocked_in || !blocked_out) {
      if (!blocked_in) {
        bool drained = false;
        const Step step = end_.read_some(random_, false, &drained);
        if (step == Step::kBlocked && said_in_) {
          counts.false_in++;
          say("note: slot %d life %d: %s said IN for nothing", end_.plan.slot, end_.plan.life,
              last_call_);
        }
        said_in_ = false;
        blocked_in = step != Step::kMoved || (drained && !ended_ && random_.percent(50));
        if (!blocked_in && writes_ && end_.wants_out()) blocked_out = false;
      }
      if (!blocked_out) {
        const Step step = end_.write_some(random_, false);
        if (step == Step::kBlocked && said_out_ && end_.wants_out()) counts.false_out++;
        said_out_ = false;
        blocked_out = step != Step::kMoved;
      }
    }
    if (writes_ && wants_out() && !had_out) continue;  // its turn came with what was read
    const bool over_in = !reads_ || !end_.reading(), over_out = !writes_ || !end_.writing();
    if (over_in && over_out) return;
    if (!wants_in() && !wants_out()) {
      if (reads_ && end_.reading()) continue;
      end_.wait_for_turn();
      continue;
    }
    wait();
  }
}

/// A blocking call may wait for what can come without this thread's doing only.
bool Waiter::call_blocks(bool in, bool out) {
  if (in && (!out || !writes_)) {
    bool drained = false;
    (void)end_.read_some(random_, true, &drained);
    return true;
  }
  if (out && (!reads_ || end_.plan.shape == Shape::kExchange || !in)) {
    (void)end_.write_some(random_, true);
    return true;
  }
  return false;
}

int Waiter::time_out() {
  if (end_.quiet || random_.percent(50)) return -1;
  return random_.percent(20) ? 0 : static_cast<int>(random_.size(500));
}

void Waiter::name_call(const char* call) {
  if (call != nullptr) last_call_ = call;
  if (call != nullptr) current_->begun.store(now_ns(), std::memory_order_relaxed);
  current_->call.store(call, std::memory_order_relaxed);
}

void Waiter::take_poke() {
  poke_.since.store(0);
  uint64_t n = 0;
  (void)!read(poke_.fd, &n, sizeof(n));
}

bool Waiter::by_poll(bool in, bool out, bool masked) {
  pollfd fds[3];
  nfds_t n = 0;
  fds[n++] = {poke_.fd, POLLIN, 0};
  const bool apart = end_.fd != end_.write_fd;
  const short in_events = static_cast<short>(POLLIN | (random_.percent(30) ? POLLRDHUP : 0));
  if (in) fds[n++] = {end_.fd, static_cast<short>(in_events | (out && !apart ? POLLOUT : 0)), 0};
  if (out && (!in || apart)) fds[n++] = {end_.write_fd, POLLOUT, 0};
  const int limit = time_out();
  name_call(masked ? "ppoll" : "poll");
  int ready = 0;
  if (masked) {
    sigset_t none;
    sigemptyset(&none);
    const timespec time{limit / 1000, limit % 1000 * 1'000'000L};
    ready = ppoll(fds, n, limit < 0 ? nullptr : &time, random_.percent(50) ? &none : nullptr);
  } else {
    ready = poll(fds, n, limit);
  }
  name_call(nullptr);
  if (ready < 0 && errno != EINTR) fail("poll: %s", errno_name(errno));
  if (ready <= 0) return false;
  if (fds[0].revents != 0) take_poke();
  bool told = false;
  for (nfds_t i = 1; i < n; ++i) {
    if ((fds[i].revents & POLLNVAL) != 0) fail("poll says POLLNVAL");
    told = told || fds[i].revents != 0;
    said_in_ = said_in_ || (fds[i].revents & POLLIN) != 0;
    said_out_ = said_out_ || (fds[i].revents & POLLOUT) != 0;
  }
  return told;
}

bool Waiter::by_select(bool in, bool out, bool masked) {
  const int most = std::max({poke_.fd, end_.fd, end_.write_fd});
  if (most >= FD_SETSIZE) return by_poll(in, out, masked);
  fd_set read_set, write_set;
  FD_ZERO(&read_set);
  FD_ZERO(&write_set);
  FD_SET(poke_.fd, &read_set);
  if (in) FD_SET(end_.fd, &read_set);
  if (out) FD_SET(end_.write_fd, &write_set);
  const int limit = time_out();
  name_call(masked ? "pselect" : "select");
  int ready = 0;
  if (masked) {
    sigset_t none;
    sigemptyset(&none);
    const timespec time{limit / 1000, limit % 1000 * 1'000'000L};
    ready = pselect(most + 1, &read_set, &write_set, nullptr, limit < 0 ? nullptr : &time,
                    random_.percent(50) ? &none : nullptr);
  } else {
    timeval time{limit / 1000, limit % 1000 * 1000L};
    ready = select(most + 1, &read_set, &write_set, nullptr, limit < 0 ? nullptr : &time);
  }
  name_call(nullptr);
  if (ready < 0 && errno != EINTR) fail("select: %s", errno_name(errno));
  if (ready <= 0) return false;
  if (FD_ISSET(poke_.fd, &read_set)) take_poke();
  const bool readable = in && FD_ISSET(end_.fd, &read_set),
             writable = out && FD_ISSET(end_.write_fd, &write_set);
  said_in_ = said_in_ || readable;
  said_out_ = said_out_ || writable;
  return readable || writable;
}

/// Waits on an instance whose entries are set; through the outer one if there is one.
bool Waiter::wait_on(OwnEpoll& epoll, const char* call) {
  epoll_event events[4];
  const int most = random_.percent(50) ? 4 : 1;
  const int limit = time_out();
  const int at = epoll.outer >= 0 ? epoll.outer : epoll.epfd;
  name_call(call);
  int ready = 0;
  const size_t way = random_.below(epoll.outer >= 0 ? 5 : 3);
  sigset_t none;
  sigemptyset(&none);
  const timespec time{limit / 1000, limit % 1000 * 1'000'000L};
  if (way == 0) {
    ready = epoll_wait(at, events, most, limit);
  } else if (way == 1) {
    ready = epoll_pwait(at, events, most, limit, &none);
  } else if (way == 2) {
    ready = epoll_pwait2(at, events, most, limit < 0 ? nullptr : &time, nullptr);
  } else {
    pollfd p{at, POLLIN, 0};  // an epoll descriptor in poll
    ready = poll(&p, 1, limit);
    if (ready > 0) ready = epoll_wait(at, events, most, 0);
  }
  name_call(nullptr);
  if (ready < 0 && errno != EINTR) fail("%s: %s", call, errno_name(errno));
  if (ready > 0 && epoll.outer >= 0) {
    // The outer one says only that the inner one has something.
    ready = epoll_wait(epoll.epfd, events, 4, 0);
    if (ready < 0 && errno != EINTR) fail("inner epoll_wait: %s", errno_name(errno));
  }
  bool told = false;
  for (int i = 0; i < ready; ++i) {
    if (events[i].data.u64 == kPokeData) {
      take_poke();
    } else if (events[i].data.u64 < 2) {
      told = true;
      ended_ = ended_ || (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
      if ((epoll.style & EPOLLET) == 0) {
        said_in_ = said_in_ || (events[i].events & EPOLLIN) != 0;
        said_out_ = said_out_ || (events[i].events & EPOLLOUT) != 0;
      }
    } else {
      fail("%s: an event from nowhere: %#llx", call,
           static_cast<unsigned long long>(events[i].data.u64));
    }
  }
  return told;
}

bool Waiter::by_epoll(int kind, bool in, bool out) {
  std::shared_ptr<OwnEpoll>& mine = epolls_[kind];
  // A fresh one now and then: the closing of the old one takes its entries with it.
  const bool keep = random_.percent(90);
  if (mine == nullptr) {
    mine = std::make_shared<OwnEpoll>();
    mine->epfd = static_cast<int>(CHECKED(epoll_create1(EPOLL_CLOEXEC)));
    if (kind == kEdge || kind == kNestedEdge) mine->style = EPOLLET;
    if (kind == kShot) mine->style = EPOLLONESHOT | (random_.percent(50) ? uint32_t{EPOLLET} : 0);
    epoll_event event{EPOLLIN, {}};
    event.data.u64 = kPokeData;
    CHECKED(epoll_ctl(mine->epfd, EPOLL_CTL_ADD, poke_.fd, &event));
    if (kind == kNestedLevel || kind == kNestedEdge) {
      mine->outer = static_cast<int>(CHECKED(epoll_create1(EPOLL_CLOEXEC)));
      CHECKED(epoll_ctl(mine->outer, EPOLL_CTL_ADD, mine->epfd, &event));
    }
    if (!end_.quiet && !in_child) {
      std::lock_guard lock(registry_mutex);
      all_epolls.push_back(mine);
    }
  }
  const bool apart = end_.fd != end_.write_fd;
  {
    std::lock_guard lock(mine->mutex);
    const bool both =
        kind == kEdge || kind == kNestedEdge;  // set once, for all that this thread is for
    const bool for_in = both ? reads_ : in, for_out = both ? writes_ : out;
    uint32_t want_in = 0, want_out = 0;
    if (for_in) want_in = EPOLLIN | EPOLLRDHUP;
    if (for_out) want_out = EPOLLOUT;
    if (apart) {
      if (!both || mine->events[0] != want_in) mine->set(0, end_.fd, want_in);
      if (!both || mine->events[1] != want_out) mine->set(1, end_.write_fd, want_out);
    } else if (!both || mine->events[0] != (want_in | want_out)) {
      mine->set(0, end_.fd, want_in | want_out);
    }
    mine->armed = true;
  }
  bool told = false;
  while (!told) {
    told = wait_on(*mine, kNames[kind]);
    if (!told && kind == kReAdded && random_.percent(50)) break;
  }
  std::lock_guard lock(mine->mutex);
  mine->armed = false;
  if (kind == kReAdded || !keep) {
    mine->set(0, mine->fds[0], 0);
    if (apart) mine->set(1, mine->fds[1], 0);
  }
  if (!keep && !in_child) {
    std::lock_guard registry(registry_mutex);
    std::erase(all_epolls, mine);
  }
  const std::shared_ptr<OwnEpoll> gone = keep ? nullptr : mine;
  if (!keep) mine = nullptr;
  return told;
}

void Waiter::wait() {
  counts.waits++;
  said_in_ = said_out_ = false;
  const bool in = wants_in(), out = wants_out();
  if (!in && !out) return;  // the other direction's thread has just found the end
  const size_t way = random_.below(14);
  if (way < 4 && call_blocks(in, out)) return;
  if (way < 10) {
    const bool masked = random_.percent(50), polls = way < 7;
    while (!(polls ? by_poll(in, out, masked) : by_select(in, out, masked))) {
    }
    return;
  }
  const int kind = static_cast<int>(random_.below(kKinds));
  while (!by_epoll(kind, in, out)) {
  }
}

}  // namespace stress
