// The program's signal handlers, kept out of the middle of our work (core/base/thread_signals.h).
//
// The kernel is given on_signal() in place of each handler; the program is told its own wherever it
// asks. SIGSEGV and SIGBUS have it always, because they also say that the program gave us a bad
// address (core/base/try_copy.h); what the program has set for them, be it nothing, happens for
// every other fault. A handler that is set in a way that nobody sees here (the bare system call) is
// called by the kernel directly and has no such protection; nothing else is different for it.

#include "preload/handlers.h"

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "core/base/config.h"
#include "core/base/mutex.h"
#include "core/base/thread_signals.h"
#include "core/base/try_copy.h"
#include "preload/entry.h"

namespace rsock::preload {
namespace {

constexpr int kSignals = 65;

// A word for each signal, so that on_signal() reads it whole: the handler's address, below bit 61,
// ...
constexpr uintptr_t kInfo = uintptr_t{1} << 63;     // SA_SIGINFO
constexpr uintptr_t kRestart = uintptr_t{1} << 62;  // SA_RESTART
constexpr uintptr_t kOnce = uintptr_t{1} << 61;     // SA_RESETHAND
constexpr uintptr_t kAddress = kOnce - 1;
constinit std::atomic<uintptr_t> g_words[kSignals] = {};
constinit Mutex g_mutex;  // changes of the table and the kernel's together

// SIGSEGV and SIGBUS without a handler of the program's, as it set them: SIG_DFL or SIG_IGN. Under
// g_mutex.
constinit struct sigaction g_faults[2] = {};

using Plain = void (*)(int);
using WithInfo = void (*)(int, siginfo_t*, void*);

constexpr uint64_t bit(int signal_number) { return uint64_t{1} << (signal_number - 1); }
// The fault of an instruction can't wait for a later one. 32 and 33 are glibc's own.
constexpr uint64_t kNeverBlocked = bit(SIGSEGV) | bit(SIGBUS) | bit(SIGFPE) | bit(SIGILL) |
                                   bit(SIGTRAP) | bit(SIGSYS) | bit(32) | bit(33);

/// Leaves the signal pending, for this thread, and everything blocked until the last unlock.
bool postpone(ThreadSignals& t, int signal_number, siginfo_t* info, void* context) noexcept {
  // The kernel's frame has 8 bytes of mask, the front of glibc's sigset_t.
  auto* mask = &static_cast<ucontext_t*>(context)->uc_sigmask;
  uint64_t before;
  memcpy(&before, mask, sizeof(before));
  const uint64_t blocked = before | ~kNeverBlocked | bit(signal_number);
  set_signal_mask(blocked, nullptr);
  // The kernel takes any si_code from a process that signals itself (kernel/signal.c,
  // do_rt_tgsigqueueinfo). A full queue (RLIMIT_SIGPENDING) refuses real-time signals.
  if (raw_syscall(SYS_rt_tgsigqueueinfo, raw_syscall(SYS_getpid), raw_syscall(SYS_gettid),
                  signal_number, reinterpret_cast<long>(info)) < 0) {
    return false;
  }
  // Two that come at once lie on top of each other: the upper one's frame blocks the lower one's
  // signal, the lower one's has what the program had.
  t.mask = t.postponed ? t.mask & before : before;
  t.postponed = true;
  memcpy(mask, &blocked, sizeof(blocked));
  return true;
}

void on_signal(int signal_number, siginfo_t* info, void* context) noexcept(false);

bool is_function(Plain handler) noexcept {
  return handler != SIG_DFL && handler != SIG_IGN && handler != SIG_ERR && handler != SIG_HOLD;
}

bool is_ours(const struct sigaction& action) noexcept {
  return action.sa_sigaction == static_cast<WithInfo>(&on_signal);
}

uintptr_t word_of(const struct sigaction& action) noexcept {
  uintptr_t word = reinterpret_cast<uintptr_t>(action.sa_handler) & kAddress;
  if ((action.sa_flags & SA_SIGINFO) != 0) word |= kInfo;
  if ((action.sa_flags & SA_RESTART) != 0) word |= kRestart;
  if ((action.sa_flags & static_cast<int>(SA_RESETHAND)) != 0) word |= kOnce;
  return word;
}

bool is_fault(int signal_number) noexcept {
  return signal_number == SIGSEGV || signal_number == SIGBUS;
}
struct sigaction& fault_action(int signal_number) noexcept {
  return g_faults[signal_number == SIGSEGV ? 0 : 1];
}
/// The word of a signal without a handler of the program's.
bool has_none(uintptr_t word) noexcept {
  return !is_function(reinterpret_cast<Plain>(word & kAddress));
}

struct sigaction covered(const struct sigaction& action) noexcept {
  struct sigaction ours = action;
  ours.sa_sigaction = &on_signal;
  ours.sa_flags |= SA_SIGINFO;
  // Ours to do (reset_to_default): a postponed signal comes twice.
  ours.sa_flags &= ~static_cast<int>(SA_RESETHAND);
  return ours;
}

void uncover_flags(struct sigaction& action, uintptr_t word) noexcept {
  if ((word & kInfo) == 0) action.sa_flags &= ~SA_SIGINFO;
  if ((word & kOnce) != 0) action.sa_flags |= static_cast<int>(SA_RESETHAND);
}

/// In place of no handler. The stack may be the one thing that is wrong.
struct sigaction covered_fault(const struct sigaction& action) noexcept {
  struct sigaction ours = covered(action);
  ours.sa_flags = (ours.sa_flags | SA_ONSTACK | SA_RESTART) & ~SA_NODEFER;
  return ours;
}

/// What the kernel does where there is no handler: ends the process, with the core of the very
/// instruction, which runs again; or ignores what was sent. (A fault is never ignored:
/// force_sig_info_to_task() in kernel/signal.c.)
void do_default(int signal_number, siginfo_t* info, uintptr_t word) noexcept {
  const bool fault = info->si_code > 0;
  if (!fault && reinterpret_cast<Plain>(word & kAddress) == SIG_IGN) return;
  const int saved_errno = errno;
  struct sigaction none {};
  none.sa_handler = SIG_DFL;
  (void)real.sigaction(signal_number, &none, nullptr);
  if (!fault) {  // pending, until this handler is over
    raw_syscall(SYS_rt_tgsigqueueinfo, raw_syscall(SYS_getpid), raw_syscall(SYS_gettid),
                signal_number, reinterpret_cast<long>(info));
  }
  errno = saved_errno;
}

/// SA_RESETHAND: the kernel puts the default in the handler's place, and leaves the flags.
void reset_to_default(int signal_number, uintptr_t word) noexcept {
  const int saved_errno = errno;
  struct sigaction now;
  if (real.sigaction(signal_number, nullptr, &now) == 0 && is_ours(now)) {
    now.sa_handler = SIG_DFL;
    uncover_flags(now, word);
    if (is_fault(signal_number)) {
      fault_action(signal_number) = now;
      g_words[signal_number].store(0, std::memory_order_release);
      now = covered_fault(now);
    }
    (void)real.sigaction(signal_number, &now, nullptr);
  }
  errno = saved_errno;
}

void call(uintptr_t word, int signal_number, siginfo_t* info, void* context) noexcept(false) {
  const uintptr_t address = word & kAddress;
  if ((word & kInfo) != 0) {
    reinterpret_cast<WithInfo>(address)(signal_number, info, context);
  } else {
    reinterpret_cast<Plain>(address)(signal_number);
  }
}

void on_signal(int signal_number, siginfo_t* info, void* context) noexcept(false) {
  // acquire: the flags are from the same store as the address.
  const uintptr_t word = g_words[signal_number].load(std::memory_order_acquire);
  if (is_fault(signal_number)) {
    if (info->si_code > 0 && recover_copy(context)) return;
    if (has_none(word)) return do_default(signal_number, info, word);
  }
  ThreadSignals& t = thread_signals();
  const bool never = (bit(signal_number) & kNeverBlocked) != 0;
  if (t.depth != 0 && !never && !standing_back()) {
    const int saved_errno = errno;
    const bool later = postpone(t, signal_number, info, context);
    errno = saved_errno;
    if (later) return;
  }
  if ((word & kOnce) != 0) reset_to_default(signal_number, word);
  ++t.ran;
  if ((word & kRestart) == 0) ++t.broke;
  // A fault in the middle of our work. Its handler may leave by siglongjmp, and the lock stays
  // held; but other handlers must not wait for its end.
  const int depth = std::exchange(t.depth, 0);
  // Its mask is another one (points.cc).
  std::atomic<uint32_t>& attention = call_state().attention;
  attention.fetch_or(CallState::kMaskUnknown, std::memory_order_relaxed);
  call(word, signal_number, info, context);
  attention.fetch_or(CallState::kMaskUnknown, std::memory_order_relaxed);
  t.depth = depth;
}

/// What the program set, in place of what the kernel has. `fault` is fault_action() of that time.
void uncover(struct sigaction& action, uintptr_t word, const struct sigaction& fault) noexcept {
  if (!is_ours(action)) return;
  if (has_none(word)) {
    action = fault;
    return;
  }
  action.sa_handler = reinterpret_cast<Plain>(word & kAddress);
  uncover_flags(action, word);
}

/// Puts on_signal() before what the kernel has now, and notes flags that have changed.
void adopt_locked(int signal_number) noexcept {
  struct sigaction now;
  if (real.sigaction(signal_number, nullptr, &now) != 0) return;
  const bool none = !is_function(now.sa_handler);
  if (none && !is_fault(signal_number)) return;
  std::atomic<uintptr_t>& word = g_words[signal_number];
  if (is_ours(now)) {
    const uintptr_t restart = (now.sa_flags & SA_RESTART) != 0 ? kRestart : 0;
    word.store((word.load(std::memory_order_relaxed) & ~kRestart) | restart,
               std::memory_order_release);
    return;
  }
  if (none) fault_action(signal_number) = now;
  word.store(word_of(now), std::memory_order_release);  // pairs with on_signal()
  const struct sigaction ours = none ? covered_fault(now) : covered(now);
  (void)real.sigaction(signal_number, &ours, nullptr);
}

/// Whether handlers are ours to stand before. A child of vfork has its own in the kernel, and our
/// table is its parent's.
bool in_charge(int signal_number) noexcept {
  return started() && config().enabled && signal_number > 0 && signal_number < kSignals &&
         own_process();
}

/// signal() and its kin: libc makes the action, we adopt it.
template <typename Call>
Plain set_handler(int signal_number, Call call) noexcept {
  if (!in_charge(signal_number)) return call();
  MutexLock lock(g_mutex);
  const uintptr_t before = g_words[signal_number].load(std::memory_order_relaxed);
  const Plain old = call();
  if (old == SIG_ERR) return old;
  const int saved_errno = errno;
  adopt_locked(signal_number);
  errno = saved_errno;
  const bool ours = reinterpret_cast<uintptr_t>(old) == reinterpret_cast<uintptr_t>(&on_signal);
  return ours ? reinterpret_cast<Plain>(before & kAddress) : old;
}

/// As the kernel would tell it later: libc adds where the handler returns to.
void note_fault(int signal_number, const struct sigaction& action) noexcept {
  struct sigaction& noted = fault_action(signal_number);
  noted = action;
#if defined(__x86_64__)
  constexpr int kRestorer = 0x04000000;  // SA_RESTORER
  noted.sa_flags |= kRestorer;
#endif
}

/// Where handlers are not ours to stand before. A child of vfork has what its parent had.
int sigaction_of_other(int signal_number, const struct sigaction* action,
                       struct sigaction* old) noexcept {
  const int result = real.sigaction(signal_number, action, old);
  if (result == 0 && old != nullptr && is_ours(*old)) {
    uncover(*old, g_words[signal_number].load(std::memory_order_acquire),
            fault_action(signal_number));
  }
  return result;
}

}  // namespace

void adopt_handlers() noexcept {
  if (!config().enabled) return;
  MutexLock lock(g_mutex);
  const int saved_errno = errno;
  for (int i = 1; i < kSignals; ++i) adopt_locked(i);
  errno = saved_errno;
}

void handlers_before_exec() noexcept {
  if (!started() || !config().enabled) return;
  for (const int fault : {SIGSEGV, SIGBUS}) {
    struct sigaction now;
    const uintptr_t word = g_words[fault].load(std::memory_order_acquire);
    if (reinterpret_cast<Plain>(word & kAddress) != SIG_IGN ||
        real.sigaction(fault, nullptr, &now) != 0 || !is_ours(now)) {
      continue;
    }
    now.sa_handler = SIG_IGN;
    (void)real.sigaction(fault, &now, nullptr);
  }
}

void handlers_in_forked_child() noexcept { g_mutex.reset_after_fork(); }

}  // namespace rsock::preload

