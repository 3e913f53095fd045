/* SO_RCVLOWAT: fewer bytes than that are not worth a wake-up, for recv, poll, select and epoll; the end of
 * the stream is. */
#include "pair.h"

static void set_mark(int fd, int bytes) {
  show("SO_RCVLOWAT", setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof(bytes)));
  int now = -1;
  socklen_t size = sizeof(now);
  CHECKED(getsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &now, &size));
  say("reads back: %d", now);
}

/* The peer sends so many bytes. */
static void ask(struct Pair* pair, int bytes) {
  CHECKED(send(pair->control, &bytes, sizeof(bytes), 0));
}

static void ask_and_wait(struct Pair* pair, int bytes) {
  ask(pair, bytes);
  await(pair);
  settle();
}

static void show_ready(int fd, int epoll) {
  struct pollfd one = {fd, POLLIN, 0};
  show("  poll", poll(&one, 1, 0));
  fd_set in;
  FD_ZERO(&in);
  FD_SET(fd, &in);
  show("  select", select(fd + 1, &in, NULL, NULL, &(struct timeval){0, 0}));
  struct epoll_event event = {0};
  show("  epoll", epoll_wait(epoll, &event, 1, 0));
}

static void reader(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  char bytes[4096];
  int level = (int)CHECKED(epoll_create1(0)), edge = (int)CHECKED(epoll_create1(0));
  struct epoll_event event = {.events = EPOLLIN};
  CHECKED(epoll_ctl(level, EPOLL_CTL_ADD, fd, &event));
  set_mark(fd, 100);
  uint64_t carried = tcp_carried(fd);
  event.events = EPOLLIN | EPOLLET;
  CHECKED(epoll_ctl(edge, EPOLL_CTL_ADD, fd, &event));
  ask_and_wait(pair, 60);
  say("60 of 100:");
  show_ready(fd, level);
  show("  edge", epoll_wait(edge, &event, 1, 0));
  show("recv, not waiting", recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT | MSG_PEEK));
  ask_and_wait(pair, 60);
  say("120 of 100:");
  show_ready(fd, level);
  show("  edge", epoll_wait(edge, &event, 1, 0));
  show("recv", recv(fd, bytes, sizeof(bytes), 0));
  say("none:");
  show_ready(fd, level);

  /* a blocking call waits for the mark, or for what it asks for where that is less */
  ask(pair, -70); /* twice 70, with a pause */
  show("recv of many", recv(fd, bytes, sizeof(bytes), 0));
  await(pair);
  ask(pair, -70);
  show("recv of 50", recv(fd, bytes, 50, 0));
  await(pair);
  settle();
  show("rest", recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT));
  ask(pair, -70);
  struct pollfd one = {fd, POLLIN, 0};
  show("poll", poll(&one, 1, 5000));
  int queued = 0;
  CHECKED(ioctl(fd, FIONREAD, &queued));
  say("woken at %d", queued);
  await(pair);
  CHECKED(recv(fd, bytes, sizeof(bytes), 0));
  while (epoll_wait(edge, &event, 1, 0) == 1) continue;
  ask(pair, -70);
  show("edge", epoll_wait(edge, &event, 1, 5000));
  CHECKED(ioctl(fd, FIONREAD, &queued));
  say("woken at %d", queued);
  await(pair);
  CHECKED(recv(fd, bytes, sizeof(bytes), 0));

  struct timeval limit = {0, 100000};
  CHECKED(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
  ask_and_wait(pair, 60);
  show("recv, time is up", recv(fd, bytes, sizeof(bytes), 0));
  limit.tv_usec = 0;
  CHECKED(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
  set_mark(fd, 0);
  ask_and_wait(pair, 1);
  say("1 of 1:");
  show_ready(fd, level);
  show("recv", recv(fd, bytes, sizeof(bytes), 0));
  set_mark(fd, 100);
  ask_and_wait(pair, 60);
  set_mark(fd, 50); /* lowered under what lies there */
  say("60 of 50:");
  show_ready(fd, level);
  set_mark(fd, 100);
  show_lifted("while all this", fd, carried);
  ask(pair, 0); /* the end */
  await(pair);
  settle();
  say("the end:");
  show_ready(fd, level);
  show("recv", recv(fd, bytes, sizeof(bytes), 0));
  show("recv", recv(fd, bytes, sizeof(bytes), 0));
}

static void sender(struct Pair* pair) {
  open_stream(pair);
  int bytes;
  while (recv(pair->control, &bytes, sizeof(bytes), 0) == sizeof(bytes)) {
    if (bytes == 0) CHECKED(shutdown(pair->stream, SHUT_WR));
    if (bytes > 0) send_pattern(pair->stream, (size_t)bytes, 0);
    if (bytes < 0) {
      settle();
      send_pattern(pair->stream, (size_t)-bytes, 0);
      settle();
      send_pattern(pair->stream, (size_t)-bytes, 0);
    }
    tell(pair);
    if (bytes == 0) break;
  }
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"server_reads", reader, sender, true},
    {"client_reads", sender, reader, true},
};
PAIR_MAIN(kCases)
