/* A process that goes elsewhere while its stream is lifted: to another root, another directory, a name space
 * it is in already, a /tmp that is gone. It goes on, and lifts new streams. */
#include <sched.h>

#include "pair.h"

static bool is(const struct Pair* pair, const char* name) { return strcmp(pair->variant, name) == 0; }

static void go_away(struct Pair* pair) {
  char folder[] = "root.XXXXXX";
  if (mkdtemp(folder) == NULL) fail("mkdtemp");
  if (is(pair, "chroot")) {
    show("chroot", chroot(folder));
    show("chdir", chdir("/"));
    show("no /proc", open("/proc/self/fd", O_RDONLY));
  } else if (is(pair, "chdir")) {
    show("chdir", chdir(folder));
    char here[4096];
    if (getcwd(here, sizeof(here)) == NULL) fail("getcwd");
    show("rmdir", rmdir(here)); /* it stands in a directory that is gone */
    setenv("TMPDIR", "/no/such/folder", 1);
  } else if (is(pair, "setns")) {
    int fd = (int)CHECKED(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
    show("setns", setns(fd, CLONE_NEWNET)); /* where it is already */
    close(fd);
    fd = (int)CHECKED(open("/proc/self/ns/ipc", O_RDONLY | O_CLOEXEC));
    show("setns", setns(fd, CLONE_NEWIPC));
    close(fd);
  } else if (is(pair, "new_mounts")) {
    show("unshare", unshare(CLONE_NEWNS | CLONE_NEWUTS));
  } else {
    show("setgid", setresgid(65534, 65534, 65534));
    show("setuid", setresuid(65534, 65534, 65534));
  }
}

static void goes(struct Pair* pair) {
  open_stream(pair);
  go_away(pair);
  ping_as_client(pair->stream, 16);
  send_pattern(pair->stream, 300000, 0);
  if (!is(pair, "other_user")) {
    int old = pair->stream;
    open_stream(pair); /* a new one */
    uint64_t carried = tcp_carried(pair->stream);
    ping_as_client(pair->stream, 8);
    show_lifted("a new stream", pair->stream, carried);
    CHECKED(close(old));
  }
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void stays(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 16);
  receive_pattern(pair->stream, 300000, 0);
  if (!is(pair, "other_user")) {
    int old = pair->stream;
    open_stream(pair);
    pong_as_server(pair->stream, 8);
    drain("old one", old);
  }
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"chroot", stays, goes, true, true}, /* its summary would be written there */
    {"chdir", goes, stays, true},
    {"setns", stays, goes, true},
    {"new_mounts", goes, stays, true},
    {"other_user", goes, stays, true, true}, /* who may not write into the folder of the summary */
};
PAIR_MAIN(kCases)
