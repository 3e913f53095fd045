/* close() of a number while calls of other threads are inside: the file is theirs until they leave.
 * The number is free at once, what comes still reaches them, and the peer hears of the end when the
 * last one is out. */
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/time.h>

#include "pair.h"

static struct Pair* shared;
static volatile pid_t workers[2];
static size_t wanted;
static int flags;

static void* receive(void* index) {
  char bytes[64];
  workers[(intptr_t)index] = gettid();
  long n = recv(shared->stream, bytes, wanted, flags);
  show("recv", n);
  if (n > 0) say("text: %.*s", (int)n, bytes);
  return NULL;
}

static void start(pthread_t* thread, void* (*body)(void*), int index) {
  workers[index] = 0;
  start_thread(thread, body, (void*)(intptr_t)index);
  while (workers[index] == 0) sleep_ms(1);
  wait_until_asleep(workers[index]);
}

static int reuse(const struct Pair* pair) {
  int fd = (int)CHECKED(open("/dev/null", O_RDWR));
  say("number reused: %d", fd == pair->stream);
  return fd;
}

static void two_inside(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  wanted = 4;
  pthread_t threads[2];
  start(&threads[0], receive, 0);
  start(&threads[1], receive, 1);
  show("close", close(pair->stream));
  reuse(pair);
  tell(pair);
  for (int i = 0; i < 2; ++i) join_thread(threads[i]);
}

static void send_two(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  struct pollfd end = {pair->stream, POLLRDHUP, 0};
  show("end before", poll(&end, 1, 100));
  show("send", send(pair->stream, "abcd", 4, 0));
  show("end between", poll(&end, 1, 100));
  show("send", send(pair->stream, "abcd", 4, 0));
  drain("drained", pair->stream);
}

static void close_all_wanted(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  wanted = 12;
  flags = MSG_WAITALL;
  pthread_t thread;
  start(&thread, receive, 0);
  show("close_range", close_range((unsigned)pair->stream, (unsigned)pair->stream, 0));
  reuse(pair);
  tell(pair);
  join_thread(thread);
}

static void send_in_pieces(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  for (int i = 0; i < 3; ++i) {
    sleep_ms(30);
    show("send", send(pair->stream, "abcd", 4, MSG_NOSIGNAL));
  }
  drain("drained", pair->stream);
}

/* dup2 over the number, and more comes than is taken: the end is a reset. */
static void dup2_over(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  wanted = 4;
  pthread_t thread;
  start(&thread, receive, 0);
  int null = (int)CHECKED(open("/dev/null", O_RDWR));
  say("dup2: %d", dup2(null, pair->stream) == pair->stream);
  show("write to the new file", write(pair->stream, "xyz", 3));
  tell(pair);
  join_thread(thread);
  tell(pair);
}

static void send_more(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  show("send", send(pair->stream, "abcdefghijkl", 12, 0));
  await(pair);
  settle();
  char byte;
  show("recv", recv(pair->stream, &byte, 1, 0));
}

