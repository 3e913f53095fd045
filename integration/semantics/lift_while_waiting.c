/* A thread already sits in a wait on the stream when traffic in the other direction lifts it; what
 * comes on the new path wakes it. */
#include "pair.h"

static struct Pair* shared;
static int64_t told_ns; /* set before the other end sends what wakes */

static void* wait_then_read(void* argument) {
  (void)argument;
  int fd = shared->stream;
  const char* how = shared->variant;
  char text[16] = "";
  struct pollfd one = {fd, POLLIN, 0};
  if (strstr(how, "poll") == how) show("poll", poll(&one, 1, 10000));
  if (strstr(how, "select") == how) {
    fd_set readable;
    FD_ZERO(&readable);
    FD_SET(fd, &readable);
    show("select", select(fd + 1, &readable, NULL, NULL, NULL));
  }
  if (strstr(how, "epoll") == how) {
    int epoll = (int)CHECKED(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN | (strstr(how, "edge") != NULL ? EPOLLET : 0)};
    CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
    show("epoll_wait", epoll_wait(epoll, &event, 1, 10000));
    show_epoll("  says", event.events);
  }
  show("recv", recv(fd, text, 5, MSG_WAITALL));
  say("text: %s", text);
  measure("woken after ms", ms_since(told_ns), 100);
  return NULL;
}

static void waiter(struct Pair* pair) {
  open_cold_stream(pair);
  shared = pair;
  pthread_t thread;
  start_thread(&thread, wait_then_read, NULL);
  sleep_ms(100);
  static uint8_t block[1024];
  for (int i = 0; i < 400; ++i) {
    CHECKED(send(pair->stream, block, sizeof(block), MSG_NOSIGNAL));
    if (i % 40 == 39) sleep_ms(20);
  }
  /* Only now has the other end received enough to want a lift; this one has looked for it for long,
   * and looks every now and then. */
  send_until_lifted(pair->stream);
  told_ns = now_ns();
  tell(pair);
  join_thread(thread);
  send_pattern(pair->stream, 100000, 0);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void answerer(struct Pair* pair) {
  open_cold_stream(pair);
  static uint8_t block[400 * 1024];
  show("recv", recv(pair->stream, block, sizeof(block), MSG_WAITALL));
  receive_until_lifted(pair->stream);
  await(pair);
  sleep_ms(100);
  CHECKED(send(pair->stream, "hello", 5, 0));
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"recv_in_server", waiter, answerer, true}, {"recv_in_client", answerer, waiter, true},
    {"poll_in_server", waiter, answerer, true}, {"poll_in_client", answerer, waiter, true},
    {"select", waiter, answerer, true},         {"epoll", answerer, waiter, true},
    {"epoll_edge", waiter, answerer, true},
};
PAIR_MAIN(kCases)
