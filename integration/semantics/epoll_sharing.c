/* One stream in several epoll instances and under several numbers, one instance in several threads and
 * processes, and more that is ready than a call may give. */
#include "pair.h"

enum { kStreams = 6 };

static long control(int epoll, int operation, int fd, uint32_t events) {
  struct epoll_event event = {.events = events, .data.fd = fd};
  return epoll_ctl(epoll, operation, fd, &event);
}

static int new_epoll(void) { return (int)CHECKED(epoll_create1(EPOLL_CLOEXEC)); }

static int by_events(const void* a, const void* b) {
  return (int)((const struct epoll_event*)a)->events - (int)((const struct epoll_event*)b)->events;
}

/* In the order of the events: that of the descriptors is nobody's promise. */
static void wait_all(const char* label, int epoll, int timeout_ms) {
  struct epoll_event events[8];
  long count = epoll_wait(epoll, events, 8, timeout_ms);
  show(label, count);
  if (count > 1) qsort(events, (size_t)count, sizeof(*events), by_events);
  for (long i = 0; i < count; ++i) show_epoll("  says", events[i].events);
}

/* Asks the peer for 100 bytes on each of its streams and lets them arrive. */
static void fetch(struct Pair* pair) {
  tell(pair);
  await(pair);
  settle();
}

static void several_instances(struct Pair* pair) {
  int fd = pair->stream;
  static const uint32_t kHow[4] = {EPOLLIN, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT, EPOLLIN | EPOLLOUT | EPOLLET};
  int epolls[4];
  for (int i = 0; i < 4; ++i) {
    epolls[i] = new_epoll();
    CHECKED(control(epolls[i], EPOLL_CTL_ADD, fd, kHow[i]));
  }
  for (int round = 0; round < 3; ++round) {
    fetch(pair);
    for (int i = 0; i < 4; ++i) wait_all("each hears of it", epolls[i], 1000 * (i != 2 || round == 0));
    receive_pattern(fd, 100, 0);
    for (int i = 0; i < 4; ++i) wait_all("nothing more", epolls[i], 0);
  }
  CHECKED(close(epolls[0]));
  CHECKED(control(epolls[1], EPOLL_CTL_DEL, fd, 0));
  CHECKED(control(epolls[2], EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT));
  fetch(pair);
  for (int i = 1; i < 4; ++i) wait_all("those that are left", epolls[i], i == 1 ? 0 : 1000);
  receive_pattern(fd, 100, 0);
}

struct Waiter {
  int epoll;
  long result;
};

static void* wait_in_thread(void* argument) {
  struct Waiter* waiter = argument;
  struct epoll_event event;
  waiter->result = epoll_wait(waiter->epoll, &event, 1, 700);
  return NULL;
}

/* EPOLLEXCLUSIVE: of many who wait at least one is woken. */
static void exclusive(struct Pair* pair) {
  enum { kWaiters = 4 };
  struct Waiter waiters[kWaiters];
  pthread_t threads[kWaiters];
  int fd = pair->stream;
  for (int i = 0; i < kWaiters; ++i) {
    waiters[i].epoll = new_epoll();
    show("add", control(waiters[i].epoll, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE | (i % 2 ? EPOLLET : 0)));
  }
  show("MOD", control(waiters[0].epoll, EPOLL_CTL_MOD, fd, EPOLLIN));
  show("MOD to EXCLUSIVE", control(waiters[0].epoll, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLEXCLUSIVE));
  int other = new_epoll();
  show("with ONESHOT", control(other, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT));
  show("with RDHUP", control(other, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLRDHUP));
  CHECKED(control(other, EPOLL_CTL_ADD, fd, EPOLLIN));
  show("plain to EXCLUSIVE", control(other, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLEXCLUSIVE));
  for (int i = 0; i < kWaiters; ++i) start_thread(&threads[i], wait_in_thread, &waiters[i]);
  sleep_ms(100);
  tell(pair);
  int woken = 0;
  for (int i = 0; i < kWaiters; ++i) {
    join_thread(threads[i]);
    woken += waiters[i].result == 1;
  }
  await(pair);
  say("woken: %s", woken >= 1 ? "some" : "NOBODY");
  receive_pattern(fd, 100, 0);
  show("DEL", control(waiters[0].epoll, EPOLL_CTL_DEL, fd, 0));
  show("ADD again", control(waiters[0].epoll, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE));
  fetch(pair);
  wait_all("again", waiters[0].epoll, 1000);
  receive_pattern(fd, 100, 0);
}

