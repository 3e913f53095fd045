/* A signal handler interrupts its own thread in the middle of a send and uses the same stream. All of
 * these calls are async-signal-safe (signal-safety(7)): on Linux none of them waits for the send. */
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "pair.h"

enum { kTrials = 8 };

static int stream_fd;
static const char* what;
static volatile sig_atomic_t done;

static void act(int signal_number) {
  (void)signal_number;
  int before = errno;
  struct pollfd one = {stream_fd, POLLOUT, 0};
  if (strcmp(what, "_exit") == 0) _exit(9);
  if (strcmp(what, "exec") == 0) execl("/bin/false", "false", NULL);
  if (strcmp(what, "fork") == 0) {
    pid_t child = fork();
    if (child == 0) _exit(0);
    waitpid(child, NULL, 0);
  }
  if (strcmp(what, "close") == 0) close(stream_fd);
  if (strcmp(what, "shutdown") == 0) shutdown(stream_fd, SHUT_RDWR);
  if (strcmp(what, "poll") == 0) poll(&one, 1, 1);
  done = 1;
  errno = before;
}

/* Sends until the handler has acted: nearly always it meets a copy. */
static void interrupted(struct Pair* pair) {
  static char bulk[64 << 10];
  what = pair->variant;
  bool breaks = strcmp(what, "close") == 0 || strcmp(what, "shutdown") == 0;
  int good = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    int fd = connect_to_server(pair);
    warm_up_as_client(fd);
    pid_t child = (pid_t)CHECKED(fork()); /* the parent judges, and is never in the way */
    if (child == 0) {
      stream_fd = fd;
      done = 0;
      signal(SIGPIPE, SIG_IGN);
      signal(SIGALRM, act);
      struct itimerval when = {{0, 0}, {0, 15000 + 700 * trial}};
      CHECKED(setitimer(ITIMER_REAL, &when, NULL));
      long last = 0;
      while (!done) last = send(fd, bulk, sizeof(bulk), 0);
      if (breaks) {
        last = send(fd, bulk, sizeof(bulk), 0);
        _exit(last == -1 && (errno == EBADF || errno == EPIPE) ? 9 : 10);
      }
      _exit(send(fd, bulk, sizeof(bulk), 0) > 0 ? 9 : 11);
    }
    close(fd);
    int status = 0;
    int64_t start = now_ns();
    while (waitpid(child, &status, WNOHANG) == 0 && ms_since(start) < 5000) sleep_ms(1);
    if (ms_since(start) >= 5000) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      say("trial %d: the handler hangs", trial);
      continue;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == (strcmp(what, "exec") == 0 ? 1 : 9)) {
      ++good;
    } else {
      say("trial %d: status %x", trial, (unsigned)status);
    }
  }
  say("%d of %d as expected", good, kTrials);
  tell(pair);
}

static void* swallow(void* argument) {
  static __thread char sink[256 << 10];
  int fd = (int)(intptr_t)argument;
  warm_up_as_server(fd);
  while (recv(fd, sink, sizeof(sink), 0) > 0) {
  }
  close(fd);
  return NULL;
}

static void reads_all(struct Pair* pair) {
  int listener = listen_on_loopback(pair, AF_INET, 64);
  pthread_t threads[kTrials];
  for (int trial = 0; trial < kTrials; ++trial) {
    int fd = (int)CHECKED(accept(listener, NULL, NULL));
    start_thread(&threads[trial], swallow, (void*)(intptr_t)fd);
  }
  await(pair);
  for (int trial = 0; trial < kTrials; ++trial) join_thread(threads[trial]);
  say("all ended");
}

static void connects(struct Pair* pair) {
  learn_address(pair);
  interrupted(pair);
}

static const struct PairCase kCases[] = {
    {"_exit", reads_all, connects, true},    {"exec", reads_all, connects, true, true},
    {"fork", reads_all, connects, true},     {"close", reads_all, connects, true},
    {"shutdown", reads_all, connects, true}, {"poll", reads_all, connects, true},
};
PAIR_MAIN(kCases)
