/* epoll: level and edge, ONESHOT, RDHUP, ADD, MOD and DEL, added before and after the lift, kernel
 * descriptors beside the stream, nesting, and control from another thread. */
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include "pair.h"

static long control(int epoll, int operation, int fd, uint32_t events) {
  struct epoll_event event = {.events = events, .data.u64 = 0x1234567800000000u + (uint32_t)fd};
  return epoll_ctl(epoll, operation, fd, &event);
}

/* Waits for one event and prints it; data must come back as it was given. */
static void wait_one(const char* label, int epoll, int fd, int timeout_ms) {
  struct epoll_event events[4];
  memset(events, 0, sizeof(events));
  int64_t start = now_ns();
  int count = epoll_wait(epoll, events, 4, timeout_ms);
  double waited = ms_since(start);
  show(label, count);
  if (count > 0) {
    show_epoll("  says", events[0].events);
    say("  data: %s",
        events[0].data.u64 == 0x1234567800000000u + (uint32_t)fd ? "as given" : "other");
  }
  measure(label, waited, 100);
}

/* Asks the peer for 100 bytes and lets them arrive. */
static void fetch_100(struct Pair* pair) {
  tell(pair);
  await(pair);
  settle();
}

static void level(struct Pair* pair, int epoll, int fd) {
  show("add", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
  show("add twice", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
  wait_one("idle", epoll, fd, 50);
  fetch_100(pair);
  wait_one("data", epoll, fd, 1000);
  wait_one("data still there", epoll, fd, 1000);
  receive_pattern(fd, 60, 0);
  wait_one("some still there", epoll, fd, 0);
  receive_pattern(fd, 40, 60);
  wait_one("all read", epoll, fd, 0);
  show("mod to out", control(epoll, EPOLL_CTL_MOD, fd, EPOLLOUT));
  wait_one("writable", epoll, fd, 1000);
  show("mod to both", control(epoll, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT));
  fetch_100(pair);
  wait_one("both", epoll, fd, 1000);
  show("mod to none", control(epoll, EPOLL_CTL_MOD, fd, 0));
  wait_one("none asked", epoll, fd, 50);
  show("del", control(epoll, EPOLL_CTL_DEL, fd, 0));
  show("del with NULL", epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
  show("mod after del", control(epoll, EPOLL_CTL_MOD, fd, EPOLLIN));
  wait_one("after del", epoll, fd, 50);
  show("add again", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
  wait_one("data was waiting", epoll, fd, 0);
  receive_pattern(fd, 100, 0);
}

/* Added before each wait and removed after it, as servers do that ask for one thing at a time.
 * Whatever wakes the waiter has to do so more often than any queue of wake-ups is long. */
static void added_each_time(struct Pair* pair, int epoll, int fd) {
  int came = 0;
  for (int round = 0; round < 600; ++round) {
    CHECKED(control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
    struct epoll_event event;
    if (epoll_wait(epoll, &event, 1, 0) != 0) break; /* nothing is there yet */
    tell(pair);
    if (epoll_wait(epoll, &event, 1, 2000) != 1) break;
    receive_pattern(fd, 100, 0);
    await(pair);
    CHECKED(control(epoll, EPOLL_CTL_DEL, fd, 0));
    ++came;
  }
  show("rounds", came);
}

static void edge(struct Pair* pair, int epoll, int fd) {
  show("add", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLET));
  wait_one("idle", epoll, fd, 50);
  fetch_100(pair);
  wait_one("edge", epoll, fd, 1000);
  wait_one("no second edge", epoll, fd, 50);
  receive_pattern(fd, 10, 0);
  wait_one("none for the rest", epoll, fd, 50);
  fetch_100(pair);
  wait_one("new data, new edge", epoll, fd, 1000);
  receive_pattern(fd, 90, 10);
  receive_pattern(fd, 100, 0);
  show("mod", control(epoll, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT | EPOLLET));
  wait_one("mod gives a fresh edge", epoll, fd, 1000);
  wait_one("once", epoll, fd, 50);
  fetch_100(pair);
  wait_one("in and out", epoll, fd, 1000);
  receive_pattern(fd, 100, 0);
}

static void oneshot(struct Pair* pair, int epoll, int fd) {
  show("add", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLONESHOT));
  fetch_100(pair);
  wait_one("first", epoll, fd, 1000);
  wait_one("disabled", epoll, fd, 50);
  receive_pattern(fd, 50, 0);
  fetch_100(pair);
  wait_one("still disabled", epoll, fd, 50);
  show("mod", control(epoll, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT));
  wait_one("armed again", epoll, fd, 1000);
  receive_pattern(fd, 50, 50);
  receive_pattern(fd, 100, 0);
  show("mod when empty", control(epoll, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT | EPOLLET));
  wait_one("empty", epoll, fd, 50);
}

static void beside_kernel_files(struct Pair* pair, int epoll, int fd) {
  int ends[2];
  CHECKED(pipe(ends));
  int timer = (int)CHECKED(timerfd_create(CLOCK_MONOTONIC, 0));
  CHECKED(control(epoll, EPOLL_CTL_ADD, ends[0], EPOLLIN));
  CHECKED(control(epoll, EPOLL_CTL_ADD, timer, EPOLLIN));
  CHECKED(control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
  wait_one("all idle", epoll, fd, 50);
  CHECKED(write(ends[1], "x", 1));
  wait_one("pipe", epoll, ends[0], 1000);
  CHECKED(read(ends[0], &(char){0}, 1));
  struct itimerspec soon = {{0, 0}, {0, 50000000}};
  CHECKED(timerfd_settime(timer, 0, &soon, NULL));
  wait_one("timer", epoll, timer, 1000);
  CHECKED(read(timer, &(uint64_t){0}, 8));
  fetch_100(pair);
  wait_one("stream", epoll, fd, 1000);
  CHECKED(write(ends[1], "x", 1));
  struct epoll_event events[8];
  show("stream and pipe", epoll_wait(epoll, events, 8, 1000));
  /* maxevents 1: a busy descriptor must not starve the other */
  bool seen_stream = false, seen_pipe = false;
  for (int i = 0; i < 4; ++i) {
    CHECKED(epoll_wait(epoll, events, 1, 1000));
    seen_stream = seen_stream || (uint32_t)events[0].data.u64 == (uint32_t)fd;
    seen_pipe = seen_pipe || (uint32_t)events[0].data.u64 == (uint32_t)ends[0];
  }
  say("one at a time: stream %d pipe %d", seen_stream, seen_pipe);
  receive_pattern(fd, 100, 0);
  wait_one("pipe remains", epoll, ends[0], 0);
}

static void nested(struct Pair* pair, int epoll, int fd) {
  int outer = (int)CHECKED(epoll_create1(EPOLL_CLOEXEC));
  show("add inner", control(outer, EPOLL_CTL_ADD, epoll, EPOLLIN));
  show("add", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
  wait_one("outer idle", outer, epoll, 50);
  fetch_100(pair);
  wait_one("outer", outer, epoll, 1000);
  wait_one("inner", epoll, fd, 0);
  struct pollfd one = {epoll, POLLIN, 0};
  show("poll of the epoll", poll(&one, 1, 1000));
  show_events("  says", one.revents);
  receive_pattern(fd, 100, 0);
  wait_one("outer idle again", outer, epoll, 50);
  show("poll of the idle epoll", poll(&one, 1, 0));
}

static void leave_watched(struct Pair* pair, int epoll, int fd) {
  show("add", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN));
  fetch_100(pair);
  int copy = (int)CHECKED(dup(fd));
  close(fd);
  /* the file lives on in the copy, and epoll watches files: famous, and to be kept */
  wait_one("closed, copy open", epoll, fd, 1000);
  receive_pattern(copy, 100, 0);
  close(copy);
  wait_one("copy closed", epoll, fd, 50);
}

static void arguments(struct Pair* pair, int epoll, int fd) {
  (void)pair;
  struct epoll_event event = {.events = EPOLLIN};
  show("operation 99", control(epoll, 99, fd, EPOLLIN));
  show("of itself", control(epoll, EPOLL_CTL_ADD, epoll, EPOLLIN));
  show("of a closed one", control(epoll, EPOLL_CTL_ADD, 998, EPOLLIN));
  show("not an epoll", control(fd, EPOLL_CTL_ADD, epoll, EPOLLIN));
  show("wait for 0 events", epoll_wait(epoll, &event, 0, 0));
  show("wait for -1 events", epoll_wait(epoll, &event, -1, 0));
  show("wait on a stream", epoll_wait(fd, &event, 1, 0));
  show("EXCLUSIVE", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLEXCLUSIVE));
  show("mod of EXCLUSIVE", control(epoll, EPOLL_CTL_MOD, fd, EPOLLIN));
  struct timespec limit = {0, 20000000};
  show("epoll_pwait2", epoll_pwait2(epoll, &event, 1, &limit, NULL));
}

static void* add_later(void* argument) {
  int* fds = argument;
  sleep_ms(80);
  CHECKED(control(fds[0], EPOLL_CTL_ADD, fds[1], EPOLLOUT));
  return NULL;
}

static void add_in_thread(struct Pair* pair, int epoll, int fd) {
  (void)pair;
  pthread_t thread;
  int fds[2] = {epoll, fd};
  start_thread(&thread, add_later, fds);
  wait_one("added while waiting", epoll, fd, 5000);
  join_thread(thread);
}

static void hang_up(struct Pair* pair, int epoll, int fd) {
  show("add", control(epoll, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLRDHUP | EPOLLET));
  fetch_100(pair);
  wait_one("data", epoll, fd, 1000);
  tell(pair);
  await(pair); /* the peer has shut its side */
  settle();
  wait_one("hang-up, data unread", epoll, fd, 1000);
  receive_pattern(fd, 100, 0);
  show("EOF", recv(fd, &(char){0}, 1, 0));
  show("mod to level", control(epoll, EPOLL_CTL_MOD, fd, EPOLLRDHUP));
  wait_one("level hang-up", epoll, fd, 0);
  wait_one("level hang-up stays", epoll, fd, 0);
  CHECKED(shutdown(fd, SHUT_WR));
  settle();
  show("mod to none", control(epoll, EPOLL_CTL_MOD, fd, 0));
  wait_one("both shut", epoll, fd, 0);
}

static void full(struct Pair* pair, int epoll, int fd) {
  fill_until_full(fd);
  show("add level", control(epoll, EPOLL_CTL_ADD, fd, EPOLLOUT));
  wait_one("full", epoll, fd, 100);
  int second = (int)CHECKED(epoll_create1(0));
  show("add edge", control(second, EPOLL_CTL_ADD, fd, EPOLLOUT | EPOLLET));
  wait_one("full, edge", second, fd, 0);
  tell(pair); /* the peer reads everything */
  wait_one("room, edge", second, fd, 5000);
  wait_one("room", epoll, fd, 5000);
  await(pair);
}

struct Form {
  const char* name;
  void (*body)(struct Pair*, int epoll, int fd);
};

static const struct Form kForms[] = {
    {"level", level},
    {"edge", edge},
    {"oneshot", oneshot},
    {"beside", beside_kernel_files},
    {"nested", nested},
    {"leave", leave_watched},
    {"arguments", arguments},
    {"thread", add_in_thread},
    {"hang_up", hang_up},
    {"full", full},
    {"added_each_time", added_each_time},
};

static void user(struct Pair* pair) {
  int epoll = (int)CHECKED(epoll_create1(EPOLL_CLOEXEC));
  if (strstr(pair->variant, "before_lift") != NULL) {
    open_cold_stream(pair);
    /* an interest of its own, taken away again, leaves no trace in the one under test */
    CHECKED(control(epoll, EPOLL_CTL_ADD, pair->stream, EPOLLIN | EPOLLOUT));
    if (pair->listener >= 0) {
      warm_up_as_server(pair->stream);
    } else {
      warm_up_as_client(pair->stream);
    }
    wait_one("kept through the lift", epoll, pair->stream, 1000);
    CHECKED(control(epoll, EPOLL_CTL_DEL, pair->stream, 0));
  } else {
    open_stream(pair);
  }
  for (size_t i = 0; i < sizeof(kForms) / sizeof(*kForms); ++i) {
    if (strncmp(pair->variant, kForms[i].name, strlen(kForms[i].name)) == 0) {
      kForms[i].body(pair, epoll, pair->stream);
    }
  }
  close(pair->control); /* the peer ends its service */
  pair->control = -1;
}

/* Serves requests for 100 bytes until the user closes the control channel. */
static void peer(struct Pair* pair) {
  static char buffer[1 << 20];
  open_stream(pair);
  bool hangs_up = strncmp(pair->variant, "hang_up", 7) == 0;
  bool reads = strncmp(pair->variant, "full", 4) == 0;
  for (int round = 0;; ++round) {
    char turn;
    if (recv(pair->control, &turn, 1, 0) != 1) break;
    if (reads) {
      sleep_ms(50);
      struct pollfd one = {pair->stream, POLLIN, 0};
      while (poll(&one, 1, 300) == 1) CHECKED(recv(pair->stream, buffer, sizeof(buffer), 0));
    } else if (hangs_up && round == 1) {
      CHECKED(shutdown(pair->stream, SHUT_WR));
    } else {
      send_pattern(pair->stream, 100, 0);
    }
    tell(pair);
  }
}

static const struct PairCase kCases[] = {
    {"level", user, peer, true},
    {"level_added_before_lift", peer, user, true},
    {"edge", peer, user, true},
    {"edge_added_before_lift", user, peer, true},
    {"oneshot", user, peer, true},
    {"beside_kernel_files", peer, user, true},
    {"nested", user, peer, true},
    {"leave_watched", peer, user, true},
    {"arguments", user, peer, true},
    {"thread_adds", peer, user, true},
    {"hang_up", user, peer, true},
    {"full", user, peer, true},
    {"added_each_time", user, peer, true},
};
PAIR_MAIN(kCases)
