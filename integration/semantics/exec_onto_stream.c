/* A program that knows nothing of us (cat) is exec'ed onto a lifted stream as its input and output,
 * with bytes waiting unread in it; with the shim in its environment and without. */
#include <spawn.h>

#include "pair.h"

extern char** environ;

static bool has(const struct Pair* pair, const char* word) {
  return strstr(pair->variant, word) != NULL;
}

static void become_cat(struct Pair* pair) {
  CHECKED(dup2(pair->stream, 0));
  CHECKED(dup2(pair->stream, 1));
  if (has(pair, "without_shim")) unsetenv("LD_PRELOAD");
  execlp("cat", "cat", NULL);
  _exit(127);
}

static void spawn_cat(struct Pair* pair) {
  posix_spawn_file_actions_t actions;
  CHECKED(posix_spawn_file_actions_init(&actions));
  CHECKED(posix_spawn_file_actions_adddup2(&actions, pair->stream, 0));
  CHECKED(posix_spawn_file_actions_adddup2(&actions, pair->stream, 1));
  if (has(pair, "without_shim")) unsetenv("LD_PRELOAD");
  pid_t child;
  char* const arguments[] = {"cat", NULL};
  say("posix_spawn: %d", posix_spawnp(&child, "cat", &actions, NULL, arguments, environ));
  CHECKED(close(pair->stream));
  int status = -1;
  CHECKED(waitpid(child, &status, 0));
  say("cat: %d", status);
}

/* The stream has FD_CLOEXEC until the child of vfork, in its parent's memory, copies it. */
static void vfork_cat(struct Pair* pair) {
  CHECKED(fcntl(pair->stream, F_SETFD, FD_CLOEXEC));
  const bool by_flag = has(pair, "by_flag");
  char* arguments[] = {"sh", "-c", NULL, NULL};
  char command[100];
  snprintf(command, sizeof(command), by_flag ? "exec cat <&%d >&%d" : "exec cat", pair->stream,
           pair->stream);
  arguments[2] = command;
  pid_t child = vfork();
  if (child == 0) {
    if (by_flag) {
      fcntl(pair->stream, F_SETFD, 0);
    } else {
      dup2(pair->stream, 0);
      dup2(pair->stream, 1);
    }
    execv("/bin/sh", arguments);
    _exit(127);
  }
  CHECKED(close(pair->stream));
  int status = -1;
  CHECKED(waitpid(child, &status, 0));
  say("cat: %d", status);
}

static void server(struct Pair* pair) {
  open_stream(pair);
  if (has(pair, "cloexec")) CHECKED(fcntl(pair->stream, F_SETFD, FD_CLOEXEC));
  receive_pattern(pair->stream, 1000, 0); /* part of what comes; the rest is for cat */
  tell(pair);
  await(pair);
  if (has(pair, "vfork")) {
    vfork_cat(pair);
    return;
  }
  if (has(pair, "spawn")) {
    spawn_cat(pair);
    return;
  }
  pid_t child = has(pair, "fork") ? (pid_t)CHECKED(fork()) : 0;
  if (child == 0) become_cat(pair);
  CHECKED(close(pair->stream));
  int status = -1;
  CHECKED(waitpid(child, &status, 0));
  say("cat: %d", status);
}

static const struct PairCase kCases[] = {
    {"exec", server, be_echoed, true, true}, {"exec_without_shim", server, be_echoed, true, true},
    {"fork_exec", server, be_echoed, true},  {"fork_exec_without_shim", server, be_echoed, true},
    {"spawn", server, be_echoed, true},      {"spawn_without_shim", server, be_echoed, true},
    {"cloexec_spawn", server, be_echoed, true},
    {"cloexec_fork_exec", server, be_echoed, true},
    {"vfork_exec", server, be_echoed, true},
    {"vfork_by_flag_exec", server, be_echoed, true},
};
PAIR_MAIN(kCases)
