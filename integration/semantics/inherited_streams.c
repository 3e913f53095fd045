/* A program goes on with a stream that another one has opened: it was exec'ed onto it, as inetd does, or got
 * it through a Unix socket. Where nobody else has it any more it is lifted again. */
#include "pair.h"

enum { kPending = 5000, kUnread = 3000, kBlock = 1000, kRounds = 40 };

/* ---- the traffic of both ends: blocks there and back, until neither end's TCP moves ---- */

static void read_block(int fd, uint8_t* block, size_t size) {
  for (size_t got = 0; got < size;) {
    ssize_t n = read(fd, block + got, size - got);
    if (n <= 0) fail("read: %zd after %zu of %zu: %s", n, got, size, strerrorname_np(errno));
    got += (size_t)n;
  }
}

static void write_block(int fd, const uint8_t* block, size_t size) {
  for (size_t sent = 0; sent < size;) {
    ssize_t n = write(fd, block + sent, size - sent);
    if (n <= 0) fail("write: %zd: %s", n, strerrorname_np(errno));
    sent += (size_t)n;
  }
}

/* Answers as many rounds as the other end wants. Each says of its TCP whether it stood still since the last. */
static void answer_rounds(int in, int out) {
  uint8_t block[kBlock];
  uint64_t before = 0;
  bool last = false;
  while (!last) {
    read_block(in, block, kBlock);
    last = block[0] != 0;
    const uint64_t now = tcp_carried(in);
    block[0] = now == before;
    before = now;
    write_block(out, block, kBlock);
  }
}

static void ask_rounds(const char* label, int fd, bool lift_due) {
  uint8_t block[kBlock], back[kBlock];
  const int64_t start = now_ns();
  bool lifted = false, last = false;
  const bool judged = lift_due && lift_limit_ms() != 0;
  for (int round = 0; !last; ++round) {
    last = round >= kRounds && (!judged || lifted || ms_since(start) > lift_limit_ms());
    fill_pattern(block, kBlock, (uint64_t)round * kBlock);
    block[0] = last;
    const uint64_t before = tcp_carried(fd);
    write_block(fd, block, kBlock);
    read_block(fd, back, kBlock);
    if (memcmp(block + 1, back + 1, kBlock - 1) != 0) fail("%s: round %d came back otherwise", label, round);
    /* Behind the last round the other end goes on with something else. */
    if (!last) lifted = back[0] != 0 && tcp_carried(fd) == before;
    if (round >= kRounds) sleep_ms(1);
  }
  say("%s: %s", label, lifted || !judged ? "where it belongs" : "STILL ON TCP");
}

static bool has(const struct Pair* pair, const char* word) { return strstr(pair->variant, word) != NULL; }

/* ---- the program that gets the stream ---- */

/* It has used calls so far. Now libc writes and reads by itself, between calls. */
static void print_and_read(void) {
  CHECKED(write(1, "by a call, ", 11));
  printf("by printf, ");
  fputs("by fputs, ", stdout);
  fflush(stdout);
  fprintf(stderr, "to stderr, ");
  CHECKED(write(2, "by a call", 9));
  putchar('\n');
  fflush(stdout);
  char line[100];
  while (fgets(line, sizeof(line), stdin) != NULL) printf("read: %s", line);
  puts("that is all");
  fflush(stdout);
}

/* As git does: lines by stdio, data by calls, lines again. */
static void mix(int in, int out) {
  for (int i = 0; i < 3; ++i) {
    printf("part %d comes\n", i);
    fflush(stdout);
    answer_rounds(in, out);
    printf("part %d ends.\n", i);
    fflush(stdout);
  }
}

static int heir(const char* what, int in, int out, int report) {
  learn_lift_limit();
  uint8_t pending[kPending];
  if (strstr(what, "pending") != NULL) {
    read_block(in, pending, kPending);
    if (!pattern_holds(pending, kPending, 0)) fail("pending bytes");
  }
  if (strstr(what, "mixes") != NULL) mix(in, out);
  answer_rounds(in, out);
  if (strstr(what, "prints") != NULL) print_and_read();
  uint8_t byte;
  const ssize_t end = read(in, &byte, 1);
  CHECKED(dup2(report, 1));
  say("heir: end %zd", end);
  return 0;
}

static void become_heir(const char* what, int stream, bool stdio) {
  const int report = (int)CHECKED(fcntl(1, F_DUPFD, 40));
  char in[16], out[16], rest[16];
  if (stdio) {
    for (int number = 0; number <= 2; ++number) CHECKED(dup2(stream, number));
    CHECKED(close(stream));
  } else {
    CHECKED(fcntl(stream, F_SETFD, 0));
  }
  snprintf(in, sizeof(in), "%d", stdio ? 0 : stream);
  snprintf(out, sizeof(out), "%d", stdio ? 1 : stream);
  snprintf(rest, sizeof(rest), "%d", report);
  execl("/proc/self/exe", "heir", "heir", what, in, out, rest, NULL);
  _exit(127);
}

