/* shutdown() in one thread wakes another thread of the same process out of its wait. */
#include "pair.h"

static void* shut_later(void* argument) {
  struct Pair* pair = argument;
  sleep_ms(100);
  int how = strstr(pair->variant, "_wr") != NULL   ? SHUT_WR
            : strstr(pair->variant, "_rd") != NULL ? SHUT_RD
                                                   : SHUT_RDWR;
  show("shutdown", shutdown(pair->stream, how));
  return NULL;
}

static void waiter(struct Pair* pair) {
  open_stream(pair);
  count_signal(SIGPIPE, SA_RESTART);
  int fd = pair->stream;
  static char big[16 << 20];
  if (strncmp(pair->variant, "send", 4) == 0) fill_until_full(fd);
  pthread_t thread;
  start_thread(&thread, shut_later, pair);
  int64_t start = now_ns();
  long result = -9;
  struct pollfd one = {fd, POLLIN | POLLRDHUP, 0};
  struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP};
  if (strncmp(pair->variant, "recv", 4) == 0) result = recv(fd, big, 100, 0);
  if (strncmp(pair->variant, "poll", 4) == 0) result = poll(&one, 1, 5000);
  if (strncmp(pair->variant, "send", 4) == 0) {
    result = send(fd, big, sizeof(big), 0);
    if (result > 0) result = 1; /* a part: how much depends on the buffers */
  }
  if (strncmp(pair->variant, "epoll", 5) == 0) {
    int epoll = (int)CHECKED(epoll_create1(0));
    CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
    event.events = 0;
    result = epoll_wait(epoll, &event, 1, 5000);
  }
  int error = errno;
  double waited = ms_since(start);
  join_thread(thread);
  errno = error;
  show("woken with", result);
  measure("woken after ms", waited, 100);
  if (strncmp(pair->variant, "poll", 4) == 0) show_events("poll says", one.revents);
  if (strncmp(pair->variant, "epoll", 5) == 0) show_epoll("epoll says", event.events);
  show("recv", recv(fd, big, 1, MSG_DONTWAIT));
  say("SIGPIPE: %d", (int)signals_seen);
  tell(pair);
  await(pair);
}

static void bystander(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  if (strstr(pair->variant, "_rd") == NULL && strncmp(pair->variant, "send", 4) != 0) {
    drain("drained", pair->stream);
  }
  tell(pair);
}

static const struct PairCase kCases[] = {
    {"recv", bystander, waiter, true},  {"recv_rd", waiter, bystander, true},
    {"send", waiter, bystander, true},  {"send_wr", bystander, waiter, true},
    {"poll", bystander, waiter, true},  {"poll_rd", waiter, bystander, true},
    {"epoll", waiter, bystander, true}, {"epoll_rd", bystander, waiter, true},
};
PAIR_MAIN(kCases)
