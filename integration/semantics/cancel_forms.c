/* pthread_cancel of a thread that is in a call on a stream: where libc's call is a cancellation
 * point it acts, pending or in the sleep, cleanup handlers run, no byte is lost, and the stream
 * goes on. */
#include "pair.h"

static struct Pair* shared;
static volatile pid_t worker;
static char buffer[1 << 16];

static void cleaned(void* label) { say("cleanup of %s", (const char*)label); }

static long wait_in_recv(void) { return recv(shared->stream, buffer, sizeof(buffer), 0); }
static long wait_in_read(void) { return read(shared->stream, buffer, sizeof(buffer)); }
static long wait_in_readv(void) {
  struct iovec parts[2] = {{buffer, 10}, {buffer + 10, 10}};
  return readv(shared->stream, parts, 2);
}
static long wait_in_recvmsg(void) {
  struct iovec part = {buffer, 100};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  return recvmsg(shared->stream, &message, 0);
}
static long wait_in_recvmmsg(void) {
  struct iovec part = {buffer, 100};
  struct mmsghdr message = {.msg_hdr = {.msg_iov = &part, .msg_iovlen = 1}};
  return recvmmsg(shared->stream, &message, 1, 0, NULL);
}
static long wait_with_limit(void) {
  struct timeval limit = {20, 0};
  CHECKED(setsockopt(shared->stream, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
  return wait_in_recv();
}
static long wait_in_poll(void) {
  struct pollfd one = {shared->stream, POLLIN, 0};
  return poll(&one, 1, -1);
}
static long wait_in_ppoll(void) {
  struct pollfd one = {shared->stream, POLLIN, 0};
  struct timespec limit = {20, 0};
  return ppoll(&one, 1, &limit, NULL);
}
static long wait_in_select(void) {
  fd_set set;
  FD_ZERO(&set);
  FD_SET(shared->stream, &set);
  return select(shared->stream + 1, &set, NULL, NULL, NULL);
}
static int instance;
static long wait_in_epoll(void) {
  struct epoll_event event;
  return epoll_wait(instance, &event, 1, -1);
}
static long wait_in_send(void) {
  for (;;) {
    long n = send(shared->stream, buffer, sizeof(buffer), MSG_NOSIGNAL);
    if (n < 0) return n;
  }
}

static long (*waiting_call)(void);
static void* wait_in_call(void* label) {
  pthread_cleanup_push(cleaned, label);
  worker = gettid();
  show("RETURNED", waiting_call());
  pthread_cleanup_pop(0);
  return NULL;
}

static void cancel_and_join(pthread_t thread) {
  void* result = NULL;
  int error = pthread_cancel(thread);
  CHECKED(pthread_join(thread, &result));
  say("cancel: %d, cancelled: %d", error, result == PTHREAD_CANCELED);
}

static void cancel_in(const char* label, long (*call)(void)) {
  pthread_t thread;
  worker = 0;
  waiting_call = call;
  start_thread(&thread, wait_in_call, (void*)label);
  while (worker == 0) sleep_ms(1);
  wait_until_asleep(worker);
  cancel_and_join(thread);
}

static void cancel_receivers(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  static const struct {
    const char* label;
    long (*call)(void);
  } kCalls[] = {{"recv", wait_in_recv},       {"read", wait_in_read},
                {"readv", wait_in_readv},     {"recvmsg", wait_in_recvmsg},
                {"recvmmsg", wait_in_recvmmsg}, {"recv with a limit", wait_with_limit}};
  for (size_t i = 0; i < sizeof(kCalls) / sizeof(*kCalls); ++i) {
    cancel_in(kCalls[i].label, kCalls[i].call);
    ping_as_client(pair->stream, 4);
  }
}

static void cancel_pollers(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  instance = (int)CHECKED(epoll_create1(0));
  struct epoll_event event = {.events = EPOLLIN};
  CHECKED(epoll_ctl(instance, EPOLL_CTL_ADD, pair->stream, &event));
  cancel_in("poll", wait_in_poll);
  ping_as_client(pair->stream, 4);
  cancel_in("ppoll", wait_in_ppoll);
  ping_as_client(pair->stream, 4);
  cancel_in("select", wait_in_select);
  ping_as_client(pair->stream, 4);
  cancel_in("epoll_wait", wait_in_epoll);
  ping_as_client(pair->stream, 4);
}

static void pong_often(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 24);
  drain("drained", pair->stream);
}
static void pong_16(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 16);
  drain("drained", pair->stream);
}

static void cancel_sender(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  fill_pattern(buffer, sizeof(buffer), 0);
  cancel_in("send", wait_in_send);
  tell(pair);
  await(pair);
  show("send afterwards", send(pair->stream, "x", 1, MSG_NOSIGNAL));
}

static void read_a_lot(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  static char some[1 << 16];
  struct pollfd one = {pair->stream, POLLIN, 0};
  while (poll(&one, 1, 300) == 1 && recv(pair->stream, some, sizeof(some), 0) > 0) {
  }
  tell(pair);
  show("recv", recv(pair->stream, some, sizeof(some), 0));
  show("recv", recv(pair->stream, some, sizeof(some), 0));
}

/* Of a blocking MSG_WAITALL what was there is gone: the call had taken it. */
static long wait_for_all(void) { return recv(shared->stream, buffer, 100, MSG_WAITALL); }

static void cancel_wait_for_all(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  tell(pair);
  await(pair);
  settle();
  cancel_in("recv of all", wait_for_all);
  int left = -1;
  CHECKED(ioctl(pair->stream, FIONREAD, &left));
  say("left: %d", left);
  ping_as_client(pair->stream, 4);
}

