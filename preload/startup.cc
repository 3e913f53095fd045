#include "preload/startup.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "core/base/config.h"
#include "core/base/inside.h"
#include "core/base/log.h"
#include "core/base/mutex.h"
#include "core/base/raw_syscall.h"
#include "core/os/owned_fd.h"
#include "core/stream/fd_table.h"
#include "core/stream/socket_ops.h"
#include "preload/handlers.h"
#include "preload/processes.h"

namespace rsock::preload {
namespace {

constinit Mutex g_mutex;              // held while rungs are climbed, and over a fork
constinit bool g_fork_begun = false;  // under g_mutex: a fork goes on in a started process
constinit int g_forks_within = 0;     // under g_mutex: forks by a signal handler on top of that
constinit std::atomic<bool> g_early{false};
constinit std::atomic<bool> g_started{false};
constinit std::atomic<bool> g_stands_back{false};
constinit std::atomic<bool> g_only_owes_line{false};  // nothing was tracked, and nothing will be
constinit std::atomic<int> g_process{0};

constexpr size_t kMaxVariables = 63;
constinit char g_text[16 * 1024] = {};
constinit const char* g_environment[kMaxVariables + 1] = {};

/// In a page that the kernel clears in a forked child (MADV_WIPEONFORK, since Linux 4.14): 1 in the
/// process that set it, also if the fork passed every hook by. Null: not to be had.
constinit std::atomic<uint32_t>* g_mark = nullptr;
/// This thread has started a child that runs in our memory, and as this very thread.
constinit thread_local bool t_lent __attribute__((tls_model("initial-exec"))) = false;

int process_now() noexcept { return static_cast<int>(raw_syscall(SYS_getpid)); }

// --- the rungs, as startup.def lists them ----------------------------------------------------

void note_process() noexcept {
  // Relaxed: a plain number. It changes in a forked child only, which has one thread then.
  g_process.store(process_now(), std::memory_order_relaxed);
  if (g_mark != nullptr) g_mark->store(1, std::memory_order_relaxed);
}

void mark_process() noexcept {
  constexpr size_t kPage = 4096;
  const long page =
      raw_syscall(SYS_mmap, 0, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page < 0 && page > -4096) return;
  if (raw_syscall(SYS_madvise, page, kPage, MADV_WIPEONFORK) != 0) {
    raw_syscall(SYS_munmap, page, kPage);
    return;
  }
  auto* mark = reinterpret_cast<std::atomic<uint32_t>*>(page);
  mark->store(1, std::memory_order_relaxed);
  g_mark = mark;  // published by g_started
}

/// Takes variables byte by byte; keeps those that are ours.
class EnvironmentCopy {
 public:
  void take(char c) noexcept {
    if (used_ + size_ < sizeof(g_text)) g_text[used_ + size_] = c;
    ++size_;
    if (c != '\0') return;
    char* text = g_text + used_;
    if (used_ + size_ <= sizeof(g_text) && count_ < kMaxVariables &&
        strncmp(text, "RSOCK_", 6) == 0) {
      g_environment[count_++] = text;
      used_ += size_;
    }
    size_ = 0;
  }

