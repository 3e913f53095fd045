/* What a program can ask about a lifted socket is what it would hear from the kernel's own. */
#include <arpa/inet.h>

#include "pair.h"

static void show_option(int fd, const char* name, int level, int option) {
  int value = -77;
  socklen_t size = sizeof(value);
  long result = getsockopt(fd, level, option, &value, &size);
  if (result < 0) {
    show(name, result);
  } else {
    say("%s: %d (%u)", name, value, size);
  }
}

static void show_options(int fd) {
  show_option(fd, "SO_TYPE", SOL_SOCKET, SO_TYPE);
  show_option(fd, "SO_DOMAIN", SOL_SOCKET, SO_DOMAIN);
  show_option(fd, "SO_PROTOCOL", SOL_SOCKET, SO_PROTOCOL);
  show_option(fd, "SO_ACCEPTCONN", SOL_SOCKET, SO_ACCEPTCONN);
  show_option(fd, "SO_ERROR", SOL_SOCKET, SO_ERROR);
  show_option(fd, "SO_KEEPALIVE", SOL_SOCKET, SO_KEEPALIVE);
  show_option(fd, "SO_REUSEADDR", SOL_SOCKET, SO_REUSEADDR);
  show_option(fd, "SO_OOBINLINE", SOL_SOCKET, SO_OOBINLINE);
  show_option(fd, "SO_RCVLOWAT", SOL_SOCKET, SO_RCVLOWAT);
  show_option(fd, "SO_BUSY_POLL", SOL_SOCKET, SO_BUSY_POLL);
  show_option(fd, "TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY);
  show_option(fd, "TCP_KEEPIDLE", IPPROTO_TCP, TCP_KEEPIDLE);
  show_option(fd, "TCP_KEEPINTVL", IPPROTO_TCP, TCP_KEEPINTVL);
  show_option(fd, "TCP_USER_TIMEOUT", IPPROTO_TCP, TCP_USER_TIMEOUT);
  show_option(fd, "TCP_CORK", IPPROTO_TCP, TCP_CORK);
  show_option(fd, "IP_TOS", IPPROTO_IP, IP_TOS);
  show_option(fd, "no such option", SOL_SOCKET, 9999);
  struct linger linger = {-1, -1};
  socklen_t size = sizeof(linger);
  CHECKED(getsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, &size));
  say("SO_LINGER: %d %d", linger.l_onoff, linger.l_linger);
  char name[32] = "";
  size = sizeof(name);
  show("TCP_CONGESTION", getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size));
  say("name: %s", name);
}

static void set_option(int fd, const char* name, int level, int option, int value) {
  show(name, setsockopt(fd, level, option, &value, sizeof(value)));
  show_option(fd, "  now", level, option);
}

static void set_options(int fd) {
  set_option(fd, "TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, "SO_KEEPALIVE", SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, "TCP_KEEPIDLE", IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set_option(fd, "SO_SNDBUF", SOL_SOCKET, SO_SNDBUF, 50000);
  set_option(fd, "SO_RCVBUF", SOL_SOCKET, SO_RCVBUF, 60000);
  set_option(fd, "TCP_CORK on", IPPROTO_TCP, TCP_CORK, 1);
  set_option(fd, "TCP_CORK off", IPPROTO_TCP, TCP_CORK, 0);
  set_option(fd, "TCP_USER_TIMEOUT", IPPROTO_TCP, TCP_USER_TIMEOUT, 9000);
  set_option(fd, "SO_PRIORITY", SOL_SOCKET, SO_PRIORITY, 3);
  set_option(fd, "TCP_QUICKACK", IPPROTO_TCP, TCP_QUICKACK, 1);
  set_option(fd, "no such option", SOL_SOCKET, 9999, 1);
}

static void show_info(int fd) {
  struct tcp_info info;
  memset(&info, 0, sizeof(info));
  socklen_t size = sizeof(info);
  show("TCP_INFO", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size));
  say("state %d, retransmits %d/%u, cwnd %d, mss %d, rtt %d, pmtu %d, size %u", info.tcpi_state,
      info.tcpi_retransmits, info.tcpi_total_retrans, info.tcpi_snd_cwnd > 0, info.tcpi_snd_mss > 0,
      info.tcpi_rtt > 0, info.tcpi_pmtu > 0, size);
  size = 8;
  memset(&info, 0x55, sizeof(info));
  show("TCP_INFO, 8 bytes", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size));
  say("size %u, rest untouched %d", size, info.tcpi_rto == 0x55555555);
}

