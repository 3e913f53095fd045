/* kill -9 of one end wakes whatever the other end waits in, as soon and with the same result as
 * TCP. */
#include "pair.h"

static bool waits_in(const struct Pair* pair, const char* what) {
  return strstr(pair->variant, what) != NULL;
}

static void* kill_peer_later(void* argument) {
  struct Pair* pair = argument;
  sleep_ms(100);
  kill(pair->peer, SIGKILL);
  return NULL;
}

static void wait_in_poll(int fd, short events, int timeout_ms) {
  struct pollfd one = {fd, events, 0};
  show("poll", poll(&one, 1, timeout_ms));
  show_events("poll says", one.revents);
}

static void wait_in_epoll(int fd, uint32_t events) {
  int epoll = (int)CHECKED(epoll_create1(EPOLL_CLOEXEC));
  struct epoll_event event = {.events = events, .data.u64 = 42};
  CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
  if (events & EPOLLET) {
    event.events = 0;
    show("first edge", epoll_wait(epoll, &event, 1, 0)); /* writable from the start */
  }
  event.events = 0;
  show("epoll_wait", epoll_wait(epoll, &event, 1, 5000));
  show_epoll("epoll says", event.events);
  close(epoll);
}

static void wait_in_select(int fd) {
  fd_set readable;
  FD_ZERO(&readable);
  FD_SET(fd, &readable);
  struct timeval limit = {5, 0};
  show("select", select(fd + 1, &readable, NULL, NULL, &limit));
  show("readable", FD_ISSET(fd, &readable));
}

static void wait_in_send(int fd) {
  static char big[16 << 20];
  /* If the last bytes just found room, send() counts them and the next call names the reset. */
  ssize_t sent = send(fd, big, sizeof(big), MSG_NOSIGNAL);
  if (sent > 0) sent = recv(fd, big, 1, 0);
  show("send, or recv after a part", sent);
}

static void survive(struct Pair* pair) {
  count_signal(SIGPIPE, SA_RESTART);
  int fd = pair->stream;
  pthread_t killer;
  start_thread(&killer, kill_peer_later, pair);
  int64_t start = now_ns();
  char byte;
  if (waits_in(pair, "recv")) show("recv", recv(fd, &byte, 1, 0));
  if (waits_in(pair, "readv")) show("readv", readv(fd, &(struct iovec){&byte, 1}, 1));
  if (waits_in(pair, "waitall")) {
    char some[100];
    show("recv", recv(fd, some, sizeof(some), MSG_WAITALL));
  }
  if (waits_in(pair, "send")) wait_in_send(fd);
  if (waits_in(pair, "poll_in")) wait_in_poll(fd, POLLIN, 5000);
  if (waits_in(pair, "poll_rdhup")) wait_in_poll(fd, POLLRDHUP, -1);
  if (waits_in(pair, "epoll_lt")) wait_in_epoll(fd, EPOLLIN);
  if (waits_in(pair, "epoll_rdhup")) wait_in_epoll(fd, EPOLLRDHUP);
  if (waits_in(pair, "epoll_et")) wait_in_epoll(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
  if (waits_in(pair, "select")) wait_in_select(fd);
  measure("woken after ms", ms_since(start), 100);
  pthread_join(killer, NULL);
  settle();
  show("recv next", recv(fd, &byte, 1, 0));
  show("first send", send(fd, "x", 1, 0));
  settle();
  show("second send", send(fd, "x", 1, 0));
  show("third send", send(fd, "x", 1, 0));
  say("SIGPIPE: %d", (int)signals_seen);
  show("recv last", recv(fd, &byte, 1, 0));
}

static void survivor(struct Pair* pair) {
  open_stream(pair);
  if (strstr(pair->variant, "unread") != NULL) {
    send_pattern(pair->stream, 1000, 0); /* the victim dies with unread bytes: a reset */
  }
  if (waits_in(pair, "send")) fill_until_full(pair->stream);
  tell(pair);
  await(pair);
  survive(pair);
}

static void victim(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  tell(pair);
  for (;;) pause();
}

/* The victim is killed in the middle of a wait of its own. */
static void victim_in_recv(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  tell(pair);
  recv(pair->stream, &(char){0}, 1, 0);
  fail("the victim survived");
}

static const struct PairCase kCases[] = {
    {"recv_of_client", survivor, victim, true},
    {"recv_of_server", victim, survivor, true},
    {"recv_unread", victim, survivor, true},
    {"recv_while_victim_receives", victim_in_recv, survivor, true},
    {"readv", survivor, victim, true},
    {"waitall", survivor, victim, true},
    {"send_full_of_client", survivor, victim, true},
    {"send_full_of_server", victim, survivor, true},
    {"poll_in", survivor, victim, true},
    {"poll_in_unread", survivor, victim, true},
    {"poll_rdhup", victim, survivor, true},
    {"epoll_lt", survivor, victim, true},
    {"epoll_lt_unread", victim, survivor, true},
    {"epoll_rdhup", survivor, victim, true},
    {"epoll_et", victim, survivor, true},
    {"select", survivor, victim, true},
};
PAIR_MAIN(kCases)
