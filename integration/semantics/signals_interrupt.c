/* Which waits a signal ends with EINTR, and which go on, follows signal(7). */
#include <sys/time.h>

#include "pair.h"

static volatile pthread_t waiting_thread;
static volatile pid_t waiting_thread_id;

static void* signal_later(void* argument) {
  struct Pair* pair = argument;
  sleep_ms(60);
  wait_until_asleep(waiting_thread_id);
  pthread_kill(waiting_thread, SIGUSR1);
  sleep_ms(100);
  tell(pair); /* now the peer acts: a restarted wait ends with data */
  return NULL;
}

static bool variant_has(const struct Pair* pair, const char* word) {
  return strstr(pair->variant, word) != NULL;
}

static long wait_as_named(struct Pair* pair, int fd) {
  static char big[16 << 20]; /* more than the buffers of TCP take */
  struct pollfd one = {fd, POLLIN, 0};
  sigset_t none;
  sigemptyset(&none);
  if (variant_has(pair, "ppoll")) return ppoll(&one, 1, &(struct timespec){5, 0}, &none);
  if (variant_has(pair, "poll_in")) return poll(&one, 1, 5000);
  if (variant_has(pair, "select")) {
    fd_set readable;
    FD_ZERO(&readable);
    FD_SET(fd, &readable);
    return variant_has(pair, "pselect")
               ? pselect(fd + 1, &readable, NULL, NULL, &(struct timespec){5, 0}, &none)
               : select(fd + 1, &readable, NULL, NULL, &(struct timeval){5, 0});
  }
  if (variant_has(pair, "epoll")) {
    int epoll = (int)CHECKED(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {.events = EPOLLIN};
    CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
    return variant_has(pair, "epoll_pwait") ? epoll_pwait(epoll, &event, 1, 5000, &none)
                                            : epoll_wait(epoll, &event, 1, 5000);
  }
  if (variant_has(pair, "send")) {
    long sent = send(fd, big, sizeof(big), MSG_NOSIGNAL);
    return sent > 0 && sent < (long)sizeof(big) ? 1 : sent > 0 ? 2 : sent;
  }
  if (variant_has(pair, "readv")) return readv(fd, &(struct iovec){big, 100}, 1);
  return recv(fd, big, 100, variant_has(pair, "waitall") ? MSG_WAITALL : 0);
}

static void interrupted(struct Pair* pair) {
  open_stream(pair);
  count_signal(SIGUSR1, variant_has(pair, "restart") ? SA_RESTART : 0);
  int fd = pair->stream;
  if (variant_has(pair, "send")) fill_until_full(fd);
  if (variant_has(pair, "timed")) {
    struct timeval limit = {5, 0};
    CHECKED(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
  }
  if (variant_has(pair, "waitall")) await(pair); /* ten bytes lie there */
  if (variant_has(pair, "pselect") || variant_has(pair, "ppoll") || variant_has(pair, "pwait")) {
    sigset_t block;
    sigemptyset(&block);
    sigaddset(&block, SIGUSR1);
    CHECKED(pthread_sigmask(SIG_BLOCK, &block, NULL)); /* only the wait itself lets it in */
  }
  waiting_thread = pthread_self();
  waiting_thread_id = gettid();
  pthread_t thread;
  start_thread(&thread, signal_later, pair);
  int64_t start = now_ns();
  show("wait", wait_as_named(pair, fd));
  measure("ended after ms", ms_since(start), 100);
  say("signals: %d", (int)signals_seen);
  join_thread(thread);
  if (!variant_has(pair, "send")) {
    char rest[4096];
    settle();
    show("rest", recv(fd, rest, sizeof(rest), MSG_DONTWAIT));
  }
  tell(pair);
}

static void peer(struct Pair* pair) {
  open_stream(pair);
  if (variant_has(pair, "waitall")) {
    CHECKED(send(pair->stream, "0123456789", 10, 0));
    tell(pair);
  }
  await(pair);
  if (variant_has(pair, "send")) {
    static char buffer[1 << 20];
    struct pollfd one = {pair->stream, POLLIN, 0};
    while (poll(&one, 1, 500) == 1 && recv(pair->stream, buffer, sizeof(buffer), 0) > 0) {
    }
  } else {
    send_pattern(pair->stream, 100, 0);
  }
  await(pair);
}

static const struct PairCase kCases[] = {
    {"recv_eintr", peer, interrupted, true},
    {"recv_restart", interrupted, peer, true},
    {"recv_timed_restart", peer, interrupted, true},
    {"recv_waitall_eintr", interrupted, peer, true},
    {"recv_waitall_restart", peer, interrupted, true},
    {"readv_eintr", interrupted, peer, true},
    {"readv_restart", peer, interrupted, true},
    {"send_eintr", peer, interrupted, true},
    {"send_restart", interrupted, peer, true},
    {"poll_in_restart", peer, interrupted, true},
    {"ppoll", interrupted, peer, true},
    {"select_restart", peer, interrupted, true},
    {"pselect", interrupted, peer, true},
    {"epoll_restart", peer, interrupted, true},
    {"epoll_pwait", interrupted, peer, true},
};
PAIR_MAIN(kCases)