static void show_file(int fd) {
  struct stat status;
  CHECKED(fstat(fd, &status));
  char path[64], target[64] = "";
  snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  CHECKED(readlink(path, target, sizeof(target) - 1));
  say("socket: %d, link: %.8s, size %ld", S_ISSOCK(status.st_mode), target, (long)status.st_size);
  say("flags: 0x%x", fcntl(fd, F_GETFL));
  show("isatty", isatty(fd) ? 1 : -1);
}

/* Each end's own name is what the other end calls its peer. */
static void compare_names(struct Pair* pair) {
  struct sockaddr_in6 names[2], theirs[2];
  socklen_t size = sizeof(names[0]);
  memset(names, 0, sizeof(names));
  show("getsockname", getsockname(pair->stream, (struct sockaddr*)&names[0], &size));
  say("family %d, size %u", ((struct sockaddr*)&names[0])->sa_family, size);
  size = sizeof(names[1]);
  show("getpeername", getpeername(pair->stream, (struct sockaddr*)&names[1], &size));
  CHECKED(send(pair->control, names, sizeof(names), 0));
  CHECKED(recv(pair->control, theirs, sizeof(theirs), 0));
  say("ports agree: %d",
      names[0].sin6_port == theirs[1].sin6_port && names[1].sin6_port == theirs[0].sin6_port);
  size = 3;
  show("getpeername, short", getpeername(pair->stream, (struct sockaddr*)&names[1], &size));
  say("size: %u", size);
}

static void ask_everything(struct Pair* pair) {
  show_file(pair->stream);
  compare_names(pair);
  show_options(pair->stream);
  show_info(pair->stream);
  set_options(pair->stream);
}

static void server(struct Pair* pair) {
  if (strcmp(pair->variant, "ipv6") == 0) listen_on_loopback(pair, AF_INET6, 5);
  open_stream(pair);
  ask_everything(pair);
  pong_as_server(pair->stream, 8);
}

static void client(struct Pair* pair) {
  open_stream(pair);
  ask_everything(pair);
  ping_as_client(pair->stream, 8);
}

/* An IPv6 listener that an IPv4 client reaches: the names of the two ends differ in family. */
static void mapped_server(struct Pair* pair) {
  int fd = (int)CHECKED(socket(AF_INET6, SOCK_STREAM, 0));
  struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT};
  CHECKED(setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &(int){0}, sizeof(int)));
  CHECKED(bind(fd, (struct sockaddr*)&any, sizeof(any)));
  CHECKED(listen(fd, 5));
  socklen_t size = sizeof(any);
  CHECKED(getsockname(fd, (struct sockaddr*)&any, &size));
  const char* host = getenv("PAIR_HOST");
  struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = any.sin6_port};
  CHECKED(inet_pton(AF_INET, host != NULL ? host : "127.0.0.1", &v4.sin_addr));
  CHECKED(send(pair->control, &v4, sizeof(v4), 0));
  pair->listener = fd;
  open_stream(pair);
  ask_everything(pair);
  pong_as_server(pair->stream, 8);
}

static const struct PairCase kCases[] = {
    {"ipv4", server, client, true},
    {"ipv6", server, client, true},
    {"ipv4_mapped", mapped_server, client, true},
};
PAIR_MAIN(kCases)