static void limit_passes(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  wanted = 4;
  struct timeval limit = {0, 300000};
  CHECKED(setsockopt(pair->stream, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
  pthread_t thread;
  start(&thread, receive, 0);
  show("close", close(pair->stream));
  tell(pair);
  join_thread(thread);
}

static void cancelled(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  wanted = 4;
  pthread_t thread;
  start(&thread, receive, 0);
  show("close", close(pair->stream));
  reuse(pair);
  tell(pair);
  sleep_ms(60);
  CHECKED(pthread_cancel(thread));
  join_thread(thread);
}

static void meet_the_end(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  struct pollfd end = {pair->stream, POLLRDHUP, 0};
  show("end at once", poll(&end, 1, 20));
  drain("drained", pair->stream);
}

static void peer_ends(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  wanted = 4;
  pthread_t thread;
  start(&thread, receive, 0);
  show("close", close(pair->stream));
  reuse(pair);
  tell(pair);
  join_thread(thread);
}

static void only_end(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

/* A sender: its bytes all go. */
enum { kLot = 64 << 20 };
static void* send_a_lot(void* index) {
  uint8_t* bytes = malloc(kLot);
  fill_pattern(bytes, kLot, 0);
  workers[(intptr_t)index] = gettid();
  show("send", send(shared->stream, bytes, kLot, MSG_NOSIGNAL));
  free(bytes);
  return NULL;
}

/* `body` is inside with all it has to send. */
static void send_inside(struct Pair* pair, void* (*body)(void*)) {
  open_stream(pair);
  shared = pair;
  pthread_t thread;
  start(&thread, body, 0);
  show("close", close(pair->stream));
  reuse(pair);
  tell(pair);
  join_thread(thread);
}

static void sender_inside(struct Pair* pair) { send_inside(pair, send_a_lot); }

static void read_it_all(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  sleep_ms(50);
  drain("drained", pair->stream);
}

/* sendfile is one call, however many pieces it takes. */
static void* send_a_file(void* index) {
  int file = (int)CHECKED(memfd_create("file", 0));
  uint8_t* bytes = malloc(kLot);
  fill_pattern(bytes, kLot, 0);
  if (write(file, bytes, kLot) != kLot) fail("no room for the file");
  free(bytes);
  CHECKED(lseek(file, 0, SEEK_SET));
  workers[(intptr_t)index] = gettid();
  show("sendfile", sendfile(shared->stream, file, NULL, kLot));
  close(file);
  return NULL;
}

static void file_sender_inside(struct Pair* pair) { send_inside(pair, send_a_file); }

/* poll looks its numbers up again when it wakes. */
static void* poll_one(void* index) {
  struct pollfd one = {shared->stream, POLLIN, 0};
  workers[(intptr_t)index] = gettid();
  int64_t began = now_ns();
  show("poll", poll(&one, 1, 5000));
  show_events("events", one.revents);
  say("at once: %s", ms_since(began) < 60 ? "YES" : "no");
  return NULL;
}

static void poller_inside(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  pthread_t thread;
  start(&thread, poll_one, 0);
  show("close", close(pair->stream));
  sleep_ms(80);
  tell(pair);
  join_thread(thread);
  tell(pair);
}

static void* poll_with_limit(void* index) {
  struct pollfd one = {shared->stream, POLLIN, 0};
  workers[(intptr_t)index] = gettid();
  show("poll", poll(&one, 1, 250));
  return NULL;
}

static void poll_limit_passes(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  pthread_t thread;
  start(&thread, poll_with_limit, 0);
  show("close", close(pair->stream));
  tell(pair);
  join_thread(thread);
}

/* The sleeper's own thread closes: its call is over, or begins again with the number. */
static void close_in_handler(int signal_number) {
  (void)signal_number;
  close(shared->stream);
}

static void own_handler(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  struct sigaction action = {.sa_handler = close_in_handler, .sa_flags = SA_RESTART};
  CHECKED(sigaction(SIGALRM, &action, NULL));
  struct itimerval soon = {{0, 0}, {0, 50000}};
  CHECKED(setitimer(ITIMER_REAL, &soon, NULL));
  char byte;
  show("recv", recv(pair->stream, &byte, 1, 0));
  tell(pair);
  await(pair);
}

static void drain_at_once(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  drain("drained", pair->stream);
  tell(pair);
}

static sigjmp_buf out;
static void leave_by_jump(int signal_number) {
  (void)signal_number;
  siglongjmp(out, 1);
}

static void jump_out(struct Pair* pair, bool in_poll) {
  open_stream(pair);
  signal(SIGALRM, leave_by_jump);
  struct itimerval soon = {{0, 0}, {0, 50000}};
  if (sigsetjmp(out, 1) == 0) {
    CHECKED(setitimer(ITIMER_REAL, &soon, NULL));
    char byte;
    struct pollfd one = {pair->stream, POLLIN, 0};
    if (in_poll) show("POLL", poll(&one, 1, -1));
    show("RECV", recv(pair->stream, &byte, 1, 0));
  }
  show("close", close(pair->stream));
  tell(pair);
  await(pair);
}
static void jump_out_of_recv(struct Pair* pair) { jump_out(pair, false); }
static void jump_out_of_poll(struct Pair* pair) { jump_out(pair, true); }

static const struct PairCase kCases[] = {
    {"two_inside", send_two, two_inside, true},
    {"wait_for_all", send_in_pieces, close_all_wanted, true},
    {"dup2_over", send_more, dup2_over, true},
    {"limit_passes", meet_the_end, limit_passes, true},
    {"cancelled", meet_the_end, cancelled, true},
    {"peer_ends", only_end, peer_ends, true},
    {"sender", read_it_all, sender_inside, true},
    {"file_sender", read_it_all, file_sender_inside, true},
    {"poller", send_more, poller_inside, true},
    {"poll_limit_passes", meet_the_end, poll_limit_passes, true},
    {"own_handler", drain_at_once, own_handler, true},
    {"jump_out_of_recv", drain_at_once, jump_out_of_recv, true},
    {"jump_out_of_poll", drain_at_once, jump_out_of_poll, true},
};
PAIR_MAIN(kCases)
