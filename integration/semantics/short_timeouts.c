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

static const struct PairCase kCases[] = {
    {"server", waiter, sleeper, true},
    {"client", sleeper, waiter, true},
};
PAIR_MAIN(kCases)
