/* syscall() with arguments that libc's own functions never pass: bad structures for clone3, time limits
 * that come back with what is left, descriptors passed in a raw sendmsg. */
#include <linux/sched.h>
#include <sys/syscall.h>

#include "pair.h"

static void bad_clone3(void) {
  static struct clone_args arguments = {.exit_signal = SIGCHLD};
  show("clone3 of nothing", syscall(SYS_clone3, NULL, sizeof(arguments)));
  show("clone3 of a bad pointer", syscall(SYS_clone3, (void*)-4096L, sizeof(arguments)));
  show("clone3 of an unmapped page", syscall(SYS_clone3, (void*)0x10000, sizeof(arguments)));
  show("clone3, short", syscall(SYS_clone3, &arguments, 8));
  const long pid = syscall(SYS_clone3, &arguments, sizeof(arguments));
  if (pid == 0) _exit(6);
  int status = -1;
  CHECKED(waitpid((pid_t)pid, &status, 0));
  say("clone3: %d", WEXITSTATUS(status));
}

static void time_left(struct Pair* pair) {
  struct pollfd p = {.fd = pair->stream, .events = POLLIN};
  struct timespec limit = {0, 20000000};
  show("ppoll", syscall(SYS_ppoll, &p, 1, &limit, NULL, 8));
  say("nothing left: %d", limit.tv_sec == 0 && limit.tv_nsec == 0);
  p.events = POLLOUT;
  limit = (struct timespec){100, 0};
  show("ppoll", syscall(SYS_ppoll, &p, 1, &limit, NULL, 8));
  say("much left, not all: %d", limit.tv_sec == 99 && limit.tv_nsec > 0);
  static const struct timespec kFixed = {0, 1000000}; /* in memory that can't be written */
  p.events = POLLIN;
  show("ppoll", syscall(SYS_ppoll, &p, 1, &kFixed, NULL, 8));
  fd_set set;
  FD_ZERO(&set);
  FD_SET(pair->stream, &set);
  limit = (struct timespec){0, 20000000};
  show("pselect6", syscall(SYS_pselect6, pair->stream + 1, &set, NULL, NULL, &limit, NULL));
  say("nothing left: %d", limit.tv_sec == 0 && limit.tv_nsec == 0);
}

static void pass_by_number(struct Pair* pair, int way) {
  int unix_pair[2];
  CHECKED(socketpair(AF_UNIX, SOCK_STREAM, 0, unix_pair));
  char byte = 'x';
  struct iovec iov = {&byte, 1};
  union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
  } control = {0};
  struct mmsghdr message = {.msg_hdr = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
                                        .msg_controllen = sizeof(control)}};
  struct cmsghdr* c = CMSG_FIRSTHDR(&message.msg_hdr);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(c), &pair->stream, sizeof(int));
  if (way == 0) show("sendmsg", syscall(SYS_sendmsg, unix_pair[0], &message.msg_hdr, 0));
  if (way == 1) show("sendmmsg", syscall(SYS_sendmmsg, unix_pair[0], &message, 1, 0));
  const pid_t pid = (pid_t)CHECKED(fork());
  if (pid == 0) { /* who got it writes; the sender of the descriptor has closed its own */
    CHECKED(recvmsg(unix_pair[1], &message.msg_hdr, 0));
    int fd;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message.msg_hdr)), sizeof(fd));
    send_pattern(fd, 5000, 0);
    _exit(0);
  }
  int status = -1;
  CHECKED(waitpid(pid, &status, 0));
  say("who got it: %d", status);
  send_pattern(pair->stream, 5000, 5000);
}

static void calls(struct Pair* pair) {
  open_stream(pair);
  time_left(pair);
  pass_by_number(pair, strstr(pair->variant, "sendmmsg") != NULL);
  bad_clone3();
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void peer(struct Pair* pair) {
  open_stream(pair);
  receive_pattern(pair->stream, 10000, 0);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"server_sendmsg", calls, peer, true},
    {"client_sendmsg", peer, calls, true},
    {"client_sendmmsg", peer, calls, true},
};
PAIR_MAIN(kCases)
