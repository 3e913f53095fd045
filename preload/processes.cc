// fork, vfork and exit; programs.cc has exec and spawn.
//
// clang-format off
//   call                        before                     parent afterwards   child
//   --------------------------  -------------------------  ------------------  ------------------------
//   fork, daemon, forkpty       prepare_fork (no handler   after_fork_parent   after_fork_child
//                               holds a lock yet), then
//                               before_fork (last handler)
//   _Fork; clone and syscall()  before_fork                after_fork_parent   after_fork_child
//   without CLONE_VM
//   vfork; clone with           before_spawn               nothing             leave_to_child, where it
//   CLONE_VM | CLONE_VFORK                                                     keeps a stream; else
//                                                                              nothing: it runs in its
//                                                                              parent's memory
//   posix_spawn*, system,       before_spawn               nothing             inside libc, unseen
//   popen
//   exec*                       before_exec, unless in a   after_failed_exec   the new program looks for
//                               child of vfork                                 streams when it is loaded
//   _exit, _Exit, quick_exit,   before_exit, unless in a   -                   -
//   exit (by a destructor)      child of vfork
// clang-format on
//
// forkpty and other forks inside libc meet the handlers only.
// A process that never started has no stream: all of these then go straight to libc. Another thread
// may start the library at any moment, so over a fork it is held back (begin_fork).
#include "preload/processes.h"

#include <linux/sched.h>
#include <linux/seccomp.h>

#include <optional>

#include "core/base/raw_syscall.h"
#include "core/base/thread_signals.h"
#include "preload/entry.h"
#include "preload/handlers.h"

namespace rsock::preload {
namespace {

void set_down_for_fork() noexcept {
  if (started() && own_process()) stream::prepare_fork();
}

/// With no thread of ours.
template <typename Call>
int alone(Call call) noexcept {
  if (!started() || !own_process()) return call();
  stream::before_unshare();
  const int result = call();
  const int saved_errno = errno;
  stream::after_unshare();
  errno = saved_errno;
  return result;
}

void in_forking_parent(bool failed) noexcept {
  if (fork_was_begun()) stream::after_fork_parent(failed);
  end_fork();
}

/// A fork without pthread_atfork's handlers. `call` returns in both processes.
template <typename Call>
long fork_unhandled(Call call) {
  before_any_fork();
  const long pid = outcome(call());
  if (pid == 0) {
    in_forked_child();
  } else {
    in_forking_parent(pid < 0);
  }
  return answer(pid);
}

/// The body of a cloned child. The parent's stack, where this lies, is copied with everything else.
struct ClonedChild {
  int (*body)(void*);
  void* arg;
};

int run_cloned_child(void* child) {
  in_forked_child();
  const auto* c = static_cast<const ClonedChild*>(child);
  const int status = c->body(c->arg);
  // libc ends this thread only, by a system call that no hook sees, and the process ends with its
  // last thread: that must not be the keeper.
  leave();
  if (started()) stream::before_thread_exit();
  return status;
}

}  // namespace

void before_any_fork() noexcept {
  if (begin_fork()) stream::before_fork();
}

void after_any_fork() noexcept {
  // The handlers are not told whether the fork failed: take it that there is a child.
  in_forking_parent(false);
}

void in_forked_child() noexcept {
  if (end_fork_in_child()) stream::after_fork_child();
  handlers_after_fork_child();
}

namespace {

/// The flags in clone3's structure. Nothing: the kernel will refuse it. It is read as the kernel
/// reads it, because the pointer may be bad.
std::optional<uint64_t> clone3_flags(const void* arguments, size_t size) noexcept {
  if (size < CLONE_ARGS_SIZE_VER0) return std::nullopt;
  uint64_t flags = 0;
  iovec to{&flags, sizeof(flags)};
  iovec from{const_cast<void*>(arguments), sizeof(flags)};  // they come first
  const long self = raw_syscall(SYS_getpid);
  const long n = raw_syscall(SYS_process_vm_readv, self, reinterpret_cast<long>(&to), 1,
                             reinterpret_cast<long>(&from), 1, 0);
  if (n == -EFAULT) return std::nullopt;
  // A sandbox may forbid that call.
  if (n != sizeof(flags)) flags = static_cast<const clone_args*>(arguments)->flags;
  return flags;
}

/// Whether a filter is to be set, not only asked whether there could be one.
bool sets_filter(long number, const long* w) noexcept {
  if (number == SYS_seccomp) {
    return w[0] == SECCOMP_SET_MODE_STRICT || (w[0] == SECCOMP_SET_MODE_FILTER && w[2] != 0);
  }
  return w[0] == PR_SET_SECCOMP &&
         (w[1] == SECCOMP_MODE_STRICT || (w[1] == SECCOMP_MODE_FILTER && w[2] != 0));
}

}  // namespace

long process_by_number(long number, const long* w) noexcept {
  const auto call = [&] { return real.syscall(number, w[0], w[1], w[2], w[3], w[4], w[5]); };
  if (number == SYS_seccomp) {
    if (sets_filter(number, w)) stand_back();
    return call();
  }
  uint64_t flags = SIGCHLD;
  if (number == SYS_clone) flags = static_cast<uint64_t>(w[0]);
  if (number == SYS_clone3) {
    const auto given = clone3_flags(reinterpret_cast<const void*>(w[0]), static_cast<size_t>(w[1]));
    if (!given) return call();
    flags = *given;
  }
  if ((flags & CLONE_VM) == 0) return fork_unhandled(call);
  if ((flags & CLONE_VFORK) != 0) set_down_for_child();
  lend_memory();
  return call();
}

/// What vfork's entry calls before it jumps. Returns where to.
extern "C" __attribute__((visibility("hidden"))) void* rsock_before_vfork() noexcept {
  set_down_for_child();
  lend_memory();
  return real_vfork();
}

}  // namespace rsock::preload