using namespace rsock;
using namespace rsock::preload;

RSOCK_EXPORT int sigaction(int signal_number, const struct sigaction* action,
                           struct sigaction* old) noexcept {
  if (!in_charge(signal_number)) return sigaction_of_other(signal_number, action, old);
  MutexLock lock(g_mutex);
  std::atomic<uintptr_t>& word = g_words[signal_number];
  const uintptr_t before = word.load(std::memory_order_relaxed);
  const struct sigaction fault_before = fault_action(signal_number);
  struct sigaction ours;
  const struct sigaction* given = action;
  const bool function = action != nullptr && is_function(action->sa_handler);
  const bool none = action != nullptr && !function && is_fault(signal_number);
  if ((function && !is_ours(*action)) || none) {
    ours = none ? covered_fault(*action) : covered(*action);
    given = &ours;
    if (none) note_fault(signal_number, *action);
    word.store(word_of(*action), std::memory_order_release);  // pairs with on_signal()
  }
  const int result = real.sigaction(signal_number, given, old);
  if (result != 0) {
    word.store(before, std::memory_order_release);
    if (none) fault_action(signal_number) = fault_before;
  } else if (old != nullptr) {
    uncover(*old, before, fault_before);
  }
  return result;
}
RSOCK_SAME_BODY(__sigaction, sigaction);

RSOCK_EXPORT sighandler_t signal(int signal_number, sighandler_t handler) noexcept {
  return set_handler(signal_number, [=] { return real.signal(signal_number, handler); });
}
RSOCK_SAME_BODY(bsd_signal, signal);
RSOCK_SAME_BODY(ssignal, signal);

RSOCK_EXPORT sighandler_t sysv_signal(int signal_number, sighandler_t handler) noexcept {
  return set_handler(signal_number, [=] { return real.sysv_signal(signal_number, handler); });
}
RSOCK_SAME_BODY(__sysv_signal, sysv_signal);

RSOCK_EXPORT sighandler_t sigset(int signal_number, sighandler_t handler) noexcept {
  return set_handler(signal_number, [=] { return real.sigset(signal_number, handler); });
}

RSOCK_EXPORT int siginterrupt(int signal_number, int interrupt) noexcept {
  if (!in_charge(signal_number)) return real.siginterrupt(signal_number, interrupt);
  MutexLock lock(g_mutex);
  const int result = real.siginterrupt(signal_number, interrupt);
  const int saved_errno = errno;
  if (result == 0) adopt_locked(signal_number);
  errno = saved_errno;
  return result;
}
