// What the interposer asks of a socket: the one door between preload/ and the rooms below it.
//
// Purpose: every intercepted call that concerns a descriptor of ours ends in one of these. preload/
// knows libc's names and errno; this header knows neither. A result is a value >= 0 or -errno. The
// KernelCall argument performs the program's own call, with its own arguments, through libc's real
// function (so that it stays a cancellation point) and returns value or -errno.
// Thread safety: all from any thread. Those marked (fork) only from the process family of hooks.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <type_traits>

#include "core/stream/fd_table.h"

namespace rsock::stream {

/// A reference to a callable `long()`: the program's own call. Valid during the call it is passed
/// to.
class KernelCall {
 public:
  template <typename F, typename = std::enable_if_t<!std::is_same_v<std::decay_t<F>, KernelCall>>>
  KernelCall(F&& f)  // NOLINT: implicit by design
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* o) -> long { return (*static_cast<std::remove_reference_t<F>*>(o))(); }) {}
  long operator()() const { return call_(object_); }

 private:
  void* object_;
  long (*call_)(void*);
};

// --- how descriptors come and go -----------------------------------------------------------------
/// socket() gave fd: TCP sockets are noted, all else is not ours.
void on_socket(int fd, int domain, int type, int protocol) noexcept;
/// connect() returned `result` on fd (0, or -errno; -EINPROGRESS and -EINTR go on in the
/// background), or a send with MSG_FASTOPEN did, which connected it and sent so many bytes.
void on_connect(int fd, long result) noexcept;
/// accept() or accept4() gave `fd` from `listener`. `flags` as for accept4.
void on_accept(int listener, int fd, int flags) noexcept;
/// `copy` is now another name of what `fd` is (dup, dup2, dup3, F_DUPFD*). If copy was open before,
/// call before_close(copy) first, under no circumstances afterwards.
void on_dup(int fd, int copy) noexcept;
/// The number fd is about to be closed or replaced. Everything the peer must get is handed over
/// here; afterwards the caller performs the real close, and calls after_close(). Waits only where
/// the process has no descriptor for what must follow. False: fd is internal to the library; the
/// call must answer EBADF and touch nothing.
bool before_close(int fd) noexcept;
/// Waits as SO_LINGER asks: the number is free meanwhile, as on Linux. Handlers of this thread run
/// behind it.
void after_close() noexcept;
/// [first, last] without our internal descriptors: calls `range(a, b)` for each gap. For
/// close_range and closefrom.
void for_each_program_range(unsigned first, unsigned last, void (*range)(unsigned, unsigned, void*),
                            void* arg) noexcept;

/// A function of a room above, or none yet. Set once or again to the same, by any thread.
template <typename Signature>
class Hook;
template <typename... A>
class Hook<void(A...)> {
 public:
  using Function = void (*)(A...) noexcept;
  // Relaxed, both: code was there before.
  void operator=(Function f) noexcept { function_.store(f, std::memory_order_relaxed); }
  Function get() const noexcept { return function_.load(std::memory_order_relaxed); }
  void operator()(A... arguments) const noexcept {
    if (const Function f = get(); f != nullptr) f(arguments...);
  }

 private:
  std::atomic<Function> function_{nullptr};
};

/// Set by core/poll, which stands above: an epoll descriptor of ours is about to be closed, or was
/// dup'ed.
extern Hook<void(void* instance, int fd)> g_epoll_close;
extern Hook<void(void* instance, int copy)> g_epoll_dup;
/// fd, a socket that may have been added to an instance before, is a stream from here on.
extern Hook<void(Stream& s, int fd)> g_epoll_adopt;
/// One of several numbers of a stream is about to be closed; the number still works.
extern Hook<void(Stream& s, int fd)> g_epoll_name_gone;
/// This thread is about to close the last number of s, and may have left a sleep in poll on it.
extern Hook<void(Stream& s)> g_poll_forget;
/// Over a fork: every instance and the memory of items locked, unlocked in the parent, made anew in
/// the child.
extern Hook<void()> g_epoll_lock;
extern Hook<void()> g_epoll_unlock;
extern Hook<void()> g_epoll_fork_child;

// --- data
// ------------------------------------------------------------------------------------------
/// While the direction is the kernel's: performs the call there, without a look at the program's
/// buffers and headers, which may be bad (EFAULT is the kernel's to find). Nothing: the direction
/// is managed, or the flags need more than the kernel; then gather the buffers and call send() or
/// recv(), which begin with this.
std::optional<long> send_by_kernel(Stream& s, int flags, KernelCall kernel);
std::optional<long> recv_by_kernel(Stream& s, int flags, KernelCall kernel);
/// The short way of a lifted stream for one short buffer: the bytes moved, or 0 when send() or
/// recv() has to see to it. Never blocks, never fails.
size_t send_short(Stream& s, const void* from, size_t n, int flags) noexcept;
size_t recv_short(Stream& s, void* to, size_t n, int flags) noexcept;
long send(Stream& s, int fd, const iovec* iov, size_t n, int flags, KernelCall kernel);
long recv(Stream& s, int fd, const iovec* iov, size_t n, int flags, KernelCall kernel);
/// What send() does with MSG_ZEROCOPY.
long send_zero_copy(Stream& s, int fd, const iovec* iov, size_t n, int flags, KernelCall kernel);
/// MSG_ERRQUEUE, whatever else is asked for. `msg` null: recv or recvfrom.
long recv_error_queue(Stream& s, int fd, msghdr* msg, int flags, KernelCall kernel);
/// sendfile to a stream. `offset` null: use and move in_fd's own position.
long sendfile(Stream& s, int fd, int in_fd, off_t* offset, size_t count, KernelCall kernel);
long shutdown(Stream& s, int fd, int how, KernelCall kernel);

