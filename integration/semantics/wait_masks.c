/* The signal mask that ppoll, pselect, epoll_pwait and epoll_pwait2 take is in force for the wait and for
 * nothing else: a pending signal ends the call at once, and the mask of before is back afterwards. */
#include <sys/syscall.h>

#include "pair.h"

static int fd, epoll;

static long wait_by(const char* how, const sigset_t* mask, int ms) {
  struct pollfd one = {fd, POLLIN, 0};
  struct timespec limit = {0, ms * 1000000L};
  fd_set in;
  FD_ZERO(&in);
  FD_SET(fd, &in);
  struct epoll_event event;
  if (strcmp(how, "ppoll") == 0) return ppoll(&one, 1, &limit, mask);
  if (strcmp(how, "pselect") == 0) return pselect(fd + 1, &in, NULL, NULL, &limit, mask);
  if (strcmp(how, "epoll_pwait") == 0) return epoll_pwait(epoll, &event, 1, ms, mask);
  if (strcmp(how, "by number") == 0) return syscall(SYS_epoll_pwait, epoll, &event, 1, ms, mask, 8);
  return epoll_pwait2(epoll, &event, 1, &limit, mask);
}

static void* signal_later(void* thread) {
  sleep_ms(60);
  pthread_kill(*(pthread_t*)thread, SIGUSR1);
  return NULL;
}

static void masks(struct Pair* pair) {
  static const char* const kHow[] = {"ppoll", "pselect", "epoll_pwait", "epoll_pwait2", "by number"};
  open_stream(pair);
  fd = pair->stream;
  epoll = (int)CHECKED(epoll_create1(0));
  struct epoll_event event = {.events = EPOLLIN};
  CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
  count_signal(SIGUSR1, SA_RESTART);
  sigset_t one, none, now;
  sigemptyset(&none);
  sigemptyset(&one);
  sigaddset(&one, SIGUSR1);
  pthread_t self = pthread_self(), thread;
  for (size_t i = 0; i < sizeof(kHow) / sizeof(*kHow); ++i) {
    say("%s:", kHow[i]);
    signals_seen = 0;
    CHECKED(sigprocmask(SIG_SETMASK, &one, NULL));
    raise(SIGUSR1);
    show("  blocked in the wait", wait_by(kHow[i], &one, 20));
    show("  no mask given", wait_by(kHow[i], NULL, 20));
    say("  seen: %d", (int)signals_seen);
    show("  pending, let in", wait_by(kHow[i], &none, 2000));
    say("  seen: %d", (int)signals_seen);
    CHECKED(sigprocmask(SIG_SETMASK, NULL, &now));
    say("  blocked again: %d", sigismember(&now, SIGUSR1));
    start_thread(&thread, signal_later, &self);
    show("  comes while waiting", wait_by(kHow[i], &none, 2000));
    join_thread(thread);
    say("  seen: %d", (int)signals_seen);
    CHECKED(sigprocmask(SIG_SETMASK, &none, NULL));
    start_thread(&thread, signal_later, &self);
    show("  kept out", wait_by(kHow[i], &one, 150));
    join_thread(thread);
    say("  seen: %d", (int)signals_seen); /* right behind the wait */
    CHECKED(sigprocmask(SIG_SETMASK, NULL, &now));
    say("  open again: %d", !sigismember(&now, SIGUSR1));
  }
  /* With bytes there and a signal pending: which is told, and is the other one lost? */
  tell(pair);
  await(pair);
  settle();
  for (size_t i = 0; i < sizeof(kHow) / sizeof(*kHow); ++i) {
    signals_seen = 0;
    CHECKED(sigprocmask(SIG_SETMASK, &one, NULL));
    raise(SIGUSR1);
    long result = wait_by(kHow[i], &none, 0);
    say("%s with bytes: %s", kHow[i], result == 1 || (result == -1 && errno == EINTR) ? "one or the other" : "NEITHER");
    CHECKED(sigprocmask(SIG_SETMASK, &none, NULL));
    say("  seen: %d", (int)signals_seen);
  }
  receive_pattern(fd, 100, 0);
}

static void peer(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  send_pattern(pair->stream, 100, 0);
  tell(pair);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"server", masks, peer, true},
    {"client", peer, masks, true},
};
PAIR_MAIN(kCases)
