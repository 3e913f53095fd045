/* O_NONBLOCK set by fcntl and by FIONBIO, before and after the lift, and what it does not touch. */
#include "pair.h"

static void set_flag(const struct Pair* pair, int fd, int on) {
  if (strstr(pair->variant, "fionbio") != NULL) {
    show("FIONBIO", ioctl(fd, FIONBIO, &on));
  } else {
    int flags = fcntl(fd, F_GETFL);
    show("F_SETFL", fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK));
  }
  say("O_NONBLOCK: %d", !!(fcntl(fd, F_GETFL) & O_NONBLOCK));
}

static void user(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  char byte;
  /* Buffers that no message fits into exactly: full for a large one is full for a small one. */
  if (strstr(pair->variant, "odd") != NULL) send_pattern(fd, 1234, 0);
  say("access mode: %d", fcntl(fd, F_GETFL) & O_ACCMODE);
  set_flag(pair, fd, 1);
  show("recv", recv(fd, &byte, 1, 0));
  show("read", read(fd, &byte, 1));
  show("readv", readv(fd, &(struct iovec){&byte, 1}, 1));
  fill_until_full(fd);
  show("send when full", send(fd, &byte, 1, 0));
  show("write when full", write(fd, &byte, 1));
  CHECKED(fcntl(fd, F_SETFD, FD_CLOEXEC));
  say("close on exec: %d, O_NONBLOCK still %d", fcntl(fd, F_GETFD),
      !!(fcntl(fd, F_GETFL) & O_NONBLOCK));
  set_flag(pair, fd, 0);
  tell(pair);
  await(pair);
  tell(pair); /* the peer now waits 80 ms, then sends one byte */
  int64_t start = now_ns();
  show("recv waits", recv(fd, &byte, 1, 0));
  say("waited: %s", ms_since(start) > 70 ? "yes" : "NO");
  struct timeval limit = {0, 0};
  socklen_t size = sizeof(limit);
  CHECKED(getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, &size));
  say("SO_RCVTIMEO: %ld", (long)limit.tv_sec);
}

static void peer(struct Pair* pair) {
  static char buffer[1 << 20];
  open_stream(pair);
  await(pair);
  struct pollfd one = {pair->stream, POLLIN, 0};
  while (poll(&one, 1, 300) == 1) CHECKED(recv(pair->stream, buffer, sizeof(buffer), 0));
  tell(pair);
  await(pair);
  sleep_ms(80);
  CHECKED(send(pair->stream, "x", 1, 0));
}

/* False: bytes were lost. */
static bool move_1_mib(int fd) {
  static uint8_t out[1 << 20], in[1 << 20];
  fill_pattern(out, sizeof(out), 0);
  size_t sent = 0, got = 0;
  while (sent < sizeof(out) || got < sizeof(in)) {
    struct pollfd one = {fd, (short)((sent < sizeof(out) ? POLLOUT : 0) | POLLIN), 0};
    CHECKED(poll(&one, 1, 5000));
    size_t want = 700 + sent % 3000 < sizeof(out) - sent ? 700 + sent % 3000 : sizeof(out) - sent;
    ssize_t n = want > 0 ? send(fd, out + sent, want, MSG_NOSIGNAL) : 0;
    if (n > 0) sent += (size_t)n;
    n = got < sizeof(in) ? recv(fd, in + got, sizeof(in) - got, 0) : 0;
    if (n > 0) got += (size_t)n;
  }
  return memcmp(in, out, sizeof(in)) == 0;
}

static void move_both_ways(struct Pair* pair) {
  open_cold_stream(pair);
  CHECKED(fcntl(pair->stream, F_SETFL, O_NONBLOCK));
  bool intact = move_1_mib(pair->stream);
  while (not_lifted_yet(pair)) intact = intact && move_1_mib(pair->stream);
  say("both ways: %s", intact ? "intact" : "DAMAGED");
  tell(pair);
  await(pair);
}

static const struct PairCase kCases[] = {
    {"fcntl_in_server", user, peer, true},
    {"fionbio_in_client", peer, user, true},
    {"odd_fill", user, peer, true},
    {"set_before_lift", move_both_ways, move_both_ways, true},
};
PAIR_MAIN(kCases)
