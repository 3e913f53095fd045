/* A process that forbids itself nearly every system call, or asks for a namespace that the kernel gives
 * to processes of one thread only: both while its stream is lifted and before it has one. */
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "pair.h"

#define ALLOW(name)                                                     \
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

/* What the roles below call themselves; anything else kills the process. */
static struct sock_filter kFilter[] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    ALLOW(read), ALLOW(write), ALLOW(sendto), ALLOW(recvfrom), ALLOW(shutdown), ALLOW(close),
    ALLOW(exit_group), ALLOW(rt_sigreturn), ALLOW(clock_nanosleep), ALLOW(poll), ALLOW(brk),
    ALLOW(mmap), ALLOW(munmap), ALLOW(futex), ALLOW(socket), ALLOW(connect), ALLOW(accept),
    ALLOW(accept4), ALLOW(setsockopt), ALLOW(getsockname), ALLOW(bind), ALLOW(listen),
    ALLOW(getpid), ALLOW(fcntl), ALLOW(sendmsg), ALLOW(recvmsg), ALLOW(writev), ALLOW(newfstatat),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
};

static void forbid(bool by_number) {
  const struct sock_fprog program = {sizeof(kFilter) / sizeof(*kFilter), kFilter};
  CHECKED(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
  /* Is there such a thing? Nothing changes by asking. */
  show("asked", syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, NULL));
  show("forbidden", by_number ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)
                              : prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0));
}

static void talk(struct Pair* pair) {
  for (int i = 0; i < 100; ++i) {
    receive_pattern(pair->stream, 100, (uint64_t)i * 100);
    send_pattern(pair->stream, 100, (uint64_t)i * 100);
  }
  send_pattern(pair->stream, 100000, 0);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void answer(struct Pair* pair) {
  for (int i = 0; i < 100; ++i) {
    send_pattern(pair->stream, 100, (uint64_t)i * 100);
    receive_pattern(pair->stream, 100, (uint64_t)i * 100);
  }
  receive_pattern(pair->stream, 100000, 0);
  send_pattern(pair->stream, 10, 0);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void forbid_lifted(struct Pair* pair) {
  open_stream(pair);
  forbid(false);
  talk(pair);
}

static void forbid_lifted_by_number(struct Pair* pair) {
  open_stream(pair);
  forbid(true);
  talk(pair);
}

static void forbid_after_connection(struct Pair* pair) {
  open_cold_stream(pair);
  forbid(false);
  talk(pair);
}

static void forbid_first(struct Pair* pair) {
  forbid(false);
  open_cold_stream(pair);
  talk(pair);
}

static void warm_answer(struct Pair* pair) {
  open_stream(pair);
  answer(pair);
}

static void cold_answer(struct Pair* pair) {
  open_cold_stream(pair);
  answer(pair);
}

static void ask_for_namespaces(struct Pair* pair) {
  open_stream(pair);
  show("unshare of files", unshare(CLONE_FS));
  show("unshare of the user namespace", unshare(CLONE_NEWUSER));
  talk(pair);
}

static const struct PairCase kCases[] = {
    {"filter_on_server", forbid_lifted, warm_answer, true},
    {"filter_on_client", warm_answer, forbid_lifted, true},
    {"filter_by_number", forbid_lifted_by_number, warm_answer, true},
    {"filter_after_accept", forbid_after_connection, cold_answer, false},
    {"filter_after_connect", cold_answer, forbid_after_connection, false},
    {"filter_first", cold_answer, forbid_first, false},
    {"user_namespace_on_server", ask_for_namespaces, warm_answer, true},
    {"user_namespace_on_client", warm_answer, ask_for_namespaces, true},
};
PAIR_MAIN(kCases)
