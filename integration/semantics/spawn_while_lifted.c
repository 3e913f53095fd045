/* Starting another program while a stream is lifted disturbs neither: nothing of ours leaks into
 * the child, and the stream goes on. */
#include <spawn.h>

#include "pair.h"

extern char** environ;

/* The child counts its own descriptors: with the shim it must have as many as without. */
static char* const kCount[] = {"sh", "-c", "echo child has $(ls /proc/self/fd | wc -l) files",
                               NULL};

static void show_status(int status) {
  say("status: %s %d", WIFEXITED(status) ? "exit" : "signal",
      WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
}

static void wait_for(pid_t child) {
  int status = -1;
  CHECKED(waitpid(child, &status, 0));
  show_status(status);
}

static void by_popen(void) {
  FILE* child = popen(kCount[2], "r");
  if (child == NULL) fail("popen");
  char line[100] = "";
  if (fgets(line, sizeof(line), child) == NULL) fail("no line from the child");
  line[strcspn(line, "\n")] = '\0';
  say("%s", line);
  show_status(pclose(child));
  child = popen("cat >/dev/null", "w");
  fprintf(child, "hello\n");
  show_status(pclose(child));
}

static void by_spawn(bool with_actions) {
  pid_t child;
  posix_spawn_file_actions_t actions;
  CHECKED(posix_spawn_file_actions_init(&actions));
  if (with_actions) {
    CHECKED(posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0));
    CHECKED(posix_spawn_file_actions_addclosefrom_np(&actions, 3));
  }
  say("posix_spawn: %d", posix_spawnp(&child, "sh", &actions, NULL, kCount, environ));
  wait_for(child);
  say("of nothing: %s",
      strerrorname_np(posix_spawnp(&child, "/no/such/program", NULL, NULL, kCount, environ)));
  posix_spawn_file_actions_destroy(&actions);
}

static void by_vfork(void) {
  pid_t child = vfork();
  if (child == 0) {
    execvp("sh", kCount);
    _exit(127);
  }
  wait_for(child);
  child = vfork();
  if (child == 0) {
    close(0); /* in our memory, but not in our descriptor table */
    execl("/no/such/program", "none", NULL);
    _exit(127);
  }
  wait_for(child);
}

static void by_fork(bool close_all) {
  pid_t child = (pid_t)CHECKED(fork());
  if (child == 0) {
    for (int fd = 3; close_all && fd < 4096; ++fd) close(fd);
    execvp("sh", kCount);
    _exit(127);
  }
  wait_for(child);
}

static void start(const char* how) {
  if (strncmp(how, "cloexec_", 8) == 0) how += 8;
  if (strcmp(how, "system") == 0) show_status(system(kCount[2]));
  if (strcmp(how, "popen") == 0) by_popen();
  if (strcmp(how, "posix_spawn") == 0) by_spawn(false);
  if (strcmp(how, "posix_spawn_closefrom") == 0) by_spawn(true);
  if (strcmp(how, "vfork") == 0) by_vfork();
  if (strcmp(how, "fork_exec") == 0) by_fork(false);
  if (strcmp(how, "fork_close_all_exec") == 0) by_fork(true);
}

static void starter(struct Pair* pair) {
  open_stream(pair);
  if (strncmp(pair->variant, "cloexec_", 8) == 0) {
    CHECKED(fcntl(pair->stream, F_SETFD, FD_CLOEXEC));
  }
  for (int i = 0; i < 3; ++i) {
    start(pair->variant);
    ping_as_client(pair->stream, 8);
  }
  tell(pair);
  await(pair);
  start(pair->variant); /* while bytes wait unread */
  drain("drained", pair->stream);
}

static void peer(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 3 * 8);
  await(pair);
  send_pattern(pair->stream, 100000, 0);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  tell(pair);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"system", peer, starter, true},
    {"popen", starter, peer, true},
    {"posix_spawn", peer, starter, true},
    {"posix_spawn_closefrom", starter, peer, true},
    {"vfork", peer, starter, true},
    {"fork_exec", starter, peer, true},
    {"fork_close_all_exec", peer, starter, true},
    {"cloexec_system", starter, peer, true},
    {"cloexec_popen", peer, starter, true},
    {"cloexec_posix_spawn", starter, peer, true},
    {"cloexec_posix_spawn_closefrom", peer, starter, true},
    {"cloexec_vfork", starter, peer, true},
    {"cloexec_fork_exec", peer, starter, true},
};
PAIR_MAIN(kCases)