/* ---- exec ---- */

static void exec_onto(struct Pair* pair) {
  const bool cold = has(pair, "cold");
  if (cold) {
    open_cold_stream(pair);
  } else {
    open_stream(pair);
    await(pair); /* kPending bytes wait here */
    send_pattern(pair->stream, kUnread, 0);
  }
  const bool stdio = has(pair, "stdio");
  if (has(pair, "inetd")) {
    const pid_t child = (pid_t)CHECKED(fork());
    if (child == 0) become_heir(pair->variant, pair->stream, stdio);
    CHECKED(close(pair->stream));
    int status = -1;
    CHECKED(waitpid(child, &status, 0));
    say("child: %d", status);
    return;
  }
  if (has(pair, "failed")) {
    CHECKED(fcntl(pair->stream, F_SETFD, 0));
    show("exec of nothing", execl("/nowhere/nothing", "nothing", NULL));
  }
  if (has(pair, "twice")) {
    char self[4096];
    const ssize_t size = CHECKED(readlink("/proc/self/exe", self, sizeof(self) - 1));
    self[size] = '\0';
    char command[5000];
    CHECKED(fcntl(pair->stream, F_SETFD, 0));
    snprintf(command, sizeof(command), "exec %s heir %s %d %d 1", self, pair->variant, pair->stream, pair->stream);
    execl("/bin/sh", "sh", "-c", command, NULL);
    _exit(127);
  }
  become_heir(pair->variant, pair->stream, stdio);
}

static void friend_of_exec(struct Pair* pair) {
  if (has(pair, "cold")) {
    open_cold_stream(pair);
  } else {
    open_stream(pair);
    send_pattern(pair->stream, kPending, 0);
    tell(pair);
    sleep_ms(50); /* it becomes another program meanwhile */
    receive_pattern(pair->stream, kUnread, 0);
  }
  for (int i = 0; has(pair, "mixes") && i < 3; ++i) {
    uint8_t line[14];
    read_block(pair->stream, line, sizeof(line) - 1);
    say("line: %.12s", line);
    ask_rounds("in between", pair->stream, false);
    read_block(pair->stream, line, sizeof(line) - 1);
    say("line: %.12s", line);
  }
  ask_rounds("lifted again", pair->stream, !has(pair, "stdio"));
  if (has(pair, "prints")) {
    CHECKED(write(pair->stream, "first line\nsecond line\n", 23));
    CHECKED(shutdown(pair->stream, SHUT_WR));
    char text[500];
    size_t size = 0;
    ssize_t n;
    while (size < sizeof(text) - 1 && (n = read(pair->stream, text + size, sizeof(text) - 1 - size)) > 0) size += (size_t)n;
    text[size] = '\0';
    say("text: %s, then %zd", text, n);
  }
  show("close", close(pair->stream));
}

/* The parent goes on with its copy, in turn with what it forked and that one exec'ed. */
static void exec_in_turn(struct Pair* pair) {
  open_stream(pair);
  const pid_t child = (pid_t)CHECKED(fork());
  if (child == 0) become_heir(pair->variant, pair->stream, has(pair, "stdio"));
  await(pair); /* the child has answered */
  answer_rounds(pair->stream, pair->stream);
  CHECKED(close(pair->stream));
  int status = -1;
  CHECKED(waitpid(child, &status, 0));
  say("child: %d", status);
}

static int heir_in_turn(int in, int out, int report) {
  learn_lift_limit();
  for (int i = 0; i < 2; ++i) answer_rounds(in, out);
  CHECKED(dup2(report, 1));
  say("heir: both");
  return 0;
}

static void friend_in_turn(struct Pair* pair) {
  open_stream(pair);
  ask_rounds("the child", pair->stream, false);
  tell(pair);
  /* Whoever reads first answers: one end of the stream, two processes. */
  ask_rounds("either", pair->stream, false);
  ask_rounds("the other", pair->stream, false);
  drain("drained", pair->stream);
}

/* ---- SCM_RIGHTS ---- */

