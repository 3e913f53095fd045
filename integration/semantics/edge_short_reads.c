/* An edge-triggered reader takes a count shorter than it asked for to mean that all is read, as epoll(7)
 * allows, and waits for the next edge: from the first byte on, over every switch and every edge of a
 * buffer. */
#include "pair.h"

enum { kBytes = 48 << 20 };

static void reads(struct Pair* pair) {
  open_cold_stream(pair);
  static uint8_t piece[4099];
  size_t ask = strcmp(pair->variant, "odd") == 0 ? sizeof(piece) : 4096;
  int fd = pair->stream;
  CHECKED(fcntl(fd, F_SETFL, O_NONBLOCK));
  int epoll = (int)CHECKED(epoll_create1(EPOLL_CLOEXEC));
  struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.u64 = 77};
  CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
  uint64_t at = 0;
  int strangers = 0;
  bool ended = false;
  while (!ended) {
    int n = (int)CHECKED(epoll_wait(epoll, &event, 1, 5000));
    if (n == 0) fail("no edge for 5 s at %llu", (unsigned long long)at);
    if (event.data.u64 != 77) ++strangers;
    for (;;) {
      ssize_t got = recv(fd, piece, ask, 0);
      if (got == 0) ended = true;
      if (got < 0 && errno != EAGAIN) fail("recv: %s", strerror(errno));
      if (got <= 0) break;
      if (!pattern_holds(piece, (size_t)got, at)) fail("wrong bytes at %llu", (unsigned long long)at);
      at += (uint64_t)got;
      if ((size_t)got < ask && (event.events & EPOLLRDHUP) == 0) break;
    }
  }
  say("read %llu, strangers %d", (unsigned long long)at, strangers);
  CHECKED(epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
  CHECKED(close(fd));
  pair->stream = -1;
  /* Nothing is left in the instance: nothing may come. */
  for (int i = 0; i < 20; ++i) {
    int n = (int)CHECKED(epoll_wait(epoll, &event, 1, 5));
    if (n != 0) fail("an event of nobody's: %llx", (unsigned long long)event.data.u64);
  }
  say("then silence");
}

static void sends(struct Pair* pair) {
  open_cold_stream(pair);
  send_pattern(pair->stream, kBytes, 0);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  sleep_ms(50);
}

static const struct PairCase kCases[] = {
    {"odd", reads, sends, true}, {"even", sends, reads, true}};
PAIR_MAIN(kCases)
