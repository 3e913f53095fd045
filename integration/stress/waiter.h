// All the ways in which one thread waits for one end, a random one each time.
//
// Every way is allowed at every time, because a wait comes behind an EAGAIN (or a short read) only.
// Whatever else ends a wait (a time-out, a signal, the poke) does not lead to a look at the stream:
// the thread waits on, so that nothing but the stream's own news helps.
#pragma once

#include <memory>

#include "end.h"

namespace stress {

/// An epoll instance of one waiter. Its entries are changed by movers as well, under `mutex`.
struct OwnEpoll {
  std::mutex mutex;
  int epfd = -1;
  int outer = -1;      // the instance that holds epfd, if it is nested
  uint32_t style = 0;  // EPOLLET, EPOLLONESHOT
  int fds[2] = {-1, -1};
  uint32_t events[2] = {0, 0};  // what the entry has; 0: no entry
  bool armed = false;           // a thread waits; with ONESHOT movers may fire it only then
  ~OwnEpoll();
  void set(int which, int fd, uint32_t wanted);  // adds, changes or removes
  void disturb(Random& random);                  // as a thread that calls epoll_ctl beside a wait
};
std::shared_ptr<OwnEpoll> random_epoll(Random& random);

/// Somebody else's event beside the stream: what waits for both must hear of it.
struct Poke {
  explicit Poke(Doing* owner);
  ~Poke();
  int fd;
  Doing* const owner;
  std::atomic<int64_t> since{0};  // 0: not poked
};
void poke_one(Random& random);
/// Whether somebody sleeps beside a poke; for the watch.
const char* missed_poke(int64_t limit_ns);

/// In a forked child no other thread disturbs, and locks may be held by threads that are not there.
extern bool in_child;

class Waiter {
 public:
  /// `reads`, `writes`: the directions that this thread is for.
  Waiter(End& end, bool reads, bool writes, Random& random);
  ~Waiter();
  /// Works until its directions are over.
  void run();

 private:
  bool wants_in() const { return reads_ && end_.reading(); }
  bool wants_out() const { return writes_ && end_.wants_out(); }
  void wait();
  bool call_blocks(bool in, bool out);
  bool by_poll(bool in, bool out, bool masked);
  bool by_select(bool in, bool out, bool masked);
  bool by_epoll(int kind, bool in, bool out);
  bool wait_on(OwnEpoll& epoll, const char* call);
  void take_poke();
  int time_out();
  void name_call(const char* call);

  End& end_;
  const bool reads_, writes_;
  Random& random_;
  Doing* const current_;
  Poke poke_;
  std::shared_ptr<OwnEpoll> epolls_[6];  // made when they are wanted
  const char* last_call_ = "nothing";
  bool said_in_ = false, said_out_ = false;  // a wait by level said so last
  bool ended_ = false;                       // an edge has told of the end: there may be no other
};

}  // namespace stress
