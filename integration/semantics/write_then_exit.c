/* What a process has written reaches its peer, however the process ends right after the write. */
#include <spawn.h>

#include "pair.h"

enum { kBytes = 150 << 10 }; /* fits into the buffers of TCP: the writer never waits */

static void* exit_the_thread(void* argument) {
  (void)argument;
  sleep_ms(20);
  exit(7);
}

static void write_then_end(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, kBytes, 0);
  const char* how = pair->variant;
  if (strcmp(how, "exit") == 0) exit(3);
  if (strcmp(how, "_exit") == 0) _exit(4);
  if (strcmp(how, "quick_exit") == 0) quick_exit(5);
  if (strcmp(how, "sigkill") == 0) kill(getpid(), SIGKILL);
  if (strcmp(how, "sigterm") == 0) kill(getpid(), SIGTERM);
  if (strcmp(how, "abort") == 0) {
    signal(SIGABRT, SIG_DFL);
    abort();
  }
  if (strcmp(how, "exec") == 0) execl("/bin/true", "true", NULL);
  if (strcmp(how, "exit_in_thread") == 0) {
    pthread_t thread;
    start_thread(&thread, exit_the_thread, NULL);
    for (;;) pause();
  }
  /* return_from_main: the caller does */
}

static void read_all(struct Pair* pair) {
  open_stream(pair);
  sleep_ms(100); /* the writer is gone before the first read */
  drain("drained", pair->stream);
  show("recv again", recv(pair->stream, &(char){0}, 1, 0));
}

static const struct PairCase kCases[] = {
    {"return_from_main", read_all, write_then_end, true},
    {"exit", write_then_end, read_all, true},
    {"_exit", read_all, write_then_end, true},
    {"quick_exit", write_then_end, read_all, true},
    {"exit_in_thread", read_all, write_then_end, true},
    {"exec", read_all, write_then_end, true, true},
    {"sigterm", write_then_end, read_all, true},
    {"abort", read_all, write_then_end, true},
    {"sigkill", read_all, write_then_end, true},
};
PAIR_MAIN(kCases)
