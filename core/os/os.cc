#include "core/os/os.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "core/base/raw_syscall.h"

namespace rsock::os {
namespace {

long kernel(long nr, long a, long b, long c, long d, long e, long f) noexcept {
  return raw_syscall(nr, a, b, c, d, e, f);
}

constinit Door g_door = &kernel;

template <typename T>
long word(T v) noexcept {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<long>(v);
  } else {
    return static_cast<long>(v);
  }
}

template <typename... A>
long ask(long nr, A... args) noexcept {
  long w[6] = {word(args)...};
  return g_door(nr, w[0], w[1], w[2], w[3], w[4], w[5]);
}

template <typename T>
Result<T> result(long r) noexcept {
  if (r < 0) return fail(static_cast<int>(-r));
  if constexpr (std::is_void_v<T>) {
    return {};
  } else if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(r);
  } else {
    return static_cast<T>(r);
  }
}

}  // namespace

void set_door(Door door) noexcept { g_door = door != nullptr ? door : &kernel; }
Door door() noexcept { return g_door; }

Result<int> open(const char* path, int flags, unsigned mode) noexcept {
  return result<int>(ask(SYS_openat, AT_FDCWD, path, flags, mode));
}
Result<size_t> read(int fd, void* buf, size_t n) noexcept {
  return result<size_t>(ask(SYS_read, fd, buf, n));
}
Result<size_t> write(int fd, const void* buf, size_t n) noexcept {
  return result<size_t>(ask(SYS_write, fd, buf, n));
}
Result<size_t> pread(int fd, void* buf, size_t n, off_t offset) noexcept {
  return result<size_t>(ask(SYS_pread64, fd, buf, n, offset));
}
Result<size_t> pread_cached(int fd, void* buf, size_t n, off_t offset) noexcept {
  const iovec iov{buf, n};
  // The offset comes in two halves, and only a 32-bit kernel looks at the second one.
  return result<size_t>(ask(SYS_preadv2, fd, &iov, 1, offset, 0, RWF_NOWAIT));
}
Result<size_t> readv(int fd, const iovec* iov, size_t n) noexcept {
  return result<size_t>(ask(SYS_readv, fd, iov, n));
}
Result<size_t> sendfile(int out, int file, off_t offset, size_t n) noexcept {
  return result<size_t>(ask(SYS_sendfile, out, file, &offset, n));
}
Result<off_t> lseek(int fd, off_t offset, int whence) noexcept {
  return result<off_t>(ask(SYS_lseek, fd, offset, whence));
}
Result<size_t> recv(int fd, void* buf, size_t n, int flags) noexcept {
  return result<size_t>(ask(SYS_recvfrom, fd, buf, n, flags, 0, 0));
}
Result<size_t> send(int fd, const void* buf, size_t n, int flags) noexcept {
  return result<size_t>(ask(SYS_sendto, fd, buf, n, flags, 0, 0));
}
Result<size_t> sendto(int fd, const void* buf, size_t n, int flags, const sockaddr* to,
                      socklen_t to_len) noexcept {
  return result<size_t>(ask(SYS_sendto, fd, buf, n, flags, to, to_len));
}
Result<size_t> sendmsg(int fd, const msghdr* msg, int flags) noexcept {
  return result<size_t>(ask(SYS_sendmsg, fd, msg, flags));
}
Result<size_t> recvmsg(int fd, msghdr* msg, int flags) noexcept {
  return result<size_t>(ask(SYS_recvmsg, fd, msg, flags));
}
Result<int> socket(int domain, int type, int protocol) noexcept {
  return result<int>(ask(SYS_socket, domain, type, protocol));
}
Result<void> bind(int fd, const sockaddr* addr, socklen_t len) noexcept {
  return result<void>(ask(SYS_bind, fd, addr, len));
}
Result<void> listen(int fd, int backlog) noexcept {
  return result<void>(ask(SYS_listen, fd, backlog));
}
Result<void> connect(int fd, const sockaddr* addr, socklen_t len) noexcept {
  return result<void>(ask(SYS_connect, fd, addr, len));
}
Result<int> accept4(int fd, int flags) noexcept {
  return result<int>(ask(SYS_accept4, fd, 0, 0, flags));
}
Result<void> shutdown(int fd, int how) noexcept { return result<void>(ask(SYS_shutdown, fd, how)); }
Result<void> close(int fd) noexcept { return result<void>(ask(SYS_close, fd)); }
Result<int> dup3(int fd, int onto, int flags) noexcept {
  return result<int>(ask(SYS_dup3, fd, onto, flags));
}
Result<int> fcntl(int fd, int cmd, long arg) noexcept {
  return result<int>(ask(SYS_fcntl, fd, cmd, arg));
}
Result<int> ioctl_int(int fd, unsigned long request) noexcept {
  int v = 0;
  const long r = ask(SYS_ioctl, fd, request, &v);
  if (r < 0) return fail(static_cast<int>(-r));
  return v;
}
Result<void> getsockname(int fd, sockaddr* addr, socklen_t* len) noexcept {
  return result<void>(ask(SYS_getsockname, fd, addr, len));
}
Result<void> getpeername(int fd, sockaddr* addr, socklen_t* len) noexcept {
  return result<void>(ask(SYS_getpeername, fd, addr, len));
}
Result<void> getsockopt(int fd, int level, int name, void* value, socklen_t* len) noexcept {
  return result<void>(ask(SYS_getsockopt, fd, level, name, value, len));
}
Result<void> setsockopt(int fd, int level, int name, const void* value, socklen_t len) noexcept {
  return result<void>(ask(SYS_setsockopt, fd, level, name, value, len));
}
bool refuse_descriptors(int fd) noexcept {
  constexpr int kPassRights = 83;  // SO_PASSRIGHTS; older headers lack it
  constexpr int kNo = 0;
  return setsockopt(fd, SOL_SOCKET, kPassRights, &kNo, sizeof(kNo)).has_value();
}
Result<int> getsockopt_int(int fd, int level, int name) noexcept {
  int v = 0;
  socklen_t len = sizeof(v);
  const long r = ask(SYS_getsockopt, fd, level, name, &v, &len);
  if (r < 0) return fail(static_cast<int>(-r));
  return v;
}