// --- options and state --------------------------------------------------------------------------
/// FIONREAD (SIOCINQ), SIOCOUTQ, SIOCATMARK, FIONBIO; anything else goes to the kernel.
long ioctl(Stream& s, int fd, unsigned long request, void* arg, KernelCall kernel);
long getsockopt(Stream& s, int fd, int level, int name, void* value, socklen_t* len,
                KernelCall kernel);
long setsockopt(Stream& s, int fd, int level, int name, const void* value, socklen_t len,
                KernelCall kernel);
/// fcntl(F_SETFL, flags) succeeded.
void on_set_flags(Stream& s, int flags) noexcept;

// --- calls that need the kernel's stream
// ----------------------------------------------------------
/// The caller is about to do something to the stream that only the kernel can do, or that leaves
/// our sight (splice, fdopen, MSG_OOB, passing the descriptor by SCM_RIGHTS): sets the stream down,
/// and it stays on TCP for good. `reason` is a literal; it appears in the log and the summary.
/// Returns once the kernel's stream continues at the right byte: 0. Else bytes of ours are not out
/// yet because the peer does not read, and what sends now would overtake them. EAGAIN: the call may
/// not wait for it (O_NONBLOCK, SO_SNDTIMEO); EINTR: a handler without SA_RESTART ended the wait.
/// With `will_send` false it never waits for that. Any fd; 0 if it is not a stream.
int pin_to_tcp(int fd, const char* reason, bool will_send = true) noexcept;
/// sendmsg on a Unix socket, with descriptors in it: streams among them are set down, and for
/// whoever gets them it is written that they come (notes.h). The key of that, 0: no stream.
/// after_passing() takes it back where the message did not go.
uint32_t before_passing(const msghdr* msg) noexcept;
void after_passing(const msghdr* msg, uint32_t key, bool sent) noexcept;
/// recvmsg on a Unix socket gave these descriptors, or one of them; with MSG_PEEK it will once
/// more.
void on_descriptors_received(const msghdr* msg, bool peeked) noexcept;
void on_received(int fd, bool peeked = false) noexcept;
/// A stream has come to 0, 1 or 2, where libc reads and writes without a call that we would see.
void leave_to_stdio(int fd) noexcept;
/// This process has taken a lock that lives as long as an open file description (flock(2),
/// F_OFD_SETLK, F_SETLEASE): files are copied from then on, because what keeps a passed one
/// (shm/page_lane.h) would keep the lock. Any thread.
inline constinit std::atomic<bool> g_file_locks{false};

// --- processes
// ------------------------------------------------------------------------------------
/// Whether the caller's is the process that this memory belongs to, and not a child of vfork, which
/// has descriptors of its own: there nothing of ours may be closed, and no thread started. Set
/// once, before threads; without it: true.
void set_own_process(bool (*own)() noexcept) noexcept;
bool in_own_process() noexcept;

/// First thing in fork(), before any handler holds a lock: sets every stream down, so that the
/// peers can answer while the program's handlers run. before_fork() follows.
void prepare_fork() noexcept;
/// Before fork(): sets every stream down and takes the locks. after_fork_* in parent and child
/// release them. `child` streams may be lifted again once no other process holds them.
void before_fork() noexcept;
void after_fork_parent(bool failed) noexcept;
void after_fork_child() noexcept;
/// In the child of daemon(3): its parent is as good as gone.
void after_daemon() noexcept;
/// Before vfork, posix_spawn, system, popen: streams that the new program will have (a number
/// without FD_CLOEXEC, or one that `copied`, which may be null, says yes to) are set down and stay
/// on TCP. No locks stay held.
void before_spawn(bool (*copied)(int fd) = nullptr) noexcept;
/// In a child of vfork, which runs in its parent's memory: it is about to keep fd over its exec (by
/// a copy, or without FD_CLOEXEC). Set down and pinned, for the parent as well.
void leave_to_child(int fd) noexcept;
/// Before exec*: sets down every stream, and leaves those without FD_CLOEXEC to the new program,
/// which finds them by what is written on them (notes.h).
void before_exec() noexcept;
void after_failed_exec() noexcept;
/// Numbers below this one are looked at when a program begins.
inline constexpr int kMostInherited = 64;
/// In a program that has just begun: fd is a connection, which a program that had this library has
/// left to this process.
bool is_left_to_us(int fd) noexcept;
/// It is a stream of ours then. With `track` false nothing will be seen of what this program does
/// with it, and nobody lifts it any more.
void on_inherited(int fd, bool track) noexcept;
/// Before a seccomp filter: sets every stream down, for good; the keeper ends, the summary is
/// written. No system call of ours follows that the program did not ask for.
void before_sandbox() noexcept;
/// Before unshare and setns: sets every stream down and ends the keeper, so that the process has
/// only its own threads. Both come back when they are wanted.
void before_unshare() noexcept;
void after_unshare() noexcept;
/// The first thread ends alone (pthread_exit): the process ends with the last other one, and the
/// keeper is none.
void first_thread_ends() noexcept;
/// Behind before_exit(), where the last thread of the program ends by itself: the keeper ends
/// first.
void before_thread_exit() noexcept;
/// Before the process ends (exit, _exit, quick_exit, _Exit): flushes what a replay still owes and
/// writes the summary. Idempotent; may run in any thread, also while others run.
void before_exit() noexcept;

}  // namespace rsock::stream
