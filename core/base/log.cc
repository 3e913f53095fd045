#include "core/base/log.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "core/base/raw_syscall.h"

namespace rsock {
namespace {

constexpr size_t kMaxLine = 512;
constexpr int kStderr = 2;
constexpr size_t kKernelSigset = 8;  // bytes; glibc's sigset_t is larger

template <typename T>
long word(T* p) noexcept {
  return reinterpret_cast<long>(p);
}

bool stderr_is_terminal() noexcept {
  char settings[256];  // struct termios of the kernel, whose size differs from glibc's
  return raw_syscall(SYS_ioctl, kStderr, TCGETS, word(settings)) == 0;
}

bool status_of(int fd, struct stat* st) noexcept {
  return raw_syscall(SYS_newfstatat, fd, word(""), word(st), AT_EMPTY_PATH) >= 0;
}

mode_t type_of(int fd) noexcept {
  struct stat st;
  return status_of(fd, &st) ? st.st_mode & S_IFMT : 0;
}

/// What descriptor 2 was when the library was loaded. Written before main, with one thread.
struct Stderr {
  bool noted = false;
  bool open = false;
  dev_t device = 0;
  ino_t inode = 0;
};
constinit Stderr g_stderr;

bool is_the_same_stderr() noexcept {
  if (!g_stderr.noted) return true;
  struct stat now;
  return g_stderr.open && status_of(kStderr, &now) && now.st_dev == g_stderr.device &&
         now.st_ino == g_stderr.inode;
}

bool writable_now(int fd) noexcept {
  pollfd p{fd, POLLOUT, 0};
  const timespec zero{0, 0};
  return raw_syscall(SYS_ppoll, word(&p), 1, word(&zero), 0, 0) == 1 && (p.revents & POLLOUT) != 0;
}

/// stderr may be anything by now. Never block on it, never die of it, and never write to a TCP
/// socket: it could be a stream that we have lifted.
void write_to_stderr(const char* line, size_t n) noexcept {
  switch (type_of(kStderr)) {
    case S_IFIFO:
      if (writable_now(kStderr)) write_quietly(kStderr, line, n);
      break;
    case S_IFSOCK: {
      int domain = AF_UNSPEC;
      socklen_t size = sizeof(domain);
      raw_syscall(SYS_getsockopt, kStderr, SOL_SOCKET, SO_DOMAIN, word(&domain), word(&size));
      if (domain == AF_UNIX) {
        raw_syscall(SYS_sendto, kStderr, word(line), static_cast<long>(n),
                    MSG_DONTWAIT | MSG_NOSIGNAL);
      }
      break;
    }
    case S_IFCHR:
      if (!writable_now(kStderr)) break;
      [[fallthrough]];
    default:
      write_quietly(kStderr, line, n);
  }
}

bool write_to_file(const char* name, const char* line, size_t n) noexcept {
  const long fd =
      raw_syscall(SYS_openat, AT_FDCWD, word(name),
                  O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0644);
  if (fd < 0) return false;
  // What is lost here (a reader that went away, a full disk, RLIMIT_FSIZE) would not fare better on
  // stderr.
  write_quietly(static_cast<int>(fd), line, n);
  raw_syscall(SYS_close, fd);
  return true;
}

}  // namespace

long write_quietly(int fd, const void* data, size_t n) noexcept {
  const uint64_t ours = uint64_t{1} << (SIGPIPE - 1) | uint64_t{1} << (SIGXFSZ - 1);
  uint64_t before = 0;
  uint64_t pending = 0;
  raw_syscall(SYS_rt_sigprocmask, SIG_BLOCK, word(&ours), word(&before), kKernelSigset);
  raw_syscall(SYS_rt_sigpending, word(&pending), kKernelSigset);
  const long r = raw_syscall(SYS_write, fd, word(data), static_cast<long>(n));
  const uint64_t raised = r == -EPIPE   ? uint64_t{1} << (SIGPIPE - 1)
                          : r == -EFBIG ? uint64_t{1} << (SIGXFSZ - 1)
                                        : 0;
  if (raised != 0 && (pending & raised) == 0) {
    const timespec zero{0, 0};
    raw_syscall(SYS_rt_sigtimedwait, word(&raised), 0, word(&zero), kKernelSigset);
  }
  raw_syscall(SYS_rt_sigprocmask, SIG_SETMASK, word(&before), 0, kKernelSigset);
  return r;
}

void note_stderr() noexcept {
  struct stat now;
  g_stderr = Stderr{};
  g_stderr.noted = true;
  if (!status_of(kStderr, &now)) return;
  g_stderr.open = true;
  g_stderr.device = now.st_dev;
  g_stderr.inode = now.st_ino;
}

bool log_enabled(LogLevel level) noexcept { return level <= config().log_level; }

void log_line(LogLevel level, const char* format, ...) noexcept {
  static constexpr const char* kNames[] = {"error", "warn", "info", "debug"};
  const int saved_errno = errno;  // vsnprintf may set it, and the program must not see that
  char line[kMaxLine];
  const long pid = raw_syscall(SYS_getpid);
  int n = snprintf(line, sizeof(line), "librsock[%ld] %s: ", pid, kNames[static_cast<int>(level)]);
  va_list args;
  va_start(args, format);
  const int text = vsnprintf(line + n, sizeof(line) - static_cast<size_t>(n), format, args);
  va_end(args);
  errno = saved_errno;
  n += text > 0 ? text : 0;
  if (n > static_cast<int>(sizeof(line)) - 1) n = static_cast<int>(sizeof(line)) - 1;
  line[n++] = '\n';  // over the terminator: the line is written by its length
  const Config& c = config();
  if (c.log_file != nullptr && write_to_file(c.log_file, line, static_cast<size_t>(n))) return;
  if (!is_the_same_stderr()) return;
  if (c.log_stderr || stderr_is_terminal()) write_to_stderr(line, static_cast<size_t>(n));
}

}  // namespace rsock
