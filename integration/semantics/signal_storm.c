/* Signals of several kinds that come at once, again and again, in the middle of sends and receives: none
 * stays blocked, none is lost for good, a real-time one is not lost at all, every byte arrives. */
#include "pair.h"

enum { kStorm = 3000, kBytes = 64 << 20 };

static volatile sig_atomic_t ordinary, realtime, bad_values;
static volatile int next_value;

static void count(int number) {
  (void)number;
  ++ordinary;
}

static void count_in_order(int number, siginfo_t* info, void* context) {
  (void)number;
  (void)context;
  if (info->si_code == SI_QUEUE && info->si_value.sival_int != next_value++) ++bad_values;
  ++realtime;
}

struct Target {
  pid_t process;
  pthread_t thread;
};

static void* storm(void* argument) {
  struct Target* target = argument;
  for (int i = 0; i < kStorm; ++i) {
    pthread_kill(target->thread, SIGUSR1);
    pthread_kill(target->thread, SIGUSR2);
    pthread_kill(target->thread, SIGTRAP);
    while (sigqueue(target->process, SIGRTMIN, (union sigval){.sival_int = i}) != 0) sched_yield();
    if (i % 16 == 0) sched_yield();
  }
  return NULL;
}

static void under_fire(struct Pair* pair) {
  open_stream(pair);
  struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
  CHECKED(sigaction(SIGUSR1, &action, NULL));
  CHECKED(sigaction(SIGTRAP, &action, NULL));
  action.sa_flags = 0;
  sigaddset(&action.sa_mask, SIGUSR1);
  CHECKED(sigaction(SIGUSR2, &action, NULL));
  action.sa_sigaction = count_in_order;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  CHECKED(sigaction(SIGRTMIN, &action, NULL));
  struct Target target = {getpid(), pthread_self()};
  /* The storm's own thread takes none of them. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  start_thread(&thread, storm, &target);
  pthread_sigmask(SIG_SETMASK, &before, NULL);

  static uint8_t piece[10007];
  bool sends = strcmp(pair->variant, "sends") == 0;
  uint64_t at = 0;
  while (at < kBytes) {
    size_t want = kBytes - at < sizeof(piece) ? kBytes - at : sizeof(piece);
    if (sends) fill_pattern(piece, want, at);
    ssize_t n = sends ? send(pair->stream, piece, want, 0) : recv(pair->stream, piece, want, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("ended at %llu: %zd", (unsigned long long)at, n);
    if (!sends && !pattern_holds(piece, (size_t)n, at)) fail("wrong bytes at %llu", (unsigned long long)at);
    at += (uint64_t)n;
  }
  join_thread(thread);
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, NULL, &now);
  say("blocked: %d %d %d %d", sigismember(&now, SIGUSR1), sigismember(&now, SIGUSR2),
      sigismember(&now, SIGTRAP), sigismember(&now, SIGRTMIN));
  say("every real-time one: %d, out of order %d", realtime == kStorm, (int)bad_values);
  int seen = ordinary;
  raise(SIGUSR1);
  raise(SIGUSR2);
  raise(SIGTRAP);
  say("still heard: %d", (int)ordinary - seen);
}

static void at_peace(struct Pair* pair) {
  open_stream(pair);
  if (strcmp(pair->variant, "sends") == 0) {
    receive_pattern(pair->stream, kBytes, 0);
  } else {
    send_pattern(pair->stream, kBytes, 0);
  }
}

static const struct PairCase kCases[] = {{"sends", at_peace, under_fire, true},
                                         {"receives", at_peace, under_fire, true}};
PAIR_MAIN(kCases)
