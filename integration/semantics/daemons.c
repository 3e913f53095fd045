/* daemon(3), whose fork is inside libc: with a lifted stream that the daemon goes on with, and before it makes
 * its first connection; and fork in a program whose other threads are in the middle of their traffic. */
#include <netdb.h>

#include "pair.h"

enum { kThreads = 4, kForks = 15 };

/* The role waits for the daemon, which has nobody else. */
static void daemonize(void (*first)(struct Pair*), void (*body)(struct Pair*), struct Pair* pair) {
  int ends[2];
  CHECKED(pipe(ends));
  pid_t child = (pid_t)CHECKED(fork());
  if (child == 0) {
    first(pair);
    show("daemon", daemon(1, 1));
    body(pair);
    exit(0);
  }
  CHECKED(close(ends[1]));
  CHECKED(waitpid(child, NULL, 0));
  show("daemon ended", read(ends[0], &(char){0}, 1));
}

static void ping_and_send(struct Pair* pair) {
  ping_as_client(pair->stream, 8);
  send_pattern(pair->stream, 100000, 0);
}

static void resolve_and_connect(struct Pair* pair) {
  struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found = NULL;
  char port[8], host[64] = "", service[16] = "";
  const char* there = getenv("PAIR_HOST");
  snprintf(port, sizeof(port), "%d", ntohs(pair->address.sin6_port));
  say("getaddrinfo: %d", getaddrinfo(there ? there : "localhost", port, &hints, &found));
  int fd = (int)CHECKED(socket(AF_INET, SOCK_STREAM, 0));
  CHECKED(connect(fd, found->ai_addr, found->ai_addrlen));
  warm_up_as_client(fd);
  say("getnameinfo: %d", getnameinfo(found->ai_addr, found->ai_addrlen, host, sizeof(host), service, sizeof(service),
                                     NI_NUMERICHOST | NI_NUMERICSERV));
  say("the same: %d, %d", strcmp(host, there ? there : "127.0.0.1"), strcmp(service, port));
  freeaddrinfo(found);
  pair->stream = fd;
  ping_and_send(pair);
}

static void becomes_daemon(struct Pair* pair) {
  if (strcmp(pair->variant, "connects_as_daemon") == 0) {
    daemonize(learn_address, resolve_and_connect, pair);
    return;
  }
  daemonize(open_stream, ping_and_send, pair);
}

static void peer_of_daemon(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 8);
  drain("drained", pair->stream);
}

static volatile bool over;

static void* ping_in_thread(void* argument) {
  int fd = connect_to_server(argument);
  warm_up_as_client(fd);
  do {
    ping_as_client(fd, 4);
  } while (!over);
  CHECKED(close(fd));
  return argument;
}

/* The child has one thread, and whatever the others held: it opens a stream of its own. */
static void forks_among_threads(struct Pair* pair) {
  learn_address(pair);
  pthread_t threads[kThreads];
  for (int i = 0; i < kThreads; ++i) start_thread(&threads[i], ping_in_thread, pair);
  sleep_ms(100);
  int good = 0;
  for (int i = 0; i < kForks; ++i) {
    pid_t child = (pid_t)CHECKED(fork());
    if (child == 0) {
      int fd = connect_to_server(pair);
      ping_as_client(fd, 40);
      close(fd);
      exit(0);
    }
    int status = -1;
    CHECKED(waitpid(child, &status, 0));
    good += status == 0;
  }
  over = true;
  int alive = 0;
  for (int i = 0; i < kThreads; ++i) {
    void* result = NULL;
    pthread_join(threads[i], &result);
    alive += result != NULL;
  }
  say("children: %d, threads: %d", good, alive);
}

static void echoes(struct Pair* pair) {
  listen_on_loopback(pair, AF_INET, 64);
  pthread_t threads[kThreads + kForks];
  for (int i = 0; i < kThreads + kForks; ++i) {
    int fd = (int)CHECKED(accept(pair->listener, NULL, NULL));
    start_thread(&threads[i], echo_in_thread, (void*)(intptr_t)fd);
  }
  for (int i = 0; i < kThreads + kForks; ++i) join_thread(threads[i]);
  say("all ended");
}

static const struct PairCase kCases[] = {
    {"lifted_daemon", peer_of_daemon, becomes_daemon, true},
    {"lifted_daemon_in_server", becomes_daemon, peer_of_daemon, true},
    {"connects_as_daemon", peer_of_daemon, becomes_daemon, true},
    {"forks_among_threads", echoes, forks_among_threads, true},
};
PAIR_MAIN(kCases)
