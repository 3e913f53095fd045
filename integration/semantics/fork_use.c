/* A lifted stream after fork: used by the child, by the parent, by both in turn, and by a daemon.
 */
#include "pair.h"

enum { kRounds = 8, kPending = 30000 };

static bool is_variant(const struct Pair* pair, const char* name) {
  return strcmp(pair->variant, name) == 0;
}

/* Runs `body` in a child, waits for it, prints how it ended. */
static void in_child(void (*body)(struct Pair*), struct Pair* pair) {
  pid_t child = (pid_t)CHECKED(fork());
  if (child == 0) {
    body(pair);
    exit(0);
  }
  int status = -1;
  CHECKED(waitpid(child, &status, 0));
  say("child: %s %d", WIFEXITED(status) ? "exit" : "signal",
      WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
}

static void ping(struct Pair* pair) { ping_as_client(pair->stream, kRounds); }
static void do_nothing(struct Pair* pair) { (void)pair; }
static void exit_at_once(struct Pair* pair) {
  (void)pair;
  _exit(0);
}
static void close_stream(struct Pair* pair) { CHECKED(close(pair->stream)); }
static void read_first_half(struct Pair* pair) { receive_pattern(pair->stream, kPending / 2, 0); }

static void be_daemon(struct Pair* pair) {
  pid_t child = (pid_t)CHECKED(fork());
  if (child != 0) _exit(0);
  setsid();
  sleep_ms(50); /* the parents are gone */
  ping(pair);
  send_pattern(pair->stream, 100000, 0);
  tell(pair);
  _exit(0);
}

static void forker(struct Pair* pair) {
  open_stream(pair);
  if (is_variant(pair, "child_uses")) {
    in_child(ping, pair);
  } else if (is_variant(pair, "parent_uses")) {
    in_child(do_nothing, pair);
    ping(pair);
  } else if (is_variant(pair, "parent_uses_child_exits")) {
    in_child(exit_at_once, pair);
    ping(pair);
  } else if (is_variant(pair, "child_closes")) {
    in_child(close_stream, pair);
    ping(pair);
  } else if (is_variant(pair, "both_in_turn")) {
    for (int i = 0; i < 3; ++i) {
      ping(pair);
      in_child(ping, pair);
    }
  } else if (is_variant(pair, "pending_shared")) {
    await(pair); /* the peer has sent kPending bytes */
    in_child(read_first_half, pair);
    receive_pattern(pair->stream, kPending - kPending / 2, kPending / 2);
    say("both halves intact");
  } else if (is_variant(pair, "daemon")) {
    pid_t child = (pid_t)CHECKED(fork());
    if (child == 0) be_daemon(pair);
    CHECKED(waitpid(child, NULL, 0));
    return;
  } else if (is_variant(pair, "parent_exits_child_sends")) {
    pid_t child = (pid_t)CHECKED(fork());
    if (child != 0) return;
    sleep_ms(50);
    send_pattern(pair->stream, 200000, 0);
    _exit(0);
  }
  ping(pair);
  tell(pair);
  show("close", close(pair->stream));
}

static void peer(struct Pair* pair) {
  open_stream(pair);
  if (is_variant(pair, "both_in_turn")) pong_as_server(pair->stream, 6 * kRounds);
  if (is_variant(pair, "pending_shared")) {
    send_pattern(pair->stream, kPending, 0);
    tell(pair);
  }
  if (strncmp(pair->variant, "child_", 6) == 0) pong_as_server(pair->stream, kRounds);
  if (strncmp(pair->variant, "parent_uses", 11) == 0) pong_as_server(pair->stream, kRounds);
  if (!is_variant(pair, "parent_exits_child_sends")) {
    pong_as_server(pair->stream, kRounds);
    await(pair);
  }
  drain("drained", pair->stream);
}

/* Parent writes, child reads, at the same time, on one stream. */
static void split_directions(struct Pair* pair) {
  open_stream(pair);
  pid_t child = (pid_t)CHECKED(fork());
  if (child == 0) {
    receive_pattern(pair->stream, 3 << 20, 0);
    _exit(0);
  }
  send_pattern(pair->stream, 3 << 20, 0);
  int status = -1;
  CHECKED(waitpid(child, &status, 0));
  say("child: %d", status);
  ping(pair);
}

static void* send_3_mib(void* stream) {
  send_pattern(*(int*)stream, 3 << 20, 0);
  return NULL;
}

static void both_directions(struct Pair* pair) {
  open_stream(pair);
  pthread_t thread;
  start_thread(&thread, send_3_mib, &pair->stream);
  receive_pattern(pair->stream, 3 << 20, 0);
  join_thread(thread);
  pong_as_server(pair->stream, kRounds);
  say("3 MiB intact");
}

static const struct PairCase kCases[] = {
    {"child_uses", peer, forker, true},
    {"child_closes", forker, peer, true},
    {"parent_uses", forker, peer, true},
    {"parent_uses_child_exits", peer, forker, true},
    {"both_in_turn", forker, peer, true},
    {"pending_shared", peer, forker, true},
    {"daemon", forker, peer, true},
    {"parent_exits_child_sends", peer, forker, true},
    {"split_directions", both_directions, split_directions, true},
};
PAIR_MAIN(kCases)