static void two_numbers(struct Pair* pair) {
  int epoll = new_epoll(), fd = pair->stream, copy = (int)CHECKED(dup(fd));
  show("ADD", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
  show("ADD of the copy", control(epoll, EPOLL_CTL_ADD, copy, EPOLLIN | EPOLLOUT));
  show("ADD of the copy again", control(epoll, EPOLL_CTL_ADD, copy, EPOLLIN));
  wait_all("idle", epoll, 0);
  fetch(pair);
  wait_all("both", epoll, 1000);
  show("DEL of the first", control(epoll, EPOLL_CTL_DEL, fd, 0));
  wait_all("the copy", epoll, 1000);
  show("ADD", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
  CHECKED(close(copy)); /* the file lives on: its registration stays, and nobody can name it any more */
  show("MOD of the closed", control(epoll, EPOLL_CTL_MOD, copy, EPOLLIN));
  wait_all("the closed copy, too", epoll, 1000);
  receive_pattern(fd, 100, 0);
  CHECKED(close(fd));
  wait_all("none is left", epoll, 50);
  pair->stream = -1;
}

/* A closed stream leaves; the number comes back as another stream, and has to be added again. */
static void number_again(struct Pair* pair) {
  int epoll = new_epoll(), fd = pair->stream;
  CHECKED(control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLRDHUP));
  CHECKED(close(fd));
  wait_all("closed", epoll, 50);
  open_stream(pair);
  say("the same number: %d", pair->stream == fd);
  show("MOD", control(epoll, EPOLL_CTL_MOD, pair->stream, EPOLLIN));
  show("DEL", control(epoll, EPOLL_CTL_DEL, pair->stream, 0));
  show("ADD", control(epoll, EPOLL_CTL_ADD, pair->stream, EPOLLIN));
  fetch(pair);
  wait_all("the new one", epoll, 1000);
  receive_pattern(pair->stream, 100, 0);
}

/* One instance, two processes: either may take the events, and change the interest. */
static void over_fork(struct Pair* pair) {
  int epoll = new_epoll(), fd = pair->stream;
  CHECKED(control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
  int ends[2];
  CHECKED(pipe(ends));
  pid_t child = (pid_t)CHECKED(fork());
  if (child == 0) {
    wait_all("child", epoll, 3000);
    receive_pattern(fd, 50, 0);
    wait_all("child, the rest", epoll, 0);
    CHECKED(control(epoll, EPOLL_CTL_ADD, ends[0], EPOLLIN));
    _exit(0);
  }
  fetch(pair);
  CHECKED(waitpid(child, NULL, 0));
  wait_all("parent", epoll, 1000);
  receive_pattern(fd, 50, 50);
  wait_all("parent, all read", epoll, 0);
  CHECKED(write(ends[1], "x", 1));
  wait_all("added by the child", epoll, 1000);
  CHECKED(read(ends[0], &(char){0}, 1));
  fetch(pair);
  wait_all("parent again", epoll, 1000);
  receive_pattern(fd, 100, 0);
}

static void* change_later(void* argument) {
  int* fds = argument;
  sleep_ms(60);
  CHECKED(control(fds[0], fds[2], fds[1], (uint32_t)fds[3]));
  return NULL;
}

/* While one thread waits another one changes what it waits for. */
static void changed_while_waiting(struct Pair* pair) {
  int epoll = new_epoll(), fd = pair->stream;
  pthread_t thread;
  CHECKED(control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
  int to_out[4] = {epoll, fd, EPOLL_CTL_MOD, EPOLLOUT};
  start_thread(&thread, change_later, to_out);
  wait_all("MOD to what holds", epoll, 5000);
  join_thread(thread);
  int to_in[4] = {epoll, fd, EPOLL_CTL_MOD, EPOLLIN};
  CHECKED(control(epoll, EPOLL_CTL_MOD, fd, 0));
  start_thread(&thread, change_later, to_in);
  tell(pair);
  wait_all("MOD to what comes", epoll, 5000);
  join_thread(thread);
  await(pair);
  receive_pattern(fd, 100, 0);
  int away[4] = {epoll, fd, EPOLL_CTL_DEL, 0};
  start_thread(&thread, change_later, away);
  int64_t start = now_ns();
  wait_all("DEL", epoll, 200);
  say("waited to the end: %d", ms_since(start) > 190);
  join_thread(thread);
  int back[4] = {epoll, fd, EPOLL_CTL_ADD, EPOLLIN | EPOLLONESHOT};
  start_thread(&thread, change_later, back);
  tell(pair);
  wait_all("ADD", epoll, 5000);
  join_thread(thread);
  await(pair);
  receive_pattern(fd, 100, 0);
}

/* Six are ready, two fit: whoever was given goes behind the others (ep_send_events()). */
static void rotates(struct Pair* pair, bool edge) {
  int epoll = new_epoll(), fds[kStreams];
  fds[0] = pair->stream;
  for (int i = 1; i < kStreams; ++i) {
    open_stream(pair);
    fds[i] = pair->stream;
  }
  for (int i = 0; i < kStreams; ++i) CHECKED(control(epoll, EPOLL_CTL_ADD, fds[i], EPOLLIN | (edge ? EPOLLET : 0)));
  fetch(pair);
  for (int lap = 0; lap < (edge ? 1 : 3); ++lap) {
    unsigned seen = 0;
    for (int i = 0; i < kStreams / 2; ++i) {
      struct epoll_event events[2];
      show("of two", epoll_wait(epoll, events, 2, 1000));
      for (int k = 0; k < 2; ++k) {
        for (int s = 0; s < kStreams; ++s) seen |= events[k].data.fd == fds[s] ? 1u << s : 0;
      }
    }
    say("seen in a lap: %x", seen);
  }
  wait_all("then", epoll, 0);
  for (int i = 0; i < kStreams; ++i) receive_pattern(fds[i], 100, 0);
}

static void rotate_level(struct Pair* pair) { rotates(pair, false); }
static void rotate_edge(struct Pair* pair) { rotates(pair, true); }

/* Instances that come and go leave nothing behind. */
static void come_and_go(struct Pair* pair) {
  int fd = pair->stream, first = -1;
  for (int i = 0; i < 300; ++i) {
    int epoll = new_epoll();
    if (i == 0) first = epoll;
    if (epoll != first) fail("number %d in round %d", epoll, i);
    CHECKED(control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLOUT | (i % 2 ? EPOLLET : 0)));
    struct epoll_event event;
    if (epoll_wait(epoll, &event, 1, 100) != 1 || event.events != EPOLLOUT) fail("round %d", i);
    if (i % 3 == 0) CHECKED(control(epoll, EPOLL_CTL_DEL, fd, 0));
    CHECKED(close(epoll));
  }
  say("300 came and went");
  fetch(pair);
  receive_pattern(fd, 100, 0);
}

static const struct {
  const char* variant;
  void (*body)(struct Pair*);
} kBodies[] = {
    {"several_instances", several_instances}, {"exclusive", exclusive},
    {"two_numbers", two_numbers},             {"number_again", number_again},
    {"over_fork", over_fork},                 {"changed_while_waiting", changed_while_waiting},
    {"rotate_level", rotate_level},           {"rotate_edge", rotate_edge},
    {"come_and_go", come_and_go},
};

static void user(struct Pair* pair) {
  open_stream(pair);
  for (size_t i = 0; i < sizeof(kBodies) / sizeof(*kBodies); ++i) {
    if (strcmp(pair->variant, kBodies[i].variant) == 0) kBodies[i].body(pair);
  }
  close(pair->control);
  pair->control = -1;
}

/* Serves requests for 100 bytes, on each stream, until the user closes the control channel. */
static void peer(struct Pair* pair) {
  int fds[kStreams], count = 1;
  open_stream(pair);
  fds[0] = pair->stream;
  int wanted = strncmp(pair->variant, "rotate", 6) == 0 ? kStreams : 1;
  for (; count < wanted; ++count) {
    open_stream(pair);
    fds[count] = pair->stream;
  }
  if (strcmp(pair->variant, "number_again") == 0) {
    drain("drained", fds[0]);
    open_stream(pair);
    fds[0] = pair->stream;
  }
  char turn;
  while (recv(pair->control, &turn, 1, 0) == 1) {
    if (strcmp(pair->variant, "changed_while_waiting") == 0) sleep_ms(100);
    for (int i = 0; i < count; ++i) send_pattern(fds[i], 100, 0);
    tell(pair);
  }
}

static const struct PairCase kCases[] = {
    {"several_instances", user, peer, true},
    {"exclusive", peer, user, true},
    {"two_numbers", user, peer, true},
    {"number_again", peer, user, true},
    {"over_fork", user, peer, true},
    {"changed_while_waiting", peer, user, true},
    {"come_and_go", peer, user, true},
    {"rotate_level", user, peer, true},
    {"rotate_edge", peer, user, true},
};
PAIR_MAIN(kCases)
