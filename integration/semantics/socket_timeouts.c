/* SO_RCVTIMEO and SO_SNDTIMEO: EAGAIN after the time, a part where a part was moved. */
#include <sys/time.h>

#include "pair.h"

static void set_timeout(int fd, int which, int ms) {
  struct timeval limit = {ms / 1000, (ms % 1000) * 1000};
  show("setsockopt", setsockopt(fd, SOL_SOCKET, which, &limit, sizeof(limit)));
  socklen_t size = sizeof(limit);
  CHECKED(getsockopt(fd, SOL_SOCKET, which, &limit, &size));
  /* The kernel rounds to its tick of 1, 4 or 10 ms. */
  say("reads back: %s", labs(limit.tv_sec * 1000 + limit.tv_usec / 1000 - ms) <= 10 ? "yes" : "NO");
}

static void show_wait(int64_t start, int ms) {
  int error = errno;
  double waited = ms_since(start);
  say("waited long enough: %s", waited >= ms - 1 ? "yes" : "NO");
  measure("waited ms", waited, 100);
  errno = error;
}

static void receive_in_time(struct Pair* pair) {
  char buffer[100];
  if (strstr(pair->variant, "set_before") != NULL) {
    open_cold_stream(pair);
    set_timeout(pair->stream, SO_RCVTIMEO, 200);
    warm_up_as_client(pair->stream);
  } else {
    open_stream(pair);
    set_timeout(pair->stream, SO_RCVTIMEO, 200);
  }
  for (int i = 0; i < 2; ++i) {
    int64_t start = now_ns();
    show("recv", recv(pair->stream, buffer, sizeof(buffer), 0));
    show_wait(start, 200);
  }
  tell(pair);
  await(pair);
  sleep_ms(20);
  int64_t start = now_ns();
  show("recv of a part, MSG_WAITALL", recv(pair->stream, buffer, sizeof(buffer), MSG_WAITALL));
  show_wait(start, 200);
  struct timeval none = {0, 0};
  CHECKED(setsockopt(pair->stream, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof(none)));
  tell(pair);
  start = now_ns();
  show("recv without a time-out", recv(pair->stream, buffer, sizeof(buffer), 0));
  show_wait(start, 300);
  ping_as_client(pair->stream, 8);
}

static void send_late(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  CHECKED(send(pair->stream, "0123456789", 10, 0));
  tell(pair);
  await(pair);
  sleep_ms(350);
  CHECKED(send(pair->stream, "01234", 5, 0));
  pong_as_server(pair->stream, 8);
}

static void send_in_time(struct Pair* pair) {
  static char big[32 << 20];
  open_stream(pair);
  set_timeout(pair->stream, SO_SNDTIMEO, 200);
  int64_t start = now_ns();
  ssize_t sent = send(pair->stream, big, sizeof(big), 0);
  say("send: %s", sent > 0 && sent < (ssize_t)sizeof(big) ? "a part" : "WRONG");
  show_wait(start, 200);
  fill_until_full(pair->stream);
  start = now_ns();
  show("send when full", send(pair->stream, big, sizeof(big), 0));
  show_wait(start, 200);
  start = now_ns();
  show("MSG_DONTWAIT", send(pair->stream, big, 1000, MSG_DONTWAIT));
  measure("MSG_DONTWAIT ms", ms_since(start), 100);
  tell(pair);
  await(pair);
  ping_as_client(pair->stream, 8);
}

/* Reads whatever there is, then echoes again. */
static void read_late(struct Pair* pair) {
  static char buffer[1 << 20];
  open_stream(pair);
  await(pair);
  struct pollfd one = {pair->stream, POLLIN, 0};
  while (poll(&one, 1, 200) == 1) CHECKED(recv(pair->stream, buffer, sizeof(buffer), 0));
  tell(pair);
  pong_as_server(pair->stream, 8);
}

static const struct PairCase kCases[] = {
    {"receive", send_late, receive_in_time, true},
    {"receive_set_before_lift", send_late, receive_in_time, true},
    {"send", read_late, send_in_time, true},
};
PAIR_MAIN(kCases)