Result<uint64_t> getsockopt_u64(int fd, int name) noexcept {
  uint64_t v = 0;
  socklen_t len = sizeof(v);
  const long r = ask(SYS_getsockopt, fd, SOL_SOCKET, name, &v, &len);
  if (r < 0) return fail(static_cast<int>(-r));
  return v;
}

uint64_t netns_cookie(int fd) noexcept {
  constexpr int kNetnsCookie = 71;  // SO_NETNS_COOKIE, since Linux 5.14; older headers lack it
  return getsockopt_u64(fd, kNetnsCookie).value_or(0);
}

short poll_now(int fd, short events) noexcept {
  pollfd p{fd, events, 0};
  timespec now{0, 0};
  const Result<int> r = ppoll(&p, 1, &now, nullptr, 0);
  return r && *r > 0 ? p.revents : 0;
}
Result<int> ppoll(pollfd* fds, size_t n, timespec* timeout, const void* sigmask,
                  size_t sigmask_size) noexcept {
  return result<int>(ask(SYS_ppoll, fds, n, timeout, sigmask, sigmask_size));
}
Result<int> epoll_create(int flags) noexcept { return result<int>(ask(SYS_epoll_create1, flags)); }
Result<void> epoll_ctl(int epfd, int op, int fd, epoll_event* event) noexcept {
  return result<void>(ask(SYS_epoll_ctl, epfd, op, fd, event));
}
Result<void> epoll_add(int epfd, int fd, uint32_t events, uint64_t data) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  return os::epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &event);
}
Result<int> epoll_wait(int epfd, epoll_event* events, int max, int timeout_ms) noexcept {
  return result<int>(ask(SYS_epoll_pwait, epfd, events, max, timeout_ms, 0, 0));
}
Result<int> epoll_pwait2(int epfd, epoll_event* events, int max, const timespec* timeout,
                         const void* sigmask, size_t sigmask_size) noexcept {
#ifdef SYS_epoll_pwait2
  const long r = ask(SYS_epoll_pwait2, epfd, events, max, timeout, sigmask, sigmask_size);
  if (r != -ENOSYS) return result<int>(r);
#endif
  int ms = -1;
  if (timeout != nullptr) {
    const int64_t wide = timeout->tv_sec * int64_t{1000} + (timeout->tv_nsec + 999'999) / 1'000'000;
    ms = wide > INT32_MAX ? INT32_MAX : static_cast<int>(wide);
  }
  return result<int>(ask(SYS_epoll_pwait, epfd, events, max, ms, sigmask, sigmask_size));
}
Result<int> eventfd(unsigned initial, int flags) noexcept {
  return result<int>(ask(SYS_eventfd2, initial, flags));
}
Result<void> pipe2(int* ends, int flags) noexcept {
  return result<void>(ask(SYS_pipe2, ends, flags));
}

Result<int> memfd_create(const char* name, unsigned flags) noexcept {
  return result<int>(ask(SYS_memfd_create, name, flags));
}
Result<void> ftruncate(int fd, off_t size) noexcept {
  return result<void>(ask(SYS_ftruncate, fd, size));
}
Result<off_t> file_size(int fd) noexcept {
  struct stat st;
  const long r = ask(SYS_newfstatat, fd, "", &st, AT_EMPTY_PATH);
  if (r < 0) return fail(static_cast<int>(-r));
  return st.st_size;
}
Result<void*> map_shared(int fd, size_t size) noexcept {
  return result<void*>(ask(SYS_mmap, 0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
}
Result<void*> map_anonymous_shared(size_t size) noexcept {
  return result<void*>(
      ask(SYS_mmap, 0, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
}
Result<void*> map_file(int fd, off_t offset, size_t size) noexcept {
  return result<void*>(ask(SYS_mmap, 0, size, PROT_READ, MAP_PRIVATE, fd, offset));
}
Result<void*> map_private_reserved(size_t size) noexcept {
  return result<void*>(ask(SYS_mmap, 0, size, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}
void unmap(void* addr, size_t size) noexcept { ask(SYS_munmap, addr, size); }

Result<void> futex_wait(const void* word_address, uint32_t expected,
                        const timespec* timeout) noexcept {
  return result<void>(ask(SYS_futex, word_address, FUTEX_WAIT, expected, timeout, 0, 0));
}
void futex_wake(const void* word_address, int count) noexcept {
  ask(SYS_futex, word_address, FUTEX_WAKE, count, 0, 0, 0);
}

Result<size_t> readlink(const char* path, char* out, size_t n) noexcept {
  return result<size_t>(ask(SYS_readlinkat, AT_FDCWD, path, out, n));
}
Result<size_t> getrandom(void* buf, size_t n) noexcept {
  return result<size_t>(ask(SYS_getrandom, buf, n, 0));
}
int getpid() noexcept { return static_cast<int>(ask(SYS_getpid)); }
void forget_sigpipe() noexcept {
  const uint64_t pipe = uint64_t{1} << (SIGPIPE - 1);
  const timespec at_once{};
  ask(SYS_rt_sigtimedwait, &pipe, 0, &at_once, sizeof(pipe));
}
void raise_here(int signal) noexcept {
  const auto process = ask(SYS_getpid);
  (void)ask(SYS_tgkill, process, ask(SYS_gettid), signal);
}
int geteuid() noexcept { return static_cast<int>(ask(SYS_geteuid)); }
uint64_t rlimit_nofile_soft() noexcept {
  rlimit limit{};
  ask(SYS_prlimit64, 0, RLIMIT_NOFILE, 0, &limit);
  return limit.rlim_cur;
}

}  // namespace rsock::os