 private:
  size_t count_ = 0;
  size_t used_ = 0;  // of g_text
  size_t size_ = 0;  // of the variable that comes in behind it
};

/// As the kernel has it: libc's `environ` is not there yet in a function that runs before all
/// constructors (DT_PREINIT_ARRAY).
void read_first_environment(EnvironmentCopy& copy) noexcept {
  const long fd = raw_syscall(SYS_openat, AT_FDCWD, reinterpret_cast<long>("/proc/self/environ"),
                              O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return;
  char piece[1024];
  for (;;) {
    const long n = raw_syscall(SYS_read, fd, reinterpret_cast<long>(piece), sizeof(piece));
    if (n <= 0) break;
    for (long i = 0; i < n; ++i) copy.take(piece[i]);
  }
  raw_syscall(SYS_close, fd);
}

void copy_environment() noexcept {
  // Set-uid programs are not told by their caller which files to write.
  if (getauxval(AT_SECURE) != 0) return;
  EnvironmentCopy copy;
  if (environ == nullptr) return read_first_environment(copy);
  for (char** e = environ; *e != nullptr; ++e) {
    if (strncmp(*e, "RSOCK_", 6) != 0) continue;
    for (const char* c = *e; *c != '\0'; ++c) copy.take(*c);
    copy.take('\0');
  }
}

bool asked_for(const char* name) noexcept {
  for (const char* const* e = g_environment; *e != nullptr; ++e) {
    if (strncmp(*e, name, strlen(name)) == 0) return true;
  }
  return false;
}

void watch_fork() noexcept { pthread_atfork(before_any_fork, after_any_fork, in_forked_child); }

void read_configuration() noexcept { load_config(g_environment); }

void log_complaints() noexcept {
  // Relaxed: set by this thread, or by one that ends the process or forbids it everything just now.
  if (g_only_owes_line.load(std::memory_order_relaxed)) return;
  for (size_t i = 0; i < config_complaints(); ++i) RSOCK_LOG(kWarn, "%s", config_complaint(i));
}

void protect_internal_descriptors() noexcept {
  stream::set_own_process([]() noexcept { return own_process(); });
  os::set_internal_fd_hook([](int fd, bool opened) noexcept {
    if (opened) {
      stream::FdTable::set(fd, stream::FdKind::kInternal);
    } else {
      stream::FdTable::clear(fd);
    }
  });
}

// --- climbing --------------------------------------------------------------------------------

void climb_early() noexcept {
  // Relaxed: under g_mutex, or before main with one thread.
  if (g_early.load(std::memory_order_relaxed)) return;
#define RSOCK_EARLY(rung, reason) rung();
#include "preload/startup.def"
  g_early.store(true, std::memory_order_relaxed);
}

void climb_lazy() noexcept {
#define RSOCK_LAZY(rung, reason) rung();
#include "preload/startup.def"
}

/// False: this thread is on the rungs already.
bool start() noexcept {
  // acquire pairs with the release below: the configuration is whole.
  if (g_started.load(std::memory_order_acquire)) return true;
  if (g_mutex.held_by_me()) return false;
  MutexLock lock(g_mutex);
  if (g_started.load(std::memory_order_relaxed)) return true;
  climb_early();
  climb_lazy();
  // release pairs with the acquire above and in started().
  g_started.store(true, std::memory_order_release);
  return true;
}

/// A process that never met a socket has a line to write, too, if somebody asked for lines. It may
/// be without numbers, in another root or in a sandbox by then: what can't be read there matters to
/// nobody.
void start_for_the_line() noexcept {
  if (started() || !asked_for("RSOCK_SUMMARY=")) return;
  g_only_owes_line.store(true, std::memory_order_relaxed);
  (void)start();
}

/// Whether fd is a socket at all. The system call is one that every program begins with, should a
/// sandbox of our parent's be there.
bool is_socket(int fd) noexcept {
  struct stat status;
  return raw_syscall(SYS_newfstatat, fd, reinterpret_cast<long>(""),
                     reinterpret_cast<long>(&status), AT_EMPTY_PATH) == 0 &&
         S_ISSOCK(status.st_mode);
}

/// Connections that the program before this one has left us.
void find_inherited() noexcept {
  for (int fd = 0; fd < stream::kMostInherited; ++fd) {
    if (is_socket(fd) && stream::is_left_to_us(fd)) stream::on_inherited(fd, tracking());
  }
}

// 101 is the first priority that is not the implementation's own.
__attribute__((constructor(101))) void on_load() noexcept {
  {
    MutexLock lock(g_mutex);
    climb_early();
  }
  find_inherited();
}

__attribute__((destructor(101))) void on_exit() noexcept { leave(); }

}  // namespace

bool started() noexcept { return g_started.load(std::memory_order_acquire); }

bool tracking() noexcept {
  // Relaxed: a program that opens sockets in one thread while another is about to forbid it to all
  // is its own judge of the order.
  if (g_stands_back.load(std::memory_order_relaxed)) return false;
  return !inside_library() && start() && config().enabled && own_process();
}

bool standing_back() noexcept { return g_stands_back.load(std::memory_order_relaxed); }

void stand_back() noexcept {
  if (!own_process()) return;
  // The line is due now: at the exit there may be no way to write it.
  start_for_the_line();
  g_stands_back.store(true, std::memory_order_relaxed);
  if (started()) stream::before_sandbox();
}

bool own_process() noexcept {
  if (started() && g_mark != nullptr && !t_lent) {
    return g_mark->load(std::memory_order_relaxed) != 0;
  }
  const bool own = g_process.load(std::memory_order_relaxed) == process_now();
  if (own) t_lent = false;  // back in the parent: that child is gone
  return own;
}

void lend_memory() noexcept { t_lent = true; }

bool begin_fork() noexcept RSOCK_NO_TSA {
  if (g_mutex.held_by_me()) {
    // A signal handler forks while its thread is on the rungs (nothing is there yet) or in a fork
    // (everything is set down and locked).
    ++g_forks_within;
    return false;
  }
  g_mutex.lock();
  // A child that passed every hook by may have the keeper's lock as a thread of its parent held it.
  g_fork_begun = started() && own_process();
  return g_fork_begun;
}

bool fork_was_begun() noexcept RSOCK_NO_TSA { return g_forks_within == 0 && g_fork_begun; }

void end_fork() noexcept RSOCK_NO_TSA {
  if (g_forks_within > 0) {
    --g_forks_within;
    return;
  }
  g_fork_begun = false;
  g_mutex.unlock();
}

bool end_fork_in_child() noexcept RSOCK_NO_TSA {
  note_process();
  g_forks_within = 0;
  g_mutex.reset_after_fork();
  handlers_in_forked_child();
  return std::exchange(g_fork_begun, false);
}

void leave() noexcept {
  if (!own_process() || g_stands_back.load(std::memory_order_relaxed)) return;
  start_for_the_line();
  if (started()) stream::before_exit();
}

}  // namespace rsock::preload
