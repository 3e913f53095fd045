/* connect, listen and accept belong to the kernel; what they say must not change. */
#include "pair.h"

static int so_error(int fd) {
  int error = -1;
  socklen_t size = sizeof(error);
  CHECKED(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
  return error;
}

static void show_so_error(int fd) {
  int error = so_error(fd);
  say("SO_ERROR: %s", error == 0 ? "none" : strerrorname_np(error));
}

static int new_socket(int flags) { return (int)CHECKED(socket(AF_INET, SOCK_STREAM | flags, 0)); }

static long connect_to(struct Pair* pair, int fd) {
  return connect(fd, (struct sockaddr*)&pair->address, pair->address_size);
}

static void nobody_listens(struct Pair* pair) {
  listen_on_loopback(pair, AF_INET, 5);
  CHECKED(close(pair->listener));
  tell(pair);
}

static void refused(struct Pair* pair) {
  learn_address(pair);
  await(pair);
  int fd = new_socket(0);
  int64_t start = now_ns();
  show("connect", connect_to(pair, fd));
  measure("refused after ms", ms_since(start), 100);
  show_so_error(fd);
  show("send", send(fd, "x", 1, MSG_NOSIGNAL));
  show("recv", recv(fd, &(char){0}, 1, 0));
  show("connect again", connect_to(pair, fd));
}

static void refused_nonblocking(struct Pair* pair) {
  learn_address(pair);
  await(pair);
  int fd = new_socket(SOCK_NONBLOCK);
  show("connect", connect_to(pair, fd));
  struct pollfd one = {fd, POLLIN | POLLOUT | POLLRDHUP, 0};
  show("poll", poll(&one, 1, 1000));
  show_events("poll says", one.revents);
  show_so_error(fd);
  show_so_error(fd);
}

static void accept_and_echo(struct Pair* pair) {
  listen_on_loopback(pair, AF_INET, 5);
  pair->stream = (int)CHECKED(accept(pair->listener, NULL, NULL));
  warm_up_as_server(pair->stream);
  await(pair);
}

static void connect_nonblocking(struct Pair* pair) {
  learn_address(pair);
  int fd = new_socket(SOCK_NONBLOCK);
  long result = connect_to(pair, fd);
  say("connect: %s", result == 0 || errno == EINPROGRESS ? "done or in progress" : "WRONG");
  struct pollfd one = {fd, POLLOUT, 0};
  show("poll", poll(&one, 1, 1000));
  show_events("poll says", one.revents);
  show_so_error(fd);
  show("connect again", connect_to(pair, fd));
  show("recv", recv(fd, &(char){0}, 1, 0));
  CHECKED(fcntl(fd, F_SETFL, 0));
  warm_up_as_client(fd);
  show("connect when lifted", connect_to(pair, fd));
  show("listen when lifted", listen(fd, 5));
  show("accept when lifted", accept(fd, NULL, NULL));
  tell(pair);
}

static void accept_late(struct Pair* pair) {
  listen_on_loopback(pair, AF_INET, 16);
  await(pair);
  struct pollfd one = {pair->listener, POLLIN, 0};
  show("poll", poll(&one, 1, 1000));
  show_events("listener", one.revents);
  unsigned sum = 0;
  for (int i = 0; i < 8; ++i) {
    int fd = (int)CHECKED(accept(pair->listener, NULL, NULL));
    unsigned char byte = 0;
    CHECKED(recv(fd, &byte, 1, MSG_WAITALL));
    sum += byte;
    warm_up_as_server(fd);
    drain("rest", fd);
    close(fd);
  }
  say("sum: %u", sum);
  CHECKED(fcntl(pair->listener, F_SETFL, O_NONBLOCK));
  show("accept of nobody", accept(pair->listener, NULL, NULL));
  show("poll of nobody", poll(&one, 1, 0));
}

/* Eight clients are connected, and their first byte sent, before the first accept. */
static void queue_up(struct Pair* pair) {
  learn_address(pair);
  int fds[8];
  for (int i = 0; i < 8; ++i) {
    fds[i] = connect_to_server(pair);
    CHECKED(send(fds[i], &(char){(char)(1 << i)}, 1, 0));
  }
  tell(pair);
  for (int i = 0; i < 8; ++i) {
    warm_up_as_client(fds[i]);
    close(fds[i]);
  }
}

static void gone_before_accept(struct Pair* pair) {
  listen_on_loopback(pair, AF_INET, 16);
  await(pair);
  settle();
  for (int i = 0; i < 2; ++i) {
    int fd = accept(pair->listener, NULL, NULL);
    say("accept: %s", fd >= 0 ? "a socket" : strerrorname_np(errno));
    drain("drained", fd);
    close(fd);
  }
}

static void connect_and_leave(struct Pair* pair) {
  learn_address(pair);
  int fd = connect_to_server(pair);
  send_pattern(fd, 100, 0);
  CHECKED(close(fd));
  fd = connect_to_server(pair);
  struct linger linger = {1, 0};
  CHECKED(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)));
  CHECKED(close(fd));
  tell(pair);
}