using namespace rsock;
using namespace rsock::preload;

RSOCK_EXPORT pid_t fork() noexcept {
  set_down_for_fork();
  return real.fork();
}

RSOCK_EXPORT pid_t _Fork() noexcept {
  return static_cast<pid_t>(fork_unhandled([] { return real._Fork(); }));
}

// vfork returns twice into the same frame: the child runs on, returns from any function of ours
// that called libc's vfork, and destroys that frame before the parent comes back to it. So there
// must be no frame: do our part, then jump, and let libc return to our caller, both times.
#if defined(__x86_64__)
asm(R"(
  .text
  .globl vfork
  .type vfork, @function
vfork:
  .cfi_startproc
  endbr64
  subq $8, %rsp
  .cfi_adjust_cfa_offset 8
  call rsock_before_vfork
  addq $8, %rsp
  .cfi_adjust_cfa_offset -8
  jmp *%rax
  .cfi_endproc
  .size vfork, . - vfork
  .globl __vfork
  .set __vfork, vfork
)");
#elif defined(__aarch64__)
asm(R"(
  .text
  .globl vfork
  .type vfork, %function
vfork:
  .cfi_startproc
  hint 34
  stp x29, x30, [sp, -16]!
  .cfi_adjust_cfa_offset 16
  bl rsock_before_vfork
  ldp x29, x30, [sp], 16
  .cfi_adjust_cfa_offset -16
  mov x16, x0
  br x16
  .cfi_endproc
  .size vfork, . - vfork
  .globl __vfork
  .set __vfork, vfork
)");
#endif

// libc declares clone variadic; the three words behind arg are always read.
RSOCK_EXPORT int rsock_clone(int (*body)(void*), void* stack, int flags, void* arg,
                             void* parent_tid, void* tls, void* child_tid) noexcept asm("clone");
RSOCK_EXPORT int rsock_clone(int (*body)(void*), void* stack, int flags, void* arg,
                             void* parent_tid, void* tls, void* child_tid) noexcept {
  if ((flags & CLONE_VM) != 0 || body == nullptr || stack == nullptr) {
    if ((flags & CLONE_VFORK) != 0) set_down_for_child();
    lend_memory();
    return real.clone(body, stack, flags, arg, parent_tid, tls, child_tid);
  }
  ClonedChild child{body, arg};
  return static_cast<int>(fork_unhandled([&] {
    return real.clone(run_cloned_child, stack, flags, &child, parent_tid, tls, child_tid);
  }));
}

RSOCK_EXPORT int daemon(int nochdir, int noclose) noexcept {
  set_down_for_fork();
  // libc puts /dev/null on 0, 1 and 2 without a call that we would see.
  for (int fd = 0; fd <= 2 && noclose == 0; ++fd) {
    if (FdTable::word(fd) != 0) (void)let_go(fd);
  }
  stream::after_close();  // the parent is gone behind it
  const int result = real.daemon(nochdir, noclose);
  // -1 may come from the parent, whose fork failed, or from the child.
  if (result == 0 && started() && own_process()) stream::after_daemon();
  return result;
}

RSOCK_EXPORT int login_tty(int fd) noexcept {
  for (int name = 0; name <= 2; ++name) {
    if (name != fd && FdTable::word(name) != 0) (void)let_go(name);
  }
  stream::after_close();
  return real.login_tty(fd);
}

// --- what a process does to itself -----------------------------------------------------------

// libc declares it variadic and always reads four words more.
RSOCK_EXPORT int rsock_prctl(int option, long a, long b, long c, long d) noexcept asm("prctl");
RSOCK_EXPORT int rsock_prctl(int option, long a, long b, long c, long d) noexcept {
  if (option == PR_SET_SECCOMP) [[unlikely]] {
    const long w[] = {option, a, b};
    if (sets_filter(SYS_prctl, w)) stand_back();
  }
  return real.prctl(option, a, b, c, d);
}

// The kernel refuses some namespaces to a process with several threads (unshare(2), setns(2)), and
// ours would be the second.
RSOCK_EXPORT int unshare(int flags) noexcept {
  constexpr int kAlone = CLONE_NEWUSER | CLONE_VM | CLONE_SIGHAND | CLONE_THREAD;
  if ((flags & kAlone) == 0) return real.unshare(flags);
  return alone([=] { return real.unshare(flags); });
}

RSOCK_EXPORT int setns(int fd, int kind) noexcept {
  return alone([=] { return real.setns(fd, kind); });
}

RSOCK_EXPORT void pthread_exit(void* result) {
  if (started() && own_process() && raw_syscall(SYS_gettid) == raw_syscall(SYS_getpid)) {
    stream::first_thread_ends();
  }
  real.pthread_exit(result);
  __builtin_unreachable();
}

// --- exit ------------------------------------------------------------------------------------

RSOCK_EXPORT void _exit(int status) {
  leave();
  real._exit(status);
  __builtin_unreachable();
}

RSOCK_EXPORT void quick_exit(int status) noexcept {
  leave();
  real.quick_exit(status);
  __builtin_unreachable();
}

RSOCK_SAME_BODY(_Exit, _exit);
RSOCK_SAME_BODY(__fork, fork);
extern "C" __attribute__((visibility("default"), alias("clone"))) int rsock_clone_(
    int (*)(void*), void*, int, void*, void*, void*, void*) noexcept asm("__clone");
