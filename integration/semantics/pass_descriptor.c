/* SCM_RIGHTS carries a lifted stream, with bytes waiting in it, to a process that goes on with it.
 */
#include "pair.h"

enum { kPending = 5000, kRounds = 8 };

/* The process that the stream is passed to: reads what waits, echoes, gives it back if asked. */
static int heir(int channel) {
  int fd = receive_fd(channel);
  receive_pattern(fd, kPending, 0);
  say("heir: pending bytes intact");
  pong_as_server(fd, kRounds);
  send_fd(channel, fd);
  close(fd);
  return 0;
}

static int start_heir(struct Pair* pair) {
  int ends[2];
  CHECKED(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
  pid_t child = (pid_t)CHECKED(fork());
  if (child != 0) {
    close(ends[1]);
    return ends[0];
  }
  close(ends[0]);
  if (strstr(pair->variant, "forked") != NULL) exit(heir(ends[1]));
  if (strstr(pair->variant, "without_shim") != NULL) unsetenv("LD_PRELOAD");
  char number[16];
  snprintf(number, sizeof(number), "%d", ends[1]);
  execl("/proc/self/exe", "heir", "heir", number, NULL);
  _exit(127);
}

static void passer(struct Pair* pair) {
  int channel = start_heir(pair);
  open_stream(pair);
  await(pair); /* kPending bytes wait in the stream */
  send_fd(channel, pair->stream);
  bool keeps = strstr(pair->variant, "keeps") != NULL;
  if (!keeps) CHECKED(close(pair->stream));
  int back = receive_fd(channel);
  if (!keeps) pair->stream = back;
  int status = -1;
  CHECKED(wait(&status));
  say("heir ended: %d", status);
  pong_as_server(pair->stream, kRounds);
  if (keeps) close(back);
  pong_as_server(pair->stream, kRounds);
  show("close", close(pair->stream));
}

static void peer(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, kPending, 0);
  sleep_ms(20);
  tell(pair);
  ping_as_client(pair->stream, 3 * kRounds);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"to_forked_heir", passer, peer, true},
    {"to_forked_heir_keeps", peer, passer, true},
    {"to_other_program", peer, passer, true},
    {"to_other_program_keeps", passer, peer, true},
    {"to_program_without_shim", passer, peer, true},
    {"to_program_without_shim_keeps", peer, passer, true},
};

int main(int argc, char** argv) {
  if (argc == 3 && strcmp(argv[1], "heir") == 0) return heir(atoi(argv[2]));
  return pair_main(argc, argv, kCases, sizeof(kCases) / sizeof(*kCases));
}
