/* Time limits of a few milliseconds, in every call that has one, beside a lifted stream: never early, and
 * no later than over TCP. */
#include <sys/time.h>

#include "pair.h"

enum { kTries = 12, kSlackMs = 3 };

struct Call {
  const char* name;
  long (*wait)(int fd, int epoll, int microseconds);
  bool milliseconds_only;
};

static struct timespec as_timespec(int us) { return (struct timespec){us / 1000000, us % 1000000 * 1000L}; }

static long by_poll(int fd, int epoll, int us) {
  (void)epoll;
  return poll(&(struct pollfd){fd, POLLIN, 0}, 1, us / 1000);
}

static long by_ppoll(int fd, int epoll, int us) {
  (void)epoll;
  struct timespec limit = as_timespec(us);
  return ppoll(&(struct pollfd){fd, POLLIN, 0}, 1, &limit, NULL);
}

static long by_select(int fd, int epoll, int us) {
  (void)epoll;
  fd_set in;
  FD_ZERO(&in);
  FD_SET(fd, &in);
  return select(fd + 1, &in, NULL, NULL, &(struct timeval){0, us});
}

static long by_pselect(int fd, int epoll, int us) {
  (void)epoll;
  struct timespec limit = as_timespec(us);
  fd_set in;
  FD_ZERO(&in);
  FD_SET(fd, &in);
  return pselect(fd + 1, &in, NULL, NULL, &limit, NULL);
}

static long by_epoll(int fd, int epoll, int us) {
  (void)fd;
  return epoll_wait(epoll, &(struct epoll_event){0}, 1, us / 1000);
}

static long by_epoll_pwait(int fd, int epoll, int us) {
  (void)fd;
  sigset_t none;
  sigemptyset(&none);
  return epoll_pwait(epoll, &(struct epoll_event){0}, 1, us / 1000, &none);
}

static long by_epoll_pwait2(int fd, int epoll, int us) {
  (void)fd;
  struct timespec limit = as_timespec(us);
  return epoll_pwait2(epoll, &(struct epoll_event){0}, 1, &limit, NULL);
}

static const struct Call kCalls[] = {
    {"poll", by_poll, true},
    {"ppoll", by_ppoll, false},
    {"select", by_select, false},
    {"pselect", by_pselect, false},
    {"epoll_wait", by_epoll, true},
    {"epoll_pwait", by_epoll_pwait, true},
    {"epoll_pwait2", by_epoll_pwait2, false},
};

static void waiter(struct Pair* pair) {
  open_stream(pair);
  int epoll = (int)CHECKED(epoll_create1(0));
  struct epoll_event event = {.events = EPOLLIN};
  CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, pair->stream, &event));
  static const int kLimits[] = {1000, 3000, 10000, 1500, 200};
  for (size_t c = 0; c < sizeof(kCalls) / sizeof(*kCalls); ++c) {
    for (size_t l = 0; l < sizeof(kLimits) / sizeof(*kLimits); ++l) {
      if (kCalls[c].milliseconds_only && kLimits[l] % 1000 != 0) continue;
      double best = 1e9; /* the least: the machine may be busy */
      bool early = false;
      for (int i = 0; i < kTries; ++i) {
        int64_t start = now_ns();
        long result = kCalls[c].wait(pair->stream, epoll, kLimits[l]);
        double late = ms_since(start) - kLimits[l] / 1000.0;
        if (result != 0) fail("%s: %ld", kCalls[c].name, result);
        early = early || late < 0;
        if (late < best) best = late;
      }
      char label[64];
      snprintf(label, sizeof(label), "%s of %d us, late", kCalls[c].name, kLimits[l]);
      say("%s of %d us: %s", kCalls[c].name, kLimits[l], early ? "EARLY" : "never early");
      measure(label, best, kSlackMs);
    }
  }
}

static void sleeper(struct Pair* pair) {
  open_stream(pair);
  drain("drained", pair->stream);
}

/* What comes meanwhile is not what is waited for: the limit goes on, it does not begin again. */
static void under_traffic(struct Pair* pair) {
  enum { kLimitMs = 250 };
  open_stream(pair);
  int fd = pair->stream, epoll = (int)CHECKED(epoll_create1(0));
  struct epoll_event event = {.events = EPOLLRDHUP};
  CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
  struct timeval limit = {0, kLimitMs * 1000};
  CHECKED(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
  tell(pair);
  for (int how = 0; how < 4; ++how) {
    static const char* const kNames[] = {"poll", "select", "epoll_wait", "recv, MSG_WAITALL"};
    static char buffer[100000];
    fd_set bad;
    FD_ZERO(&bad);
    FD_SET(fd, &bad);
    int64_t start = now_ns();
    long result = how == 0   ? poll(&(struct pollfd){fd, POLLRDHUP, 0}, 1, kLimitMs)
                  : how == 1 ? select(fd + 1, NULL, NULL, &bad, &(struct timeval){0, kLimitMs * 1000})
                  : how == 2 ? epoll_wait(epoll, &event, 1, kLimitMs)
                             : recv(fd, buffer, sizeof(buffer), MSG_WAITALL);
    double waited = ms_since(start);
    say("%s: %s", kNames[how], how < 3 ? result == 0 ? "time is up" : "WRONG" : result > 0 ? "a part" : "NOTHING");
    say("  long enough: %s", waited >= kLimitMs - 1 ? "yes" : "NO");
    measure(kNames[how], waited, 60);
  }
  tell(pair);
}

/* A byte now and then. */
static void trickles(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  for (struct pollfd turn = {pair->control, POLLIN, 0}; poll(&turn, 1, 7) == 0;) {
    CHECKED(send(pair->stream, "x", 1, MSG_NOSIGNAL));
  }
}

static const struct PairCase kCases[] = {
    {"under_traffic", trickles, under_traffic, true},
    {"server", waiter, sleeper, true},
    {"client", sleeper, waiter, true},
};
PAIR_MAIN(kCases)