static void nothing(struct Pair* pair) { (void)pair; }

static void unconnected(struct Pair* pair) {
  (void)pair;
  count_signal(SIGPIPE, SA_RESTART);
  int fd = new_socket(0);
  struct sockaddr_in6 name;
  socklen_t size = sizeof(name);
  show("send", send(fd, "x", 1, MSG_NOSIGNAL));
  show("write", write(fd, "x", 1));
  say("SIGPIPE: %d", (int)signals_seen);
  show("recv", recv(fd, &(char){0}, 1, 0));
  show("shutdown", shutdown(fd, SHUT_RDWR));
  show("getpeername", getpeername(fd, (struct sockaddr*)&name, &size));
  show("accept", accept(fd, NULL, NULL));
  struct pollfd one = {fd, POLLIN | POLLOUT | POLLRDHUP, 0};
  show("poll", poll(&one, 1, 0));
  show_events("poll says", one.revents);
  int bytes = -1;
  show("FIONREAD", ioctl(fd, FIONREAD, &bytes));
  show("listen", listen(fd, -1));
  show("recv of a listener", recv(fd, &(char){0}, 1, 0));
  show("send of a listener", send(fd, "x", 1, MSG_NOSIGNAL));
  show("connect of a listener", connect(fd, (struct sockaddr*)&name, 0));
  show("close", close(fd));
  show("recv of a closed one", recv(fd, &(char){0}, 1, 0));
  show("close again", close(fd));
}

static void accept_flags(struct Pair* pair) {
  listen_on_loopback(pair, AF_INET, 16);
  CHECKED(fcntl(pair->listener, F_SETFL, O_NONBLOCK));
  await(pair);
  int plain = (int)CHECKED(accept(pair->listener, NULL, NULL));
  say("accept: nonblock %d cloexec %d", !!(fcntl(plain, F_GETFL) & O_NONBLOCK),
      fcntl(plain, F_GETFD));
  int flagged = (int)CHECKED(accept4(pair->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
  say("accept4: nonblock %d cloexec %d", !!(fcntl(flagged, F_GETFL) & O_NONBLOCK),
      fcntl(flagged, F_GETFD));
  struct sockaddr_in name;
  socklen_t size = sizeof(name);
  CHECKED(close((int)CHECKED(accept(pair->listener, (struct sockaddr*)&name, &size))));
  const struct sockaddr_in* own = (struct sockaddr_in*)&pair->address; /* one host: both ends' */
  say("address: family %d size %u the host's own %d", name.sin_family, size,
      name.sin_addr.s_addr == own->sin_addr.s_addr);
  size = 4;
  memset(&name, 0, sizeof(name));
  CHECKED(close((int)CHECKED(accept(pair->listener, (struct sockaddr*)&name, &size))));
  say("short buffer: size %u, rest untouched %d", size, name.sin_addr.s_addr == 0);
  show("accept4 with bad flags", accept4(pair->listener, NULL, NULL, 0x10000));
  tell(pair);
}

static void connect_four(struct Pair* pair) {
  learn_address(pair);
  for (int i = 0; i < 4; ++i) connect_to_server(pair);
  tell(pair);
  await(pair);
}

static const struct PairCase kCases[] = {
    {"refused", nobody_listens, refused, false},
    {"refused_nonblocking", nobody_listens, refused_nonblocking, false},
    {"nonblocking", accept_and_echo, connect_nonblocking, true},
    {"accept_queue", accept_late, queue_up, true},
    {"gone_before_accept", gone_before_accept, connect_and_leave, false},
    {"unconnected", nothing, unconnected, false},
    {"accept_flags", accept_flags, connect_four, false},
};
PAIR_MAIN(kCases)
