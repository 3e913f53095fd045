/* Descriptors of every other kind beside streams that are ready all the time: epoll, poll and select give
 * each its turn, and a stream that wakes a wait is told from a file that does. */
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>
#include <sys/un.h>

#include "pair.h"

enum { kBusy = 3, kFiles = 8 };

static int files[kFiles];
static const char* const kNames[kFiles] = {"pipe",    "eventfd", "timerfd", "signalfd",
                                           "inotify", "UDP",     "AF_UNIX", "listener"};
static int other_ends[kFiles];
static struct sockaddr_in listening_at;

static void open_files(void) {
  int ends[2];
  CHECKED(pipe(ends));
  files[0] = ends[0];
  other_ends[0] = ends[1];
  files[1] = (int)CHECKED(eventfd(0, EFD_NONBLOCK));
  files[2] = (int)CHECKED(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  CHECKED(sigprocmask(SIG_BLOCK, &set, NULL));
  files[3] = (int)CHECKED(signalfd(-1, &set, SFD_NONBLOCK));
  files[4] = (int)CHECKED(inotify_init1(IN_NONBLOCK));
  CHECKED(inotify_add_watch(files[4], ".", IN_CREATE));
  files[5] = (int)CHECKED(socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0));
  struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof(here);
  CHECKED(bind(files[5], (struct sockaddr*)&here, size));
  CHECKED(getsockname(files[5], (struct sockaddr*)&here, &size));
  CHECKED(connect(files[5], (struct sockaddr*)&here, size)); /* with itself */
  CHECKED(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
  files[6] = ends[0];
  other_ends[6] = ends[1];
  files[7] = (int)CHECKED(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
  here.sin_port = 0;
  CHECKED(bind(files[7], (struct sockaddr*)&here, size));
  CHECKED(listen(files[7], 5));
  size = sizeof(listening_at);
  CHECKED(getsockname(files[7], (struct sockaddr*)&listening_at, &size));
}

static void make_ready(int i) {
  static const uint64_t kOne = 1;
  char name[32];
  switch (i) {
    case 0:
    case 6: CHECKED(write(other_ends[i], "x", 1)); break;
    case 1: CHECKED(write(files[i], &kOne, 8)); break;
    case 2: CHECKED(timerfd_settime(files[i], 0, &(struct itimerspec){{0, 0}, {0, 1000000}}, NULL)); break;
    case 3: CHECKED(kill(getpid(), SIGUSR1)); break;
    case 4:
      snprintf(name, sizeof(name), "watched.%d", getpid());
      CHECKED(close((int)CHECKED(open(name, O_CREAT | O_EXCL | O_WRONLY, 0600))));
      CHECKED(unlink(name));
      break;
    case 5: CHECKED(send(files[i], "x", 1, 0)); break;
    case 7:
      other_ends[i] = (int)CHECKED(socket(AF_INET, SOCK_STREAM, 0));
      CHECKED(connect(other_ends[i], (struct sockaddr*)&listening_at, sizeof(listening_at)));
      break;
  }
}

static void make_idle(int i) {
  char buffer[4096];
  if (i == 7) {
    CHECKED(close((int)CHECKED(accept(files[i], NULL, NULL))));
    CHECKED(close(other_ends[i]));
  } else {
    CHECKED(read(files[i], buffer, sizeof(buffer)));
  }
}

static const char* name_of(int fd, const int* streams, int count) {
  for (int i = 0; i < kFiles; ++i) {
    if (files[i] == fd) return kNames[i];
  }
  for (int i = 0; i < count; ++i) {
    if (streams[i] == fd) return "stream";
  }
  return "a stranger";
}

/* Which of them one wait names; the ready streams are in it or not. */
static bool epoll_names(int epoll, int max, int fd) {
  struct epoll_event events[16];
  long n = CHECKED(epoll_wait(epoll, events, max, 1000));
  for (long k = 0; k < n; ++k) {
    if (events[k].data.fd == fd) return true;
  }
  return false;
}

static void fair(struct Pair* pair) {
  int streams[kBusy];
  streams[0] = pair->stream;
  for (int i = 1; i < kBusy; ++i) {
    open_stream(pair);
    streams[i] = pair->stream;
  }
  int epoll = (int)CHECKED(epoll_create1(0));
  for (int i = 0; i < kBusy + kFiles; ++i) {
    int fd = i < kBusy ? streams[i] : files[i - kBusy];
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
  }
  tell(pair); /* all streams are readable from now on, and nobody reads */
  await(pair);
  settle();
  for (int i = 0; i < kFiles; ++i) {
    make_ready(i);
    sleep_ms(5);
    /* whoever is ready comes within one lap of all that is ready, whatever fits into an answer */
    for (int max = 1; max <= 4; ++max) {
      int waits = 0;
      while (waits < 20 && !epoll_names(epoll, max, files[i])) ++waits;
      say("%s, %d at a time: %s", kNames[i], max, waits <= kBusy + 1 ? "in turn" : "STARVED");
    }
    struct pollfd set[kBusy + 1];
    for (int k = 0; k < kBusy; ++k) set[k] = (struct pollfd){streams[k], POLLIN, 0};
    set[kBusy] = (struct pollfd){files[i], POLLIN, 0};
    show("poll", poll(set, kBusy + 1, 1000));
    show_events("  says", set[kBusy].revents);
    fd_set in;
    FD_ZERO(&in);
    int top = files[i];
    FD_SET(files[i], &in);
    for (int k = 0; k < kBusy; ++k) {
      FD_SET(streams[k], &in);
      if (streams[k] > top) top = streams[k];
    }
    show("select", select(top + 1, &in, NULL, NULL, NULL));
    make_idle(i);
    show("idle", poll(&set[kBusy], 1, 0));
  }
  for (int i = 0; i < kBusy; ++i) receive_pattern(streams[i], 100, 0);
}

static volatile int chosen;

static void* make_ready_later(void* unused) {
  (void)unused;
  sleep_ms(40);
  make_ready(chosen);
  return NULL;
}

/* Each kind wakes a wait that a silent stream is part of. */
static void wakes(struct Pair* pair) {
  int epoll = (int)CHECKED(epoll_create1(0));
  struct epoll_event event = {.events = EPOLLIN, .data.fd = pair->stream};
  CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, pair->stream, &event));
  for (int i = 0; i < kFiles; ++i) {
    pthread_t thread;
    chosen = i;
    event.data.fd = files[i];
    CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, files[i], &event));
    start_thread(&thread, make_ready_later, NULL);
    show("epoll_wait", epoll_wait(epoll, &event, 1, 5000));
    say("  %s", name_of(event.data.fd, &pair->stream, 1));
    join_thread(thread);
    make_idle(i);
    start_thread(&thread, make_ready_later, NULL);
    struct pollfd set[2] = {{pair->stream, POLLIN, 0}, {files[i], POLLIN, 0}};
    show("poll", poll(set, 2, 5000));
    show_events("  stream", set[0].revents);
    show_events("  file", set[1].revents);
    join_thread(thread);
    make_idle(i);
    CHECKED(epoll_ctl(epoll, EPOLL_CTL_DEL, files[i], NULL));
  }
  tell(pair);
  show("epoll_wait", epoll_wait(epoll, &event, 1, 5000));
  say("  %s", name_of(event.data.fd, &pair->stream, 1));
  await(pair);
  receive_pattern(pair->stream, 100, 0);
}

static void user(struct Pair* pair) {
  open_files();
  open_stream(pair);
  if (strstr(pair->variant, "fair") != NULL) {
    fair(pair);
  } else {
    wakes(pair);
  }
}

static void peer(struct Pair* pair) {
  int streams[kBusy], count = strstr(pair->variant, "fair") != NULL ? kBusy : 1;
  for (int i = 0; i < count; ++i) {
    open_stream(pair);
    streams[i] = pair->stream;
  }
  await(pair);
  for (int i = 0; i < count; ++i) send_pattern(streams[i], 100, 0);
  tell(pair);
  drain("drained", streams[0]);
}

static const struct PairCase kCases[] = {
    {"fair_in_server", user, peer, true},
    {"fair_in_client", peer, user, true},
    {"wakes", user, peer, true},
};
PAIR_MAIN(kCases)
