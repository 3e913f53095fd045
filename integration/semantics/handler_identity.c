/* Who asks for its signal handlers is told what it set, and a handler gets what the kernel gave. */
#include <setjmp.h>
#include <ucontext.h>

#include "pair.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#pragma GCC diagnostic ignored "-Wcast-function-type"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wrestrict"
#endif

static volatile int plain_calls, info_calls, last_value, last_code, on_alternate;
static volatile pid_t last_pid;
static char alternate[64 << 10];
static sigjmp_buf out;

static void plain(int number) {
  (void)number;
  ++plain_calls;
}

static void other(int number) { (void)number; }

static void with_info(int number, siginfo_t* info, void* context) {
  char here;
  (void)number;
  ++info_calls;
  last_value = info->si_value.sival_int;
  last_code = info->si_code;
  last_pid = info->si_pid;
  on_alternate = &here >= alternate && &here < alternate + sizeof(alternate);
  if (context == NULL) fail("no context");
}

static void jumps(int number) { siglongjmp(out, number); }

static const char* name_of(void (*handler)(int)) {
  return handler == SIG_DFL    ? "default"
         : handler == SIG_IGN  ? "ignored"
         : handler == SIG_ERR  ? "error"
         : handler == SIG_HOLD ? "hold"
         : handler == plain    ? "plain"
         : handler == other    ? "other"
         : handler == jumps    ? "jumps"
         : (void*)handler == (void*)with_info ? "with_info" : "a stranger";
}

static void show_action(const char* label, int number) {
  struct sigaction now;
  CHECKED(sigaction(number, NULL, &now));
  say("%s: %s flags %x mask %d", label, name_of(now.sa_handler),
      (unsigned)now.sa_flags & ~0x04000000u /* SA_RESTORER */, sigismember(&now.sa_mask, SIGUSR2));
}

static void ask_all(void) {
  struct sigaction action = {.sa_handler = plain, .sa_flags = SA_RESTART}, old;
  sigaddset(&action.sa_mask, SIGUSR2);
  CHECKED(sigaction(SIGUSR1, &action, NULL));
  show_action("set", SIGUSR1);
  raise(SIGUSR1);
  say("plain %d", plain_calls);

  action.sa_sigaction = with_info;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  stack_t stack = {.ss_sp = alternate, .ss_size = sizeof(alternate)};
  CHECKED(sigaltstack(&stack, NULL));
  CHECKED(sigaction(SIGUSR1, &action, &old));
  say("replaced: %s %x", name_of(old.sa_handler), (unsigned)old.sa_flags & ~0x04000000u);
  CHECKED(sigqueue(getpid(), SIGUSR1, (union sigval){.sival_int = 1234}));
  say("info %d value %d code %d from me %d on alternate %d", info_calls, last_value, last_code,
      last_pid == getpid(), on_alternate);
  CHECKED(sigaction(SIGUSR1, &old, &old)); /* the same structure, in and out */
  say("swapped: %s", name_of((void (*)(int))old.sa_sigaction));
  show_action("back", SIGUSR1);

  say("signal: %s", name_of(signal(SIGUSR1, other)));
  show_action("signal", SIGUSR1);
  say("sysv: %s", name_of(sysv_signal(SIGUSR1, plain)));
  show_action("sysv", SIGUSR1);
  raise(SIGUSR1);
  show_action("once", SIGUSR1);
  say("sigset: %s", name_of(sigset(SIGUSR1, plain)));
  say("sigset: %s", name_of(sigset(SIGUSR1, SIG_HOLD)));
  say("sigset: %s", name_of(sigset(SIGUSR1, other)));
  say("ignore: %s", name_of(signal(SIGUSR1, SIG_IGN)));
  show_action("ignored", SIGUSR1);
  say("default: %s", name_of(signal(SIGUSR1, SIG_DFL)));
  signal(SIGUSR1, plain);
  CHECKED(siginterrupt(SIGUSR1, 1));
  show_action("interrupts", SIGUSR1);
  CHECKED(siginterrupt(SIGUSR1, 0));
  show_action("restarts", SIGUSR1);

  signal(SIGUSR1, jumps);
  int jumped = sigsetjmp(out, 1);
  if (jumped == 0) raise(SIGUSR1);
  say("jumped %d", jumped == SIGUSR1);

  show("bad number", sigaction(65, NULL, &old));
  show("SIGKILL", sigaction(SIGKILL, &action, NULL));
  show("libc's own", sigaction(32, NULL, &old));
  signal(SIGSEGV, jumps);
  jumped = sigsetjmp(out, 1);
  if (jumped == 0) *(volatile int*)16 = 1;
  say("fault %d", jumped == SIGSEGV);
  signal(SIGSEGV, SIG_DFL);
  show_action("inherited", SIGTERM);
}

/* Half of them are set before the first connection, and half after it. */
static void asks(struct Pair* pair) {
  signal(SIGTERM, other);
  ask_all();
  open_stream(pair);
  show_action("kept", SIGTERM);
  ask_all();
  pid_t child = (pid_t)CHECKED(fork());
  if (child == 0) {
    ask_all();
    _exit(0);
  }
  int status;
  CHECKED(waitpid(child, &status, 0));
  say("child %x", (unsigned)status);
  child = (pid_t)CHECKED(vfork());
  if (child == 0) {
    signal(SIGTERM, SIG_DFL);
    _exit(0);
  }
  CHECKED(waitpid(child, &status, 0));
  show_action("after vfork", SIGTERM);
}

static void peer(struct Pair* pair) { open_stream(pair); }

static const struct PairCase kCases[] = {{"server", asks, peer, true}, {"client", peer, asks, true}};
PAIR_MAIN(kCases)
