/* main() ends by pthread_exit while another thread goes on with a lifted stream: the process ends with
 * status 0 when that thread does, its exit handlers run, and its peer gets the end. */
#include "pair.h"

static struct Pair* the_pair;

static void at_exit(void) { say("exit handlers run"); }

static void* serve(void* unused) {
  (void)unused;
  sleep_ms(50); /* the first thread is gone by now */
  pong_as_server(the_pair->stream, 20);
  send_pattern(the_pair->stream, 200000, 0);
  say("last thread returns");
  return NULL;
}

static void end_first_thread(struct Pair* pair) {
  open_stream(pair);
  the_pair = pair;
  atexit(at_exit);
  pthread_t thread;
  start_thread(&thread, serve, NULL);
  tell(pair);
  pthread_exit(NULL);
}

static void stay(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  ping_as_client(pair->stream, 20);
  receive_pattern(pair->stream, 200000, 0);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"server", end_first_thread, stay, true},
    {"client", stay, end_first_thread, true},
};
PAIR_MAIN(kCases)