static void send_ten(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  CHECKED(send(pair->stream, "0123456789", 10, 0));
  tell(pair);
  pong_as_server(pair->stream, 4);
}

/* Pending before the call, and the bytes are there: they stay. */
static volatile int stage;
static void* recv_when_pending(void* argument) {
  (void)argument;
  int old;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &old);
  stage = 1;
  while (stage != 2) sleep_ms(1);
  show("recv, disabled", recv(shared->stream, buffer, 2, 0));
  pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &old);
  show("RETURNED", recv(shared->stream, buffer, 2, 0));
  return NULL;
}

static void cancel_pending(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  tell(pair);
  await(pair);
  settle();
  pthread_t thread;
  void* result = NULL;
  start_thread(&thread, recv_when_pending, NULL);
  while (stage != 1) sleep_ms(1);
  say("cancel: %d", pthread_cancel(thread));
  stage = 2;
  CHECKED(pthread_join(thread, &result));
  say("cancelled: %d", result == PTHREAD_CANCELED);
  int left = -1;
  CHECKED(ioctl(pair->stream, FIONREAD, &left));
  say("left: %d", left);
  CHECKED(recv(pair->stream, buffer, 8, MSG_WAITALL));
  ping_as_client(pair->stream, 4);
}

/* Disabled: the sleep goes on, and takes what comes. */
static void* recv_disabled(void* argument) {
  (void)argument;
  int old;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &old);
  worker = gettid();
  show("recv, disabled", recv(shared->stream, buffer, 4, 0));
  struct pollfd one = {shared->stream, POLLIN, 0};
  show("poll, disabled", poll(&one, 1, 0));
  pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &old);
  say("enabled");
  pthread_testcancel();
  say("NOT REACHED");
  return NULL;
}

static void cancel_disabled(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  pthread_t thread;
  void* result = NULL;
  start_thread(&thread, recv_disabled, NULL);
  while (worker == 0) sleep_ms(1);
  wait_until_asleep(worker);
  say("cancel: %d", pthread_cancel(thread));
  sleep_ms(50);
  tell(pair);
  CHECKED(pthread_join(thread, &result));
  say("cancelled: %d", result == PTHREAD_CANCELED);
  CHECKED(recv(pair->stream, buffer, 6, MSG_WAITALL));
  ping_as_client(pair->stream, 4);
}

static void send_ten_when_told(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  CHECKED(send(pair->stream, "0123", 4, 0));
  sleep_ms(100);
  CHECKED(send(pair->stream, "456789", 6, 0));
  pong_as_server(pair->stream, 4);
}

/* Asynchronous: in the sleep, and behind the call. */
static long wait_asynchronously(void) {
  int old;
  pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &old);
  return wait_in_recv();
}
static void* spin_behind_a_call(void* argument) {
  (void)argument;
  int old;
  pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &old);
  if (recv(shared->stream, buffer, 10, 0) == 10) stage = 1;
  for (;;) {
  }
  return NULL;
}

static void cancel_asynchronous(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  cancel_in("recv", wait_asynchronously);
  tell(pair);
  await(pair);
  settle();
  pthread_t thread;
  start_thread(&thread, spin_behind_a_call, NULL);
  while (stage != 1) sleep_ms(1);
  cancel_and_join(thread);
  ping_as_client(pair->stream, 4);
}

/* At any moment: the thread comes from the one wait and goes to the next. */
static void* wait_in_turn(void* argument) {
  (void)argument;
  unsigned turn = (unsigned)(uintptr_t)argument;
  for (;; ++turn) {
    struct pollfd one = {shared->stream, POLLIN, 0};
    struct epoll_event event;
    switch (turn % 3) {
      case 0: (void)poll(&one, 1, 1); break;
      case 1: (void)epoll_wait(instance, &event, 1, 1); break;
      default: (void)recv(shared->stream, buffer, 1, 0); break;
    }
  }
  return NULL;
}

static void cancel_any_time(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  instance = (int)CHECKED(epoll_create1(0));
  struct epoll_event event = {.events = EPOLLIN};
  CHECKED(epoll_ctl(instance, EPOLL_CTL_ADD, pair->stream, &event));
  struct timeval limit = {0, 1000};
  CHECKED(setsockopt(pair->stream, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
  int cancelled = 0;
  for (int i = 0; i < 400; ++i) {
    pthread_t thread;
    void* result = NULL;
    start_thread(&thread, wait_in_turn, (void*)(uintptr_t)i);
    struct timespec nap = {0, (i * 7919 % 600) * 1000};
    nanosleep(&nap, NULL);
    CHECKED(pthread_cancel(thread));
    CHECKED(pthread_join(thread, &result));
    cancelled += result == PTHREAD_CANCELED;
  }
  say("cancelled: %d", cancelled);
  limit.tv_usec = 0;
  CHECKED(setsockopt(pair->stream, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
  ping_as_client(pair->stream, 4);
}

static void pong_4(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 4);
}

static const struct PairCase kCases[] = {
    {"receivers", pong_often, cancel_receivers, true},
    {"pollers", pong_16, cancel_pollers, true},
    {"sender", read_a_lot, cancel_sender, true},
    {"wait_for_all", send_ten, cancel_wait_for_all, true},
    {"pending", send_ten, cancel_pending, true},
    {"disabled", send_ten_when_told, cancel_disabled, true},
    {"asynchronous", send_ten, cancel_asynchronous, true},
    {"any_time", pong_4, cancel_any_time, true},
};
PAIR_MAIN(kCases)
