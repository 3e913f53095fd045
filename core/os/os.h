// The system calls that core may use, behind one injectable door.
//
// Purpose: core/ never calls libc's socket functions (they are what we intercept). It asks the
// kernel through `os::door`, which in production is raw_syscall and in tests a function that
// records, refuses or fakes single calls. The wrappers below are the whole list: adding one is a
// decision. Thread safety: the door is set before threads start (tests) and read afterwards.
// Errors: wrappers return Result<T>; the Errno is the kernel's. EINTR is handed to the caller.
#pragma once

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>

#include <cstddef>
#include <cstdint>

#include "core/base/result.h"

namespace rsock::os {

using Door = long (*)(long nr, long a, long b, long c, long d, long e, long f) noexcept;

/// Where every wrapper goes. Production: the kernel. Tests may install another one; restore it.
void set_door(Door door) noexcept;
Door door() noexcept;

Result<int> open(const char* path, int flags, unsigned mode) noexcept;
Result<size_t> read(int fd, void* buf, size_t n) noexcept;
Result<size_t> write(int fd, const void* buf, size_t n) noexcept;
Result<size_t> pread(int fd, void* buf, size_t n, off_t offset) noexcept;
/// pread() of what the page cache has: EAGAIN or less where it would read the disk, EOPNOTSUPP where
/// the file can't tell (RWF_NOWAIT of preadv2(2)).
Result<size_t> pread_cached(int fd, void* buf, size_t n, off_t offset) noexcept;
Result<size_t> readv(int fd, const iovec* iov, size_t n) noexcept;
/// Up to n bytes of a file, from `offset` on. Waits for the file's medium. SIGPIPE as write(2).
Result<size_t> sendfile(int out, int file, off_t offset, size_t n) noexcept;
Result<off_t> lseek(int fd, off_t offset, int whence) noexcept;
Result<size_t> recv(int fd, void* buf, size_t n, int flags) noexcept;
Result<size_t> send(int fd, const void* buf, size_t n, int flags) noexcept;
Result<size_t> sendto(int fd, const void* buf, size_t n, int flags, const sockaddr* to,
                      socklen_t to_len) noexcept;
Result<size_t> sendmsg(int fd, const msghdr* msg, int flags) noexcept;
Result<size_t> recvmsg(int fd, msghdr* msg, int flags) noexcept;
Result<int> socket(int domain, int type, int protocol) noexcept;
Result<void> bind(int fd, const sockaddr* addr, socklen_t len) noexcept;
Result<void> listen(int fd, int backlog) noexcept;
Result<void> connect(int fd, const sockaddr* addr, socklen_t len) noexcept;
Result<int> accept4(int fd, int flags) noexcept;
Result<void> shutdown(int fd, int how) noexcept;
Result<void> close(int fd) noexcept;
Result<int> dup3(int fd, int onto, int flags) noexcept;
Result<int> fcntl(int fd, int cmd, long arg = 0) noexcept;
Result<int> ioctl_int(int fd, unsigned long request) noexcept;
Result<void> getsockname(int fd, sockaddr* addr, socklen_t* len) noexcept;
Result<void> getpeername(int fd, sockaddr* addr, socklen_t* len) noexcept;
Result<void> getsockopt(int fd, int level, int name, void* value, socklen_t* len) noexcept;
Result<void> setsockopt(int fd, int level, int name, const void* value, socklen_t len) noexcept;
/// Nobody can send descriptors to this Unix socket any more (SO_PASSRIGHTS, since Linux 6.16).
/// False: the kernel does not know that.
bool refuse_descriptors(int fd) noexcept;

/// An int-valued option, the common case.
Result<int> getsockopt_int(int fd, int level, int name) noexcept;
/// A 64-bit one of SOL_SOCKET: cookies.
Result<uint64_t> getsockopt_u64(int fd, int name) noexcept;

/// SO_NETNS_COOKIE of a socket; 0 where the kernel has none.
uint64_t netns_cookie(int fd) noexcept;

/// poll(2)'s events of one descriptor that hold now; 0 also on an error.
short poll_now(int fd, short events) noexcept;
/// sigmask may be null. timeout null: for ever. The kernel updates *timeout.
Result<int> ppoll(pollfd* fds, size_t n, timespec* timeout, const void* sigmask,
                  size_t sigmask_size) noexcept;
Result<int> epoll_create(int flags) noexcept;
Result<void> epoll_ctl(int epfd, int op, int fd, epoll_event* event) noexcept;
Result<void> epoll_add(int epfd, int fd, uint32_t events, uint64_t data) noexcept;
Result<int> epoll_wait(int epfd, epoll_event* events, int max, int timeout_ms) noexcept;
/// timeout null: for ever (epoll_pwait2, Linux 5.11; falls back to milliseconds rounded up).
Result<int> epoll_pwait2(int epfd, epoll_event* events, int max, const timespec* timeout,
                         const void* sigmask, size_t sigmask_size) noexcept;
Result<int> eventfd(unsigned initial, int flags) noexcept;
/// ends[0] reads, ends[1] writes.
Result<void> pipe2(int* ends, int flags) noexcept;

Result<int> memfd_create(const char* name, unsigned flags) noexcept;
Result<void> ftruncate(int fd, off_t size) noexcept;
Result<off_t> file_size(int fd) noexcept;
/// MAP_SHARED, read and write, from offset 0.
Result<void*> map_shared(int fd, size_t size) noexcept;
/// MAP_SHARED | MAP_ANONYMOUS: memory that stays common to a process and its forked children.
Result<void*> map_anonymous_shared(size_t size) noexcept;
/// MAP_PRIVATE, to be read, from an offset that is a multiple of the page size. What lies beyond the
/// file's end, or is cut off later, gives SIGBUS.
Result<void*> map_file(int fd, off_t offset, size_t size) noexcept;
/// Address space that costs memory only where it is touched (MAP_NORESERVE), zeroed.
Result<void*> map_private_reserved(size_t size) noexcept;
void unmap(void* addr, size_t size) noexcept;

/// FUTEX_WAIT on a word that other processes may share. timeout null: for ever, and then a signal
/// whose handler has SA_RESTART restarts the wait while any other gives EINTR; with a timeout a
/// handled signal always gives EINTR. That is recv(2)'s rule exactly: signal(7) and kernel/futex.
/// EAGAIN: the word was not `expected`.
Result<void> futex_wait(const void* word, uint32_t expected, const timespec* timeout) noexcept;
void futex_wake(const void* word, int count) noexcept;

Result<size_t> readlink(const char* path, char* out, size_t n) noexcept;
Result<size_t> getrandom(void* buf, size_t n) noexcept;
int getpid() noexcept;
/// Lets SIGPIPE, which the calling thread blocks, go by if it is pending.
void forget_sigpipe() noexcept;
/// Sends the signal to the calling thread, as the kernel does with SIGPIPE.
void raise_here(int signal) noexcept;
int geteuid() noexcept;
uint64_t rlimit_nofile_soft() noexcept;

}  // namespace rsock::os
