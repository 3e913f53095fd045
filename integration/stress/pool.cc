#include "pool.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace stress {
namespace {

enum class Way { kLevel, kLevelShot, kEdge, kEdgeShot, kExclusive, kExclusiveEdge, kNested };
constexpr const char* kNames[] = {
    "pool, level",     "pool, level, one shot", "pool, edge",  "pool, edge, one shot",
    "pool, exclusive", "pool, exclusive edge",  "pool, nested"};

struct Served {
  std::shared_ptr<End> end;
  std::mutex mutex;  // one thread at a time works on it
  bool over = false;
  uint32_t events = 0;  // kLevel: what the entry has
  std::condition_variable told;
};

class Pool {
 public:
  explicit Pool(Way way) : way_(way), instances_(exclusive() ? 3 : 1) {
    for (size_t i = 0; i < instances_; ++i)
      epfds_[i] = static_cast<int>(CHECKED(epoll_create1(EPOLL_CLOEXEC)));
    if (way_ == Way::kNested) {
      outer_ = static_cast<int>(CHECKED(epoll_create1(EPOLL_CLOEXEC)));
      epoll_event event{EPOLLIN, {}};
      CHECKED(epoll_ctl(outer_, EPOLL_CTL_ADD, epfds_[0], &event));
    }
    for (size_t i = 0; i < 3; ++i) {
      std::thread([this, i] { work(epfds_[exclusive() ? i : 0], i); }).detach();
    }
  }

  const char* name() const { return kNames[static_cast<int>(way_)]; }

  void serve(const std::shared_ptr<End>& end) {
    const auto served = std::make_shared<Served>();
    served->end = end;
    uint64_t id = 0;
    {
      std::lock_guard lock(mutex_);
      id = ++last_id_;
      served_[id] = served;
    }
    {
      std::unique_lock lock(served->mutex);
      // Threads that are told at once wait for the lock.
      end->doing->call.store(name());
      served->events = wanted(*end);
      for (size_t i = 0; i < instances_; ++i) control(epfds_[i], EPOLL_CTL_ADD, *served, id);
      served->told.wait(lock, [&] { return served->over; });
      end->doing->call.store(nullptr);
    }
    std::lock_guard lock(mutex_);
    served_.erase(id);
  }

 private:
  bool exclusive() const { return way_ == Way::kExclusive || way_ == Way::kExclusiveEdge; }
  bool edge() const {
    return way_ == Way::kEdge || way_ == Way::kEdgeShot || way_ == Way::kExclusiveEdge;
  }
  bool shot() const { return way_ == Way::kEdgeShot || way_ == Way::kLevelShot; }

  /// Edges have everything from the beginning; but a shot that is armed again looks anew, and would
  /// fire at once.
  uint32_t wanted(const End& end) const {
    uint32_t events = 0;
    const bool all = edge() && !shot();
    if (all || end.reading()) events |= EPOLLIN;
    if (all || end.wants_out()) events |= EPOLLOUT;
    if (edge()) events |= EPOLLET;
    if (edge() && !exclusive()) events |= EPOLLRDHUP;
    if (shot()) events |= EPOLLONESHOT;
    if (exclusive()) events |= EPOLLEXCLUSIVE;
    return events;
  }

  static void control(int epfd, int operation, const Served& served, uint64_t id) {
    epoll_event event{served.events, {}};
    event.data.u64 = id;
    CHECKED(epoll_ctl(epfd, operation, served.end->fd, &event));
  }

  /// Reads and writes; an edge asks for all that is there, the others may leave something.
  static void pump(End& end, Random& random, bool all) {
    for (size_t left = all ? SIZE_MAX : 1 + random.below(8); left > 0; --left) {
      bool drained = false, moved = false;
      if (end.reading()) moved = end.read_some(random, false, &drained) == Step::kMoved;
      if (end.wants_out()) moved = end.write_some(random, false) == Step::kMoved || moved;
      if (!moved) return;
    }
  }

  void handle(uint64_t id, Random& random) {
    std::shared_ptr<Served> served;
    {
      std::lock_guard lock(mutex_);
      const auto found = served_.find(id);
      if (found == served_.end()) return;  // another thread ended it
      served = found->second;
    }
    std::lock_guard lock(served->mutex);
    if (served->over) return;
    End& end = *served->end;
    pump(end, random, edge());
    if (!end.reading() && !end.writing()) {
      served->over = true;
      // Closing takes the entry along; removing it first is as good.
      for (size_t i = 0; i < instances_; ++i) {
        if (random.percent(50) || end.fd != end.write_fd)
          control(epfds_[i], EPOLL_CTL_DEL, *served, id);
      }
      served->told.notify_all();
      return;
    }
    if (edge() && !shot()) return;
    const uint32_t now = wanted(end);
    if (!shot() && now == served->events) return;
    served->events = now;
    for (size_t i = 0; i < instances_; ++i) {
      // An exclusive entry can't be changed: EINVAL.
      const bool anew = exclusive() || random.percent(20);
      if (anew) control(epfds_[i], EPOLL_CTL_DEL, *served, id);
      control(epfds_[i], anew ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, *served, id);
    }
  }

  void work(int epfd, size_t which) {
    Random random(options.seed, static_cast<uint64_t>(way_), which + 77);
    epoll_event events[8];
    for (;;) {
      const int most = 1 + static_cast<int>(random.below(8));
      int ready = 0;
      counts.waits++;
      if (way_ == Way::kNested) {
        pollfd p{outer_, POLLIN, 0};
        ready = random.percent(50) ? poll(&p, 1, -1) : epoll_wait(outer_, events, 1, -1);
        if (ready > 0) ready = epoll_wait(epfd, events, most, 0);
      } else if (random.percent(50)) {
        ready = epoll_wait(epfd, events, most, -1);
      } else {
        const timespec time{1000, 0};
        ready = epoll_pwait2(epfd, events, most, &time, nullptr);
      }
      if (ready < 0 && errno != EINTR) fail("%s: %s", name(), errno_name(errno));
      for (int i = 0; i < ready; ++i) handle(events[i].data.u64, random);
      if (random.below(500) == 0) sleep_us(static_cast<int64_t>(random.size(5'000)));
    }
  }

  const Way way_;
  const size_t instances_;
  int epfds_[3] = {-1, -1, -1};
  int outer_ = -1;
  std::mutex mutex_;
  uint64_t last_id_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Served>> served_;
};

std::vector<Pool*> pools;  // never freed: their threads live as long as the process

}  // namespace

void start_pools() {
  for (int way = 0; way <= static_cast<int>(Way::kNested); ++way)
    pools.push_back(new Pool(static_cast<Way>(way)));
}

void serve_by_pool(const std::shared_ptr<End>& end, Random& random) {
  pools[random.below(pools.size())]->serve(end);
}

}  // namespace stress
