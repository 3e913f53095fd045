/* A process that waits on a lifted stream uses no CPU, in whatever call it waits. */
#include <sys/resource.h>

#include "pair.h"

enum { kIdleMs = 1000, kSettle = 150, kSlackMs = 60 };

static double cpu_ms(void) {
  struct rusage usage;
  CHECKED(getrusage(RUSAGE_SELF, &usage));
  return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
         (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e3;
}

static void wait_idle(const struct Pair* pair, int ms) {
  char byte;
  struct pollfd one = {pair->stream, POLLIN, 0};
  struct timeval limit = {ms / 1000, ms % 1000 * 1000};
  if (strcmp(pair->variant, "recv") == 0) {
    CHECKED(setsockopt(pair->stream, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
    recv(pair->stream, &byte, 1, 0);
  } else if (strcmp(pair->variant, "poll") == 0) {
    poll(&one, 1, ms);
  } else if (strcmp(pair->variant, "select") == 0) {
    fd_set readable;
    FD_ZERO(&readable);
    FD_SET(pair->stream, &readable);
    select(pair->stream + 1, &readable, NULL, NULL, &limit);
  } else if (strcmp(pair->variant, "send") == 0) {
    CHECKED(setsockopt(pair->stream, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)));
    fill_until_full(pair->stream);
    send(pair->stream, &byte, 1, 0);
  } else {
    int epoll = (int)CHECKED(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN};
    if (strstr(pair->variant, "out") != NULL) {
      fill_until_full(pair->stream); /* a masked EPOLLOUT must not spin */
      event.events = EPOLLIN | EPOLLOUT;
    }
    CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, pair->stream, &event));
    epoll_wait(epoll, &event, 1, ms);
  }
}

static void waiter(struct Pair* pair) {
  open_stream(pair);
  wait_idle(pair, kSettle); /* spinning is allowed to find out that it does not pay */
  double before = cpu_ms();
  int64_t start = now_ns();
  wait_idle(pair, kIdleMs);
  say("waited: %s", ms_since(start) > kIdleMs - 20 ? "long enough" : "TOO SHORT");
  measure("CPU ms of the waiter", cpu_ms() - before, kSlackMs);
  tell(pair);
}

static void sleeper(struct Pair* pair) {
  open_stream(pair);
  sleep_ms(kSettle);
  double before = cpu_ms();
  await(pair);
  measure("CPU ms of the sleeper", cpu_ms() - before, kSlackMs);
}

static const struct PairCase kCases[] = {
    {"recv", waiter, sleeper, true},  {"send", sleeper, waiter, true},
    {"poll", sleeper, waiter, true},  {"select", waiter, sleeper, true},
    {"epoll", sleeper, waiter, true}, {"epoll_out", waiter, sleeper, true},
};
PAIR_MAIN(kCases)
