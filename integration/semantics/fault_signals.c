/* SIGSEGV and SIGBUS stay the program's: its handlers, its stack for them, what it asks and is told,
 * and its end without one. */
#include <setjmp.h>
#include <sys/mman.h>

#include "pair.h"

static volatile int sink;
static char* bad;
static sigjmp_buf out;
static volatile sig_atomic_t handled;

static void* map(size_t size, int protection) {
  return mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void tell_action(const char* label, int signal_number) {
  struct sigaction now;
  CHECKED(sigaction(signal_number, NULL, &now));
  say("%s: %s, flags %x, blocks ALRM %d", label,
      now.sa_handler == SIG_DFL   ? "default"
      : now.sa_handler == SIG_IGN ? "ignored"
                                  : "a handler",
      (unsigned)now.sa_flags, sigismember(&now.sa_mask, SIGALRM));
}

static void bad_call(struct Pair* pair) {
  show("send of bad", send(pair->stream, bad, 100, MSG_NOSIGNAL));
}

static void leave(int signal_number, siginfo_t* info, void* context) {
  (void)context;
  char here;
  stack_t now;
  sigaltstack(NULL, &now);
  bool on_other = &here >= (char*)now.ss_sp && &here < (char*)now.ss_sp + now.ss_size;
  say("handler of %d: the address is right: %d, code %d, other stack: %d", signal_number,
      info->si_addr == bad, info->si_code, on_other);
  siglongjmp(out, 1);
}

static void count(int signal_number) {
  (void)signal_number;
  ++handled;
}

static void own_handler(struct Pair* pair) {
  open_stream(pair);
  bad = map(4096, PROT_NONE);
  tell_action("at first", SIGSEGV);
  tell_action("at first", SIGBUS);
  bad_call(pair);
  struct sigaction action = {.sa_sigaction = leave, .sa_flags = SA_SIGINFO};
  sigaddset(&action.sa_mask, SIGALRM);
  CHECKED(sigaction(SIGSEGV, &action, NULL));
  tell_action("set", SIGSEGV);
  bad_call(pair);
  if (sigsetjmp(out, 1) == 0) sink = *bad;
  bad_call(pair);
  static char stack[1 << 16];
  CHECKED(sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof(stack)}, NULL));
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
  CHECKED(sigaction(SIGSEGV, &action, NULL));
  if (sigsetjmp(out, 1) == 0) sink = *bad;
  tell_action("once", SIGSEGV);
  bad_call(pair);
  struct sigaction old;
  CHECKED(sigaction(SIGBUS, &(struct sigaction){.sa_handler = count}, &old));
  say("before: %s", old.sa_handler == SIG_DFL ? "default" : "SOMETHING");
  raise(SIGBUS);
  say("handled: %d", handled);
  bad_call(pair);
  sighandler_t before = signal(SIGBUS, SIG_IGN);
  say("signal gave: %s", before == count ? "the handler" : "SOMETHING");
  tell_action("ignored", SIGBUS);
  raise(SIGBUS);
  bad_call(pair);
  before = signal(SIGBUS, SIG_DFL);
  say("signal gave: %s", before == SIG_IGN ? "ignored" : "SOMETHING");
  tell_action("default", SIGBUS);
  action.sa_handler = SIG_DFL;
  action.sa_flags = SA_NODEFER | SA_RESTART;
  CHECKED(sigaction(SIGSEGV, &action, NULL));
  tell_action("default with flags", SIGSEGV);
  bad_call(pair);
  ping_as_client(pair->stream, 8);
}

static void pong_8(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 8);
}

/* Ends of children: what the parent sees. */
static void how_it_ends(const char* label, void (*body)(void)) {
  pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  CHECKED(waitpid(child, &status, 0));
  say("%s: %s %d, core %d", label, WIFSIGNALED(status) ? "signal" : "status",
      WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), WCOREDUMP(status) != 0);
}

static void touch(void) { sink = *bad; }
static void touch_ignoring(void) {
  signal(SIGSEGV, SIG_IGN);
  sink = *bad;
}
static void touch_blocking(void) {
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, NULL);
  sink = *bad;
}
static void touch_beyond(void) {
  int fd = memfd_create("short", 0);
  char* at = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
  sink = *at;
}
static void sent(void) { kill(getpid(), SIGSEGV); }
static void raised(void) { raise(SIGBUS); }
static void sent_and_ignored(void) {
  signal(SIGSEGV, SIG_IGN);
  kill(getpid(), SIGSEGV);
}
static void sent_and_blocked(void) {
  sigset_t one, due;
  sigemptyset(&one);
  sigaddset(&one, SIGSEGV);
  sigprocmask(SIG_BLOCK, &one, NULL);
  raise(SIGSEGV);
  sigpending(&due);
  say("pending: %d", sigismember(&due, SIGSEGV));
  sigprocmask(SIG_UNBLOCK, &one, NULL);
}
static int deeper(int depth) {
  volatile char block[4096];
  block[0] = (char)depth;
  return depth == 0 ? 0 : deeper(depth - 1) + block[0];
}
static void overflow(void) { sink = deeper(1 << 30); }

static void exec_ignoring(void) {
  signal(SIGBUS, SIG_IGN);
  execlp("sh", "sh", "-c", "kill -BUS $$; exit 7", NULL);
}
static void exec_default(void) { execlp("sh", "sh", "-c", "kill -SEGV $$; exit 7", NULL); }

static void ends(struct Pair* pair) {
  open_stream(pair);
  bad = map(4096, PROT_NONE);
  bad_call(pair);
  how_it_ends("touch", touch);
  how_it_ends("touch, ignoring", touch_ignoring);
  how_it_ends("touch, blocking", touch_blocking);
  how_it_ends("touch beyond a file", touch_beyond);
  how_it_ends("sent", sent);
  how_it_ends("raised", raised);
  how_it_ends("sent and ignored", sent_and_ignored);
  how_it_ends("sent and blocked", sent_and_blocked);
  how_it_ends("overflow", overflow);
  how_it_ends("exec, ignoring", exec_ignoring);
  how_it_ends("exec", exec_default);
  ping_as_client(pair->stream, 8);
}

static const struct PairCase kCases[] = {
    {"own_handler", pong_8, own_handler, true},
    {"ends", pong_8, ends, true},
};
PAIR_MAIN(kCases)
