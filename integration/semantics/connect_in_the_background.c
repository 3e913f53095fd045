/* A connect that goes on in the background, and what may be called meanwhile; sockets that were in an epoll
 * instance before they were connected; listeners with a small backlog, under signals. */
#include <arpa/inet.h>

#include "pair.h"

static int new_socket(int flags) { return (int)CHECKED(socket(AF_INET, SOCK_STREAM | flags, 0)); }

static long connect_to(struct Pair* pair, int fd) {
  return connect(fd, (struct sockaddr*)&pair->address, pair->address_size);
}

/* Nobody answers at a full backlog: the connection stays in the making as long as that. */
static void full_backlog(struct Pair* pair) {
  listen_on_loopback(pair, AF_INET, 0);
  await(pair);
  int first = (int)CHECKED(accept(pair->listener, NULL, NULL));
  tell(pair);
  struct pollfd one = {pair->listener, POLLIN, 0};
  show("the next one", poll(&one, 1, 5000));
  int second = (int)CHECKED(accept(pair->listener, NULL, NULL));
  warm_up_as_server(second);
  drain("drained", second);
  drain("first", first);
}

static void connects_slowly(struct Pair* pair) {
  learn_address(pair);
  int first = connect_to_server(pair), fd = new_socket(SOCK_NONBLOCK);
  char byte;
  show("connect", connect_to(pair, fd));
  show("recv", recv(fd, &byte, 1, 0));
  show("send", send(fd, "x", 1, MSG_NOSIGNAL));
  show("write", write(fd, "x", 1));
  show("connect again", connect_to(pair, fd));
  show("shutdown of another", shutdown(first, SHUT_WR));
  struct sockaddr_in name;
  socklen_t size = sizeof(name);
  show("getpeername", getpeername(fd, (struct sockaddr*)&name, &size));
  struct pollfd one = {fd, POLLIN | POLLOUT, 0};
  show("poll", poll(&one, 1, 0));
  int error = -1;
  size = sizeof(error);
  CHECKED(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
  say("SO_ERROR: %d", error);
  int epoll = (int)CHECKED(epoll_create1(0));
  struct epoll_event event = {.events = EPOLLOUT};
  CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
  show("epoll", epoll_wait(epoll, &event, 1, 0));
  tell(pair); /* a place becomes free, and the kernel tries again within 3 s */
  await(pair);
  show("epoll", epoll_wait(epoll, &event, 1, 6000));
  show_epoll("  says", event.events);
  show("connected", connect_to(pair, fd));
  show("a third time", connect_to(pair, fd));
  CHECKED(fcntl(fd, F_SETFL, 0));
  warm_up_as_client(fd);
  CHECKED(close(fd));
  CHECKED(close(first));
}

/* Asio, Netty, Java: added first, connected then, modified when connected. */
static void added_first(struct Pair* pair) {
  learn_address(pair);
  int fd = new_socket(SOCK_NONBLOCK), epoll = (int)CHECKED(epoll_create1(0));
  struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.u64 = 7};
  show("ADD", epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
  event.data.u64 = 0;
  show("not connected", epoll_wait(epoll, &event, 1, 0));
  show_epoll("  says", event.events);
  long result = connect_to(pair, fd);
  say("connect: %s", result == 0 || errno == EINPROGRESS ? "done or in progress" : "WRONG");
  show("connected", epoll_wait(epoll, &event, 1, 2000));
  say("  OUT %d, data %d", !!(event.events & EPOLLOUT), (int)event.data.u64);
  event = (struct epoll_event){.events = EPOLLIN, .data.u64 = 8};
  show("MOD", epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event));
  CHECKED(fcntl(fd, F_SETFL, 0));
  warm_up_as_client(fd);
  show("MOD when lifted", epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event));
  show("idle", epoll_wait(epoll, &event, 1, 0));
  tell(pair);
  show("data", epoll_wait(epoll, &event, 1, 2000));
  say("  data %d", (int)event.data.u64);
  receive_pattern(fd, 100, 0);
  show("DEL", epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
  show("DEL again", epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
  CHECKED(close(fd));
}

static void accepts_one(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  send_pattern(pair->stream, 100, 0);
  drain("drained", pair->stream);
}

static volatile pid_t accepting;

static void* signal_then_connect(void* argument) {
  struct Pair* pair = argument;
  sleep_ms(50);
  wait_until_asleep(accepting);
  kill(getpid(), SIGUSR1);
  sleep_ms(100);
  tell(pair);
  return NULL;
}

/* signal() means SA_RESTART: accept goes on, and gets the connection that comes later. */
static void accepts_under_signals(struct Pair* pair) {
  listen_on_loopback(pair, AF_INET, -1); /* as many as there may be */
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  for (int restart = 1; restart >= 0; --restart) {
    count_signal(SIGUSR1, restart ? SA_RESTART : 0);
    pthread_t thread;
    accepting = gettid();
    CHECKED(sigprocmask(SIG_BLOCK, &set, NULL)); /* the other thread's */
    start_thread(&thread, signal_then_connect, pair);
    CHECKED(sigprocmask(SIG_UNBLOCK, &set, NULL));
    long fd = accept(pair->listener, NULL, NULL);
    say("restart %d: %s", restart, fd >= 0 ? "a connection" : strerrorname_np(errno));
    join_thread(thread);
    if (fd < 0) fd = CHECKED(accept(pair->listener, NULL, NULL));
    warm_up_as_server((int)fd);
    drain("drained", (int)fd);
    CHECKED(close((int)fd));
  }
  say("signals: %d", (int)signals_seen);
}

static void connects_twice(struct Pair* pair) {
  learn_address(pair);
  for (int i = 0; i < 2; ++i) {
    await(pair);
    int fd = connect_to_server(pair);
    warm_up_as_client(fd);
    CHECKED(close(fd));
  }
}

/* Two listeners on one port (SO_REUSEPORT): the kernel chooses, and each one's streams are lifted. */
static void shares_its_port(struct Pair* pair) {
  int listeners[2], taken = 0;
  struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof(here);
  const char* host = getenv("PAIR_HOST");
  if (host != NULL && inet_pton(AF_INET, host, &here.sin_addr) != 1) fail("the host is %s", host);
  for (int i = 0; i < 2; ++i) {
    listeners[i] = new_socket(0);
    CHECKED(setsockopt(listeners[i], SOL_SOCKET, SO_REUSEPORT, &(int){1}, sizeof(int)));
    CHECKED(bind(listeners[i], (struct sockaddr*)&here, size));
    CHECKED(listen(listeners[i], 8));
    CHECKED(getsockname(listeners[i], (struct sockaddr*)&here, &size));
  }
  CHECKED(send(pair->control, &here, sizeof(here), 0));
  for (; taken < 6; ++taken) {
    struct pollfd set[2] = {{listeners[0], POLLIN, 0}, {listeners[1], POLLIN, 0}};
    CHECKED(poll(set, 2, 5000));
    int fd = (int)CHECKED(accept(listeners[set[0].revents != 0 ? 0 : 1], NULL, NULL));
    warm_up_as_server(fd);
    CHECKED(close(fd));
  }
  say("taken: %d", taken);
}

static void connects_often(struct Pair* pair) {
  learn_address(pair);
  for (int i = 0; i < 6; ++i) {
    int fd = connect_to_server(pair);
    warm_up_as_client(fd);
    drain("drained", fd);
    CHECKED(close(fd));
  }
}

static const struct PairCase kCases[] = {
    {"shared_port", shares_its_port, connects_often, true},
    {"slow", full_backlog, connects_slowly, true},
    {"in_epoll_before", accepts_one, added_first, true},
    {"accept_under_signals", accepts_under_signals, connects_twice, true},
};
PAIR_MAIN(kCases)
