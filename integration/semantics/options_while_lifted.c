/* Options that a program sets at any time: each is taken, reads back, and leaves a lifted stream where it is. */
#include "pair.h"

struct Option {
  const char* name;
  int level, option, value;
};

static const struct Option kOptions[] = {
    {"SO_BUSY_POLL", SOL_SOCKET, SO_BUSY_POLL, 50},
    {"SO_MARK", SOL_SOCKET, SO_MARK, 7},
    {"SO_PRIORITY", SOL_SOCKET, SO_PRIORITY, 2},
    {"SO_KEEPALIVE", SOL_SOCKET, SO_KEEPALIVE, 1},
    {"TCP_KEEPIDLE", IPPROTO_TCP, TCP_KEEPIDLE, 1},
    {"TCP_KEEPINTVL", IPPROTO_TCP, TCP_KEEPINTVL, 1},
    {"TCP_KEEPCNT", IPPROTO_TCP, TCP_KEEPCNT, 3},
    {"TCP_USER_TIMEOUT", IPPROTO_TCP, TCP_USER_TIMEOUT, 3000},
    {"TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY, 1},
    {"TCP_NODELAY off", IPPROTO_TCP, TCP_NODELAY, 0},
    {"TCP_CORK", IPPROTO_TCP, TCP_CORK, 1},
    {"TCP_CORK off", IPPROTO_TCP, TCP_CORK, 0},
    {"TCP_QUICKACK", IPPROTO_TCP, TCP_QUICKACK, 1},
    {"TCP_NOTSENT_LOWAT", IPPROTO_TCP, TCP_NOTSENT_LOWAT, 16384},
    {"TCP_LINGER2", IPPROTO_TCP, TCP_LINGER2, 5},
    {"TCP_THIN_LINEAR_TIMEOUTS", IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1},
    {"IP_TOS", IPPROTO_IP, IP_TOS, 0x10},
    {"IP_TTL", IPPROTO_IP, IP_TTL, 40},
    {"IP_RECVTTL", IPPROTO_IP, IP_RECVTTL, 1},
    {"SO_REUSEADDR", SOL_SOCKET, SO_REUSEADDR, 1},
    {"SO_REUSEPORT", SOL_SOCKET, SO_REUSEPORT, 1},
    {"SO_BROADCAST", SOL_SOCKET, SO_BROADCAST, 1},
    {"SO_INCOMING_CPU", SOL_SOCKET, SO_INCOMING_CPU, 0},
    {"SO_MAX_PACING_RATE", SOL_SOCKET, SO_MAX_PACING_RATE, 100000000},
    {"SO_RCVBUF", SOL_SOCKET, SO_RCVBUF, 100000},
    {"SO_SNDBUF", SOL_SOCKET, SO_SNDBUF, 100000},
    {"SO_ACCEPTCONN", SOL_SOCKET, SO_ACCEPTCONN, 1},
    {"SO_TYPE", SOL_SOCKET, SO_TYPE, 1},
    {"too short", SOL_SOCKET, SO_KEEPALIVE, -1},
};

static void sets(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  uint64_t carried = tcp_carried(fd);
  for (size_t i = 0; i < sizeof(kOptions) / sizeof(*kOptions); ++i) {
    const struct Option* o = &kOptions[i];
    socklen_t size = o->value == -1 ? 2 : sizeof(o->value);
    show(o->name, setsockopt(fd, o->level, o->option, &o->value, size));
    int now = -77;
    size = sizeof(now);
    long result = getsockopt(fd, o->level, o->option, &now, &size);
    say("  now: %ld %d (%u)", result, now, size);
    ping_as_client(fd, 2);
  }
  struct linger linger = {1, 2};
  show("SO_LINGER", setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)));
  show("of NULL", setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, NULL, sizeof(int)));
  show("of NULL", getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, NULL, NULL));
  char text[16] = "cubic";
  show("TCP_CONGESTION", setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, text, 5));
  /* Of a device's own address: to none, as no device leads from there to itself. */
  const char* device = getenv("PAIR_HOST") ? "" : "lo";
  show("SO_BINDTODEVICE", setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, device, (socklen_t)strlen(device) + 1));
  show("TCP_MAXSEG", setsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &(int){1000}, sizeof(int)));
  show("TCP_DEFER_ACCEPT", setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &(int){1}, sizeof(int)));
  ping_as_client(fd, 2);
  sleep_ms(2300); /* two probes of keepalive, on a connection that is silent but alive */
  show_lifted("after all this", fd, carried);
  ping_as_client(fd, 2);
  int64_t start = now_ns();
  show("close, lingering", close(fd));
  measure("close took ms", ms_since(start), 150);
}

static void answers(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 2 * (int)(sizeof(kOptions) / sizeof(*kOptions)) + 4);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"server", sets, answers, true},
    {"client", answers, sets, true},
};
PAIR_MAIN(kCases)