/* Started before the stream is there: it can only get it through the socket. */
static int worker(const char* what, int channel) {
  learn_lift_limit();
  const int fd = receive_fd(channel);
  if (strstr(what, "in_turn") != NULL) {
    char turn;
    for (int i = 0; i < 3; ++i) {
      answer_rounds(fd, fd);
      CHECKED(write(channel, "t", 1));
      if (read(channel, &turn, 1) != 1) fail("no turn");
    }
  }
  uint8_t pending[kPending];
  if (strstr(what, "pending") != NULL) {
    read_block(fd, pending, kPending);
    if (!pattern_holds(pending, kPending, 0)) fail("pending bytes");
  }
  answer_rounds(fd, fd);
  uint8_t byte;
  say("worker: end %zd", read(fd, &byte, 1));
  return 0;
}

static pid_t start_worker(struct Pair* pair, int* channel) {
  int ends[2];
  CHECKED(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
  const pid_t child = (pid_t)CHECKED(fork());
  if (child != 0) {
    CHECKED(close(ends[1]));
    *channel = ends[0];
    return child;
  }
  CHECKED(close(ends[0]));
  char number[16];
  snprintf(number, sizeof(number), "%d", ends[1]);
  execl("/proc/self/exe", "worker", "worker", pair->variant, number, NULL);
  _exit(127);
}

static void pass_on(struct Pair* pair) {
  int channel;
  const pid_t child = start_worker(pair, &channel);
  if (has(pair, "pending")) {
    open_stream(pair);
    await(pair);
  } else {
    open_cold_stream(pair);
  }
  send_fd(channel, pair->stream);
  for (int i = 0; has(pair, "in_turn") && i < 3; ++i) {
    char turn;
    if (read(channel, &turn, 1) != 1) fail("no turn");
    answer_rounds(pair->stream, pair->stream);
    if (i == 2) CHECKED(close(pair->stream));
    CHECKED(write(channel, "t", 1));
  }
  if (!has(pair, "in_turn")) CHECKED(close(pair->stream));
  int status = -1;
  CHECKED(waitpid(child, &status, 0));
  say("worker: %d", status);
}

static void friend_of_passing(struct Pair* pair) {
  if (has(pair, "pending")) {
    open_stream(pair);
    send_pattern(pair->stream, kPending, 0);
    tell(pair);
  } else {
    open_cold_stream(pair);
  }
  for (int i = 0; has(pair, "in_turn") && i < 6; ++i) ask_rounds("in turn", pair->stream, false);
  ask_rounds("lifted by the last", pair->stream, !has(pair, "stdio"));
  show("close", close(pair->stream));
}

static const struct PairCase kCases[] = {
    {"exec_pending", exec_onto, friend_of_exec, true, true},
    {"exec_pending_stdio", exec_onto, friend_of_exec, true, true},
    {"client_execs_pending_stdio", friend_of_exec, exec_onto, true, true},
    {"exec_cold_stdio", exec_onto, friend_of_exec, false, true},
    {"client_execs_cold", friend_of_exec, exec_onto, true, true},
    {"exec_failed_pending", exec_onto, friend_of_exec, true, true},
    {"exec_twice_pending", exec_onto, friend_of_exec, true, true},
    {"client_execs_twice_pending", friend_of_exec, exec_onto, true, true},
    {"exec_pending_stdio_prints", exec_onto, friend_of_exec, true, true},
    {"client_inetd_cold_stdio_prints", friend_of_exec, exec_onto, false, true},
    {"exec_pending_stdio_mixes", exec_onto, friend_of_exec, true, true},
    {"client_inetd_cold_stdio_mixes", friend_of_exec, exec_onto, false, true},
    {"inetd_cold_stdio", exec_onto, friend_of_exec, false, true},
    {"inetd_pending_stdio", exec_onto, friend_of_exec, true, true},
    {"client_inetd_pending", friend_of_exec, exec_onto, true, true},
    {"exec_in_turn", exec_in_turn, friend_in_turn, true, true},
    {"client_execs_in_turn_stdio", friend_in_turn, exec_in_turn, true, true},
    {"pass_cold", pass_on, friend_of_passing, true, true},
    {"pass_pending", pass_on, friend_of_passing, true, true},
    {"client_passes_pending", friend_of_passing, pass_on, true, true},
    {"pass_in_turn", pass_on, friend_of_passing, true, true},
};

int main(int argc, char** argv) {
  if (argc == 6 && strcmp(argv[1], "heir") == 0) {
    const int in = atoi(argv[3]), out = atoi(argv[4]), report = atoi(argv[5]);
    if (strstr(argv[2], "in_turn") != NULL) return heir_in_turn(in, out, report);
    return heir(argv[2], in, out, report);
  }
  if (argc == 4 && strcmp(argv[1], "worker") == 0) return worker(argv[2], atoi(argv[3]));
  return pair_main(argc, argv, kCases, sizeof(kCases) / sizeof(*kCases));
}
