/* accept-then-fork and listen-then-fork: the child serves, at full speed. */
#include "pair.h"

enum { kClients = 4 };

static void serve(int fd) {
  warm_up_as_server(fd);
  drain("drained", fd);
  send_pattern(fd, 50000, 0);
  close(fd);
}

static void reap(int count) {
  int well = 0;
  for (int i = 0; i < count; ++i) {
    int status = -1;
    CHECKED(wait(&status));
    well += status == 0;
  }
  say("children that ended well: %d of %d", well, count);
}

static void accept_then_fork(struct Pair* pair) {
  int listener = listen_on_loopback(pair, AF_INET, 16);
  for (int i = 0; i < kClients; ++i) {
    int fd = (int)CHECKED(accept(listener, NULL, NULL));
    pid_t child = (pid_t)CHECKED(fork());
    if (child == 0) {
      close(listener);
      serve(fd);
      exit(0);
    }
    close(fd);
  }
  reap(kClients);
}

static void listen_then_fork(struct Pair* pair) {
  int listener = listen_on_loopback(pair, AF_INET, 16);
  for (int i = 0; i < 2; ++i) {
    pid_t child = (pid_t)CHECKED(fork());
    if (child != 0) continue;
    for (int served = 0; served < kClients / 2; ++served) {
      serve((int)CHECKED(accept(listener, NULL, NULL)));
    }
    exit(0);
  }
  reap(2);
}

/* Already lifted in the parent, which served a greeting, before the child takes over. */
static void greet_then_fork(struct Pair* pair) {
  int listener = listen_on_loopback(pair, AF_INET, 16);
  for (int i = 0; i < kClients; ++i) {
    int fd = (int)CHECKED(accept(listener, NULL, NULL));
    pong_as_server(fd, kWarmUpRounds);
    pong_until_lifted(fd);
    pong_as_server(fd, kAfterLiftRounds / 2);
    pid_t child = (pid_t)CHECKED(fork());
    if (child == 0) {
      pong_as_server(fd, kAfterLiftRounds - kAfterLiftRounds / 2);
      drain("drained", fd);
      send_pattern(fd, 50000, 0);
      exit(0);
    }
    close(fd);
  }
  reap(kClients);
}

static void* be_client(void* argument) {
  int fd = connect_to_server(argument);
  warm_up_as_client(fd);
  send_pattern(fd, 70000, 0);
  CHECKED(shutdown(fd, SHUT_WR));
  drain("drained", fd);
  close(fd);
  return NULL;
}

static void clients(struct Pair* pair) {
  learn_address(pair);
  if (strcmp(pair->variant, "greet_then_fork") == 0) {
    for (int i = 0; i < kClients; ++i) be_client(pair);
    return;
  }
  pthread_t threads[kClients];
  for (int i = 0; i < kClients; ++i) start_thread(&threads[i], be_client, pair);
  for (int i = 0; i < kClients; ++i) join_thread(threads[i]);
}

static const struct PairCase kCases[] = {
    {"accept_then_fork", accept_then_fork, clients, true},
    {"listen_then_fork", listen_then_fork, clients, true},
    {"greet_then_fork", greet_then_fork, clients, true},
};
PAIR_MAIN(kCases)
