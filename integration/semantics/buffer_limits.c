/* SO_SNDBUF and SO_RCVBUF that a program has set bound what a sender gets rid of while nobody reads: set
 * before the connection or (SO_SNDBUF) on a lifted stream, at either end or at both. */
#include "pair.h"

enum { kSmall = 32 << 10, kPiece = 1000, kSlackKib = 160 };

static bool has(const struct Pair* pair, const char* word) { return strstr(pair->variant, word) != NULL; }

static void set(int fd, int option, int value) {
  int now = -1;
  socklen_t size = sizeof(now);
  show("setsockopt", setsockopt(fd, SOL_SOCKET, option, &value, sizeof(value)));
  CHECKED(getsockopt(fd, SOL_SOCKET, option, &now, &size));
  say("reads back: %d", now);
}

static uint64_t fill(int fd) {
  static char piece[kPiece];
  uint64_t total = 0;
  int quiet = 0;
  while (quiet < 4) { /* over TCP the peer's window opens a little later */
    ssize_t n = send(fd, piece, sizeof(piece), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) {
      total += (uint64_t)n;
      quiet = 0;
    } else {
      sleep_ms(20);
      ++quiet;
    }
  }
  return total;
}

static void read_all(int fd) {
  static char buffer[1 << 20];
  for (struct pollfd one = {fd, POLLIN, 0}; poll(&one, 1, 300) == 1;) {
    CHECKED(recv(fd, buffer, sizeof(buffer), 0));
  }
}

static void sender(struct Pair* pair) {
  bool early = has(pair, "early");
  learn_address(pair);
  pair->stream = (int)CHECKED(socket(AF_INET, SOCK_STREAM, 0));
  if (early && has(pair, "sndbuf")) set(pair->stream, SO_SNDBUF, kSmall);
  CHECKED(connect(pair->stream, (struct sockaddr*)&pair->address, pair->address_size));
  warm_up_as_client(pair->stream);
  if (!early && has(pair, "sndbuf")) set(pair->stream, SO_SNDBUF, kSmall);
  await(pair);
  uint64_t taken = fill(pair->stream);
  say("took some: %d", taken >= 4096);
  measure("KiB taken", (double)taken / 1024, kSlackKib);
  struct pollfd one = {pair->stream, POLLOUT, 0};
  show("POLLOUT when full", poll(&one, 1, 0));
  tell(pair);
  show("POLLOUT when read", poll(&one, 1, 5000));
  await(pair);
  send_pattern(pair->stream, 3 << 20, 0); /* much larger than any bound, and whole */
  if (has(pair, "grows")) {
    set(pair->stream, SO_SNDBUF, 200000);
    tell(pair);
    await(pair);
    taken = fill(pair->stream);
    say("more than before: %d", taken >= 100000);
    tell(pair);
    await(pair);
  }
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void receiver(struct Pair* pair) {
  bool early = has(pair, "early");
  listen_on_loopback(pair, AF_INET, 5);
  if (early && has(pair, "rcvbuf")) set(pair->listener, SO_RCVBUF, kSmall);
  pair->stream = (int)CHECKED(accept(pair->listener, NULL, NULL));
  warm_up_as_server(pair->stream);
  if (!early && has(pair, "rcvbuf")) set(pair->stream, SO_RCVBUF, kSmall);
  tell(pair);
  await(pair);
  int queued = -1;
  CHECKED(ioctl(pair->stream, FIONREAD, &queued));
  say("some lie here: %d", queued > 0);
  read_all(pair->stream);
  tell(pair);
  receive_pattern(pair->stream, 3 << 20, 0);
  if (has(pair, "grows")) {
    await(pair);
    tell(pair);
    await(pair);
    read_all(pair->stream);
    tell(pair);
  }
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"sndbuf_and_rcvbuf_early", receiver, sender, true},
    {"sndbuf", receiver, sender, true},
    {"sndbuf_early", receiver, sender, true},
    {"rcvbuf_early", receiver, sender, true},
    {"sndbuf_and_rcvbuf_early_grows", receiver, sender, true},
};
PAIR_MAIN(kCases)
