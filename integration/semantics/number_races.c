/* Numbers that come and go in many threads at once: the first sockets of a process, thousands of short
 * connections, files that get the number of a stream that was closed this instant. */
#include "pair.h"

enum { kThreads = 8, kFirstLaps = 20, kShort = 1500, kRaceMs = 1500 };

static pthread_barrier_t barrier;
static volatile bool over;
/* Streams that come and go may be over before a lift is: one goes on until it is lifted. */
static volatile bool one_is_lifted;

static void* first_socket(void* argument) {
  pthread_barrier_wait(&barrier);
  int fd = connect_to_server(argument);
  ping_as_client(fd, 60);
  CHECKED(close(fd));
  return NULL;
}

static void* first_socket_that_is_lifted(void* argument) {
  pthread_barrier_wait(&barrier);
  int fd = connect_to_server(argument);
  ping_until_lifted(fd);
  CHECKED(close(fd));
  return NULL;
}

/* A child begins with nothing: its threads' first sockets are the process's first ones. */
static void first_sockets(struct Pair* pair) {
  learn_address(pair);
  int good = 0;
  for (int lap = 0; lap < kFirstLaps; ++lap) {
    pid_t child = (pid_t)CHECKED(fork());
    if (child == 0) {
      pthread_t threads[kThreads];
      pthread_barrier_init(&barrier, NULL, kThreads);
      bool last = lap == kFirstLaps - 1;
      for (int i = 0; i < kThreads; ++i) {
        start_thread(&threads[i], last && i == 0 ? first_socket_that_is_lifted : first_socket, pair);
      }
      for (int i = 0; i < kThreads; ++i) join_thread(threads[i]);
      exit(0);
    }
    int status = -1;
    CHECKED(waitpid(child, &status, 0));
    good += status == 0;
  }
  say("good: %d of %d", good, kFirstLaps);
  tell(pair);
}

/* Echoes every connection in a thread of its own until the client has had enough. */
static void echo_everybody(struct Pair* pair) {
  int listener = listen_on_loopback(pair, AF_INET, 512);
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  for (;;) {
    struct pollfd set[2] = {{listener, POLLIN, 0}, {pair->control, POLLIN, 0}};
    CHECKED(poll(set, 2, -1));
    if (set[1].revents != 0) break;
    int fd = (int)CHECKED(accept(listener, NULL, NULL));
    pthread_t thread;
    int error = pthread_create(&thread, &detached, echo_in_thread, (void*)(intptr_t)fd);
    if (error != 0) fail("pthread_create: %d", error);
  }
  await(pair);
}

static void short_connections(struct Pair* pair) {
  learn_address(pair);
  char text[8];
  int first = -1, other = 0;
  for (int i = 0; i < kShort; ++i) {
    int fd = connect_to_server(pair);
    if (first < 0) first = fd;
    other += fd != first;
    CHECKED(send(fd, "hello", 5, 0));
    if (recv(fd, text, 5, MSG_WAITALL) != 5 || memcmp(text, "hello", 5) != 0) fail("echo %d", i);
    CHECKED(close(fd));
  }
  say("other numbers than the first: %s", other < kShort / 10 ? "seldom" : "OFTEN");
  tell(pair);
}

static void* streams_come_and_go(void* pair) {
  while (!over) {
    int fd = connect_to_server(pair);
    ping_as_client(fd, 24);
    CHECKED(close(fd));
  }
  return NULL;
}

static void* streams_of_which_one_is_lifted(void* pair) {
  int fd = connect_to_server(pair);
  ping_until_lifted(fd);
  CHECKED(close(fd));
  one_is_lifted = true;
  return streams_come_and_go(pair);
}

/* Pipes and files take the numbers; what is written there comes out there. */
static void* files_come_and_go(void* unused) {
  (void)unused;
  char text[8];
  while (!over) {
    int ends[2];
    CHECKED(pipe(ends));
    bool good = write(ends[1], "through", 7) == 7 && read(ends[0], text, 7) == 7;
    if (!good || memcmp(text, "through", 7) != 0) fail("pipe");
    CHECKED(close(ends[0]));
    CHECKED(close(ends[1]));
    int fd = (int)CHECKED(open("/dev/zero", O_RDWR));
    memset(text, 1, sizeof(text));
    if (read(fd, text, 7) != 7 || text[3] != 0) fail("file");
    if (recv(fd, text, 1, 0) != -1 || errno != ENOTSOCK) fail("a file that receives");
    CHECKED(close(fd));
  }
  return NULL;
}

static void* dups_come_and_go(void* pair) {
  while (!over) {
    int fd = connect_to_server(pair);
    ping_as_client(fd, 8);
    for (int i = 0; i < 8; ++i) {
      int copy = (int)CHECKED(dup(fd));
      ping_as_client(copy, 2);
      CHECKED(close(fd));
      fd = copy;
    }
    CHECKED(close(fd));
  }
  return NULL;
}

static void race(struct Pair* pair) {
  learn_address(pair);
  pthread_t threads[kThreads];
  for (int i = 0; i < kThreads; ++i) {
    void* (*body)(void*) = i % 4 == 0   ? files_come_and_go
                           : i % 4 == 1 ? dups_come_and_go
                           : i == 2     ? streams_of_which_one_is_lifted
                                        : streams_come_and_go;
    start_thread(&threads[i], body, pair);
  }
  sleep_ms(kRaceMs);
  while (!one_is_lifted) sleep_ms(10);
  over = true;
  for (int i = 0; i < kThreads; ++i) join_thread(threads[i]);
  say("nothing was mixed up");
  tell(pair);
}

static const struct PairCase kCases[] = {
    {"first_sockets", echo_everybody, first_sockets, true},
    {"short_connections", echo_everybody, short_connections, false},
    {"race", echo_everybody, race, true},
};
PAIR_MAIN(kCases)
