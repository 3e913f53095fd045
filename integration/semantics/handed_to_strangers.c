/* A lifted stream, with bytes unread in it, is handed to a program that the library can't reach: a static one,
 * one that makes system calls of its own, one with io_uring, a set-uid one; and two that never use libc for
 * their sockets at all meet somebody who does. */
#include <libgen.h>
#include <sys/syscall.h>

#include "pair.h"
#include "raw_call.h"

static bool has(const struct Pair* pair, const char* word) { return strstr(pair->variant, word) != NULL; }

/* The echo that this test was built with, beside it. */
static void path_of_echo(const struct Pair* pair, char* path, size_t size) {
  char self[3000] = "";
  CHECKED(readlink("/proc/self/exe", self, sizeof(self) - 1));
  snprintf(path, size, "%s/handed/raw_echo%s", dirname(self), has(pair, "static") ? "_static" : "");
}

/* A copy that belongs to nobody in particular and changes to that user: for a caller who is somebody else
 * this is what set-uid means (AT_SECURE), and the linker ignores a preload that has a path. */
static void make_setuid(char* path) {
  char command[8192];
  snprintf(command, sizeof(command),
           "cp %s ./setuid_echo && chown 65534 ./setuid_echo && chmod 4755 ./setuid_echo", path);
  if (system(command) != 0) fail("a set-uid copy: this has to be root's");
  strcpy(path, "./setuid_echo");
}

static void hand_over(struct Pair* pair) {
  char path[4096];
  path_of_echo(pair, path, sizeof(path));
  if (has(pair, "setuid")) make_setuid(path);
  open_stream(pair);
  receive_pattern(pair->stream, 1000, 0); /* part of what comes; the rest is for the echo */
  tell(pair);
  await(pair);
  pid_t child = has(pair, "exec") ? 0 : (pid_t)CHECKED(fork());
  if (child == 0) {
    CHECKED(dup2(pair->stream, 0));
    CHECKED(dup2(pair->stream, 1));
    execl(path, path, has(pair, "uring") ? "uring" : "calls", NULL);
    _exit(127);
  }
  CHECKED(close(pair->stream));
  int status = -1;
  CHECKED(waitpid(child, &status, 0));
  say("echo: %d", status);
}

/* Sockets, connection and data without libc: nothing of it can be lifted, and all of it works. */
static void connect_raw(struct Pair* pair) {
  learn_address(pair);
  static uint8_t block[4096];
  long fd = raw_call(SYS_socket, AF_INET, SOCK_STREAM, 0, 0, 0, 0);
  show("connect", raw_call(SYS_connect, fd, (long)&pair->address, pair->address_size, 0, 0, 0));
  for (int i = 0; i < 100; ++i) {
    fill_pattern(block, sizeof(block), (uint64_t)i * sizeof(block));
    for (size_t done = 0; done < sizeof(block);) {
      long n = raw_call(SYS_write, fd, (long)block + (long)done, (long)(sizeof(block) - done), 0, 0, 0);
      if (n <= 0) fail("write %ld", n);
      done += (size_t)n;
    }
    for (size_t done = 0; done < sizeof(block);) {
      long n = raw_call(SYS_recvfrom, fd, (long)block + (long)done, (long)(sizeof(block) - done), 0, 0, 0);
      if (n <= 0) fail("recvfrom %ld", n);
      done += (size_t)n;
    }
    if (!pattern_holds(block, sizeof(block), (uint64_t)i * sizeof(block))) fail("echo %d differs", i);
  }
  show("close", raw_call(SYS_close, fd, 0, 0, 0, 0, 0));
  int number = (int)CHECKED(open("/dev/null", O_RDWR)); /* the number that the kernel gives again */
  say("the same number: %d", number == fd);
  show("write", write(number, block, 10));
}

static void echo_100(struct Pair* pair) {
  static uint8_t block[4096];
  open_cold_stream(pair);
  for (int i = 0; i < 100; ++i) {
    CHECKED(recv(pair->stream, block, sizeof(block), MSG_WAITALL));
    CHECKED(send(pair->stream, block, sizeof(block), 0));
  }
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"static", hand_over, be_echoed, true},
    {"exec_static", hand_over, be_echoed, true, true},
    {"raw_calls", hand_over, be_echoed, true},
    {"uring", hand_over, be_echoed, true},
    {"exec_uring", hand_over, be_echoed, true, true},
    {"setuid", hand_over, be_echoed, true},
    {"only_raw_calls", echo_100, connect_raw, false},
};

PAIR_MAIN(kCases)
