/* select and pselect: read, write and exception sets, time-outs, a pipe beside the stream. */
#include "pair.h"

static int pipe_ends[2];

static void select_all(const char* label, int fd, bool reading, bool writing, int timeout_ms) {
  fd_set in, out, bad;
  FD_ZERO(&in);
  FD_ZERO(&out);
  FD_ZERO(&bad);
  FD_SET(fd, &bad);
  FD_SET(pipe_ends[0], &in);
  if (reading) FD_SET(fd, &in);
  if (writing) FD_SET(fd, &out);
  int top = fd > pipe_ends[0] ? fd : pipe_ends[0];
  struct timeval limit = {timeout_ms / 1000, timeout_ms % 1000 * 1000};
  int64_t start = now_ns();
  long result = select(top + 1, &in, &out, &bad, timeout_ms < 0 ? NULL : &limit);
  show(label, result);
  say("  in %d out %d bad %d pipe %d", FD_ISSET(fd, &in), FD_ISSET(fd, &out), FD_ISSET(fd, &bad),
      FD_ISSET(pipe_ends[0], &in));
  if (result == 0) say("  time left: %ld", limit.tv_sec * 1000 + limit.tv_usec / 1000);
  measure(label, ms_since(start), 100);
}

static void waiter(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  CHECKED(pipe(pipe_ends));
  select_all("nothing, time-out 0", fd, true, false, 0);
  select_all("nothing, time-out 120", fd, true, false, 120);
  select_all("writable", fd, false, true, -1);
  select_all("both", fd, true, true, -1);
  tell(pair);
  select_all("data comes", fd, true, false, 5000);
  select_all("data is there", fd, true, true, 0);
  CHECKED(write(pipe_ends[1], "x", 1));
  select_all("data and pipe", fd, true, true, 1000);
  select_all("pipe alone", fd, false, false, 1000);
  receive_pattern(fd, 100, 0);
  CHECKED(read(pipe_ends[0], &(char){0}, 1));
  select_all("nothing again", fd, true, false, 0);
  struct timespec limit = {0, 50000000};
  fd_set in;
  FD_ZERO(&in);
  FD_SET(fd, &in);
  show("pselect", pselect(fd + 1, &in, NULL, NULL, &limit, NULL));
  say("  limit untouched: %d", limit.tv_nsec == 50000000);
  show("negative nfds", select(-1, &in, NULL, NULL, &(struct timeval){0, 0}));
  show("no sets", select(0, NULL, NULL, NULL, &(struct timeval){0, 10000}));
  tell(pair);
  select_all("peer shuts", fd, true, false, 5000);
  show("recv", recv(fd, &(char){0}, 1, 0));
  select_all("after EOF", fd, true, true, 0);
  close(fd);
  FD_ZERO(&in);
  FD_SET(fd, &in);
  show("closed", select(fd + 1, &in, NULL, NULL, &(struct timeval){0, 0}));
}

static void peer(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  sleep_ms(50);
  send_pattern(pair->stream, 100, 0);
  await(pair);
  sleep_ms(50);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void full_one(struct Pair* pair) {
  open_stream(pair);
  CHECKED(pipe(pipe_ends));
  fill_until_full(pair->stream);
  select_all("full", pair->stream, true, true, 100);
  tell(pair);
  select_all("room again", pair->stream, true, true, 5000);
  await(pair);
}

static void slow_reader(struct Pair* pair) {
  static char buffer[1 << 20];
  open_stream(pair);
  await(pair);
  sleep_ms(50);
  struct pollfd one = {pair->stream, POLLIN, 0};
  while (poll(&one, 1, 300) == 1) CHECKED(recv(pair->stream, buffer, sizeof(buffer), 0));
  tell(pair);
}

static const struct PairCase kCases[] = {
    {"server_waits", waiter, peer, true},
    {"client_waits", peer, waiter, true},
    {"server_full", full_one, slow_reader, true},
    {"client_full", slow_reader, full_one, true},
};
PAIR_MAIN(kCases)
