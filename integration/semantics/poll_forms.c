/* poll with every kind of time-out and every set of events, a pipe beside the stream. */
#include "pair.h"

static void poll_one(const char* label, int fd, short events, int timeout_ms) {
  struct pollfd one = {fd, events, (short)0x7fff};
  int64_t start = now_ns();
  say("%s:", label);
  show("  poll", poll(&one, 1, timeout_ms));
  show_events("  says", one.revents);
  measure(label, ms_since(start), 100);
}

static void several_at_once(int stream, int pipe_end) {
  struct pollfd set[6] = {{stream, POLLIN, 0},   {stream, POLLOUT, 0}, {-1, POLLIN, 0x55},
                          {pipe_end, POLLIN, 0}, {stream, 0, 0},       {999, POLLIN, 0}};
  show("duplicates, -1, pipe, closed", poll(set, 6, 1000));
  for (int i = 0; i < 6; ++i) show_events("  says", set[i].revents);
}

static void waiter(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  int ends[2];
  CHECKED(pipe(ends));
  poll_one("nothing there, time-out 0", fd, POLLIN, 0);
  poll_one("nothing there, time-out 120", fd, POLLIN, 120);
  poll_one("writable, time-out -1", fd, POLLOUT, -1);
  poll_one("in and out", fd, POLLIN | POLLOUT | POLLRDHUP | POLLPRI, -1);
  poll_one("no events", fd, 0, 50);
  several_at_once(fd, ends[0]);
  tell(pair);
  poll_one("data comes, time-out -5", fd, POLLIN, -5);
  poll_one("data is there", fd, POLLIN | POLLOUT, 1000);
  poll_one("normal data", fd, POLLRDNORM | POLLWRNORM, 0);
  CHECKED(write(ends[1], "x", 1));
  several_at_once(fd, ends[0]);
  receive_pattern(fd, 100, 0);
  poll_one("read again", fd, POLLIN, 0);
  tell(pair);
  struct pollfd both[2] = {{ends[0], POLLHUP, 0}, {fd, POLLIN, 0}};
  show("stream beside an idle pipe", poll(both, 2, 5000));
  show_events("  stream", both[1].revents);
  receive_pattern(fd, 100, 0);
  both[0].events = POLLIN;
  CHECKED(read(ends[0], &(char){0}, 1));
  CHECKED(write(ends[1], "y", 1));
  show("pipe beside an idle stream", poll(both, 2, 5000));
  show_events("  pipe", both[0].revents);
  show("ppoll with time", ppoll(&both[1], 1, &(struct timespec){0, 50000000}, NULL));
  tell(pair);
  poll_one("peer shuts, POLLRDHUP only", fd, POLLRDHUP, 5000);
  poll_one("peer shuts, POLLIN", fd, POLLIN, 5000);
  poll_one("peer shuts, all", fd, POLLIN | POLLOUT | POLLRDHUP, 5000);
  CHECKED(shutdown(fd, SHUT_WR));
  sleep_ms(20);
  poll_one("both shut, no events", fd, 0, 0);
  close(fd);
  poll_one("closed", fd, POLLIN, 5000);
}

static void peer(struct Pair* pair) {
  open_stream(pair);
  for (int i = 0; i < 2; ++i) {
    await(pair);
    sleep_ms(50);
    send_pattern(pair->stream, 100, 0);
  }
  await(pair);
  sleep_ms(50);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void full_one(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  fill_until_full(fd);
  poll_one("full, POLLOUT", fd, POLLOUT, 100);
  poll_one("full, all", fd, POLLIN | POLLOUT | POLLRDHUP, 0);
  tell(pair);
  poll_one("room again", fd, POLLOUT, 5000);
  await(pair);
  poll_one("all was read", fd, POLLOUT | POLLIN, 0);
  tell(pair);
}

static void slow_reader(struct Pair* pair) {
  static char buffer[1 << 20];
  open_stream(pair);
  await(pair);
  sleep_ms(50);
  struct pollfd one = {pair->stream, POLLIN, 0};
  while (poll(&one, 1, 300) == 1) CHECKED(recv(pair->stream, buffer, sizeof(buffer), 0));
  tell(pair);
  await(pair);
}

static const struct PairCase kCases[] = {
    {"server_waits", waiter, peer, true},
    {"client_waits", peer, waiter, true},
    {"server_full", full_one, slow_reader, true},
    {"client_full", slow_reader, full_one, true},
};
PAIR_MAIN(kCases)
