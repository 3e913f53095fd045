/* Threads that share a stream or a number: close in one while another waits, reuse of the number,
 * cancellation, a signal handler that sends, both ends in one process. */
#include <sys/time.h>

#include "pair.h"

static struct Pair* shared;
static volatile pid_t receiving_thread;

static void* receive_one(void* argument) {
  (void)argument;
  char byte;
  receiving_thread = gettid();
  show("recv", recv(shared->stream, &byte, 1, 0));
  return NULL;
}

/* Linux keeps the file alive for the thread that waits in it; later data still reaches that thread.
 */
static void close_while_waiting(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  pthread_t thread;
  start_thread(&thread, receive_one, NULL);
  sleep_ms(60);
  wait_until_asleep(receiving_thread);
  show("close", close(pair->stream));
  int reused = (int)CHECKED(open("/dev/null", O_RDWR));
  say("number reused: %d", reused == pair->stream);
  show("write to the new file", write(reused, "x", 1));
  tell(pair);
  join_thread(thread);
}

static void send_after_close(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  sleep_ms(50);
  show("send", send(pair->stream, "x", 1, MSG_NOSIGNAL));
  drain("drained", pair->stream);
}

static void* be_cancelled(void* argument) {
  (void)argument;
  char byte;
  recv(shared->stream, &byte, 1, 0);
  return NULL;
}

static void cancel_a_wait(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  pthread_t thread;
  void* result = NULL;
  start_thread(&thread, be_cancelled, NULL);
  sleep_ms(100);
  say("cancel: %d", pthread_cancel(thread));
  pthread_join(thread, &result);
  say("cancelled: %d", result == PTHREAD_CANCELED);
  ping_as_client(pair->stream, 8); /* no lock was left behind */
}

static void pong_8(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 8);
  drain("drained", pair->stream);
}

static volatile sig_atomic_t sent_by_handler;

static void send_in_handler(int signal_number) {
  (void)signal_number;
  int error = errno;
  if (send(shared->stream, "h", 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1) ++sent_by_handler;
  errno = error;
}

/* The handler sends on the stream that its own thread is just sending on. */
static void handler_sends(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  struct sigaction action = {.sa_handler = send_in_handler, .sa_flags = SA_RESTART};
  CHECKED(sigaction(SIGALRM, &action, NULL));
  struct itimerval often = {{0, 500}, {0, 500}};
  CHECKED(setitimer(ITIMER_REAL, &often, NULL));
  uint64_t total = 0;
  int64_t start = now_ns();
  while (ms_since(start) < 500) {
    static char block[3000];
    ssize_t n = send(pair->stream, block, sizeof(block), MSG_NOSIGNAL);
    if (n > 0) total += (uint64_t)n;
  }
  CHECKED(setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL));
  total += (uint64_t)sent_by_handler;
  say("handler sent: %s", sent_by_handler > 0 ? "some" : "NOTHING");
  CHECKED(send(pair->control, &total, sizeof(total), 0));
  CHECKED(shutdown(pair->stream, SHUT_WR));
  await(pair);
}

static void count_bytes(struct Pair* pair) {
  open_stream(pair);
  static char buffer[65536];
  uint64_t total = 0, expected = 0;
  ssize_t n;
  while ((n = recv(pair->stream, buffer, sizeof(buffer), 0)) > 0) total += (uint64_t)n;
  CHECKED(recv(pair->control, &expected, sizeof(expected), 0));
  say("every byte arrived: %s", total == expected ? "yes" : "NO");
  tell(pair);
}

static void* pong_in_thread(void* fd) {
  warm_up_as_server(*(int*)fd);
  return NULL;
}

static void both_ends_here(struct Pair* pair) {
  int listener = listen_on_loopback(pair, AF_INET, 5);
  int client = connect_to_server(pair);
  int server = (int)CHECKED(accept(listener, NULL, NULL));
  pthread_t thread;
  start_thread(&thread, pong_in_thread, &server);
  warm_up_as_client(client);
  join_thread(thread);
  send_pattern(client, 50000, 0);
  CHECKED(shutdown(client, SHUT_WR));
  drain("drained", server);
  send_pattern(server, 50000, 0);
  close(server);
  drain("drained", client);
}

static void only_meet(struct Pair* pair) { learn_address(pair); }

/* Sends from several threads never interleave inside one small send. */
static void* send_records(void* argument) {
  uint8_t record[64];
  memset(record, (int)(intptr_t)argument, sizeof(record));
  for (int i = 0; i < 2000; ++i) {
    if (send(shared->stream, record, sizeof(record), MSG_NOSIGNAL) != sizeof(record)) {
      fail("a short send of a small record");
    }
  }
  return NULL;
}

static void many_writers(struct Pair* pair) {
  open_stream(pair);
  shared = pair;
  pthread_t threads[4];
  for (int i = 0; i < 4; ++i) start_thread(&threads[i], send_records, (void*)(intptr_t)(i + 1));
  for (int i = 0; i < 4; ++i) join_thread(threads[i]);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  await(pair);
}

static void read_records(struct Pair* pair) {
  open_stream(pair);
  int counts[5] = {0}, torn = 0;
  uint8_t record[64];
  while (recv(pair->stream, record, sizeof(record), MSG_WAITALL) == sizeof(record)) {
    for (size_t i = 1; i < sizeof(record); ++i) torn += record[i] != record[0];
    if (record[0] < 5) ++counts[record[0]];
  }
  say("records: %d %d %d %d, torn bytes %d", counts[1], counts[2], counts[3], counts[4], torn);
  tell(pair);
}

static const struct PairCase kCases[] = {
    {"close_while_waiting", send_after_close, close_while_waiting, true},
    {"server_closes_while_waiting", close_while_waiting, send_after_close, true},
    {"cancel", pong_8, cancel_a_wait, true},
    {"handler_sends", count_bytes, handler_sends, true},
    {"both_ends_in_one_process", both_ends_here, only_meet, false, false, true},
    {"many_writers", read_records, many_writers, true},
};
PAIR_MAIN(kCases)
