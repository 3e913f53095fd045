// exec and spawn: another program, in this process or in a new one. The table is in processes.cc.
#include <alloca.h>

#include <cstdarg>

#include "preload/entry.h"
#include "preload/handlers.h"
#include "preload/processes.h"

namespace rsock::preload {

void set_down_for_child(bool (*copied)(int)) noexcept {
  if (started() && own_process()) stream::before_spawn(copied);
}

namespace {

void set_down_for_exec() noexcept {
  handlers_before_exec();
  // A child of vfork has nothing to do: what it keeps has been set down.
  if (started() && own_process()) stream::before_exec();
}

/// Returns only if it failed.
template <typename Call>
int exec_with(Call call) noexcept {
  set_down_for_exec();
  const int result = call();
  const int saved_errno = errno;
  if (started() && own_process()) stream::after_failed_exec();
  errno = saved_errno;
  return result;
}

/// Numbers that were ever named as the source of a copy in somebody's file actions. Nobody looks
/// into these (glibc's own structure); so any list of actions may name any of them. Relaxed: a
/// program that adds an action and spawns in another thread orders the two itself.
constexpr int kMaxCopied = 4096;
constinit std::atomic<uint64_t> g_copied[kMaxCopied / 64] = {};
constinit std::atomic<bool> g_high_copied{false};

void note_copied(int fd) noexcept {
  if (fd < 0) return;
  if (fd >= kMaxCopied) return g_high_copied.store(true, std::memory_order_relaxed);
  g_copied[fd / 64].fetch_or(uint64_t{1} << (fd % 64), std::memory_order_relaxed);
}

bool was_copied(int fd) {
  if (fd >= kMaxCopied) return g_high_copied.load(std::memory_order_relaxed);
  return (g_copied[fd / 64].load(std::memory_order_relaxed) >> (fd % 64) & 1) != 0;
}

}  // namespace
}  // namespace rsock::preload

using namespace rsock;
using namespace rsock::preload;

// --- exec ------------------------------------------------------------------------------------

RSOCK_EXPORT int execve(const char* path, char* const argv[], char* const envp[]) noexcept {
  return exec_with([=] { return real.execve(path, argv, envp); });
}

RSOCK_EXPORT int execv(const char* path, char* const argv[]) noexcept {
  return exec_with([=] { return real.execv(path, argv); });
}

RSOCK_EXPORT int execvp(const char* file, char* const argv[]) noexcept {
  return exec_with([=] { return real.execvp(file, argv); });
}

RSOCK_EXPORT int execvpe(const char* file, char* const argv[], char* const envp[]) noexcept {
  return exec_with([=] { return real.execvpe(file, argv, envp); });
}

RSOCK_EXPORT int fexecve(int fd, char* const argv[], char* const envp[]) noexcept {
  return exec_with([=] { return real.fexecve(fd, argv, envp); });
}

RSOCK_EXPORT int execveat(int dir, const char* path, char* const argv[], char* const envp[],
                          int flags) noexcept {
  return exec_with([=] { return real.execveat(dir, path, argv, envp, flags); });
}

// The arguments become an array on the stack: a child of vfork, or of fork with threads, may not
// allocate.
#define RSOCK_COLLECT(first, argv, rest)                                  \
  size_t count = 1;                                                       \
  va_list rest;                                                           \
  va_start(rest, first);                                                  \
  while (va_arg(rest, char*) != nullptr) ++count;                         \
  va_end(rest);                                                           \
  auto** argv = static_cast<char**>(alloca((count + 1) * sizeof(char*))); \
  argv[0] = const_cast<char*>(first);                                     \
  va_start(rest, first);                                                  \
  for (size_t i = 1; i <= count; ++i) argv[i] = va_arg(rest, char*)

RSOCK_EXPORT int execl(const char* path, const char* arg, ...) noexcept {
  RSOCK_COLLECT(arg, argv, rest);
  va_end(rest);
  return ::execv(path, argv);
}

RSOCK_EXPORT int execlp(const char* file, const char* arg, ...) noexcept {
  RSOCK_COLLECT(arg, argv, rest);
  va_end(rest);
  return ::execvp(file, argv);
}

RSOCK_EXPORT int execle(const char* path, const char* arg, ...) noexcept {
  RSOCK_COLLECT(arg, argv, rest);
  auto* const* envp = va_arg(rest, char* const*);
  va_end(rest);
  return ::execve(path, argv, envp);
}

// --- spawn -----------------------------------------------------------------------------------

RSOCK_EXPORT int posix_spawn(pid_t* pid, const char* path,
                             const posix_spawn_file_actions_t* actions,
                             const posix_spawnattr_t* attributes, char* const argv[],
                             char* const envp[]) {
  set_down_for_child(actions != nullptr ? was_copied : nullptr);
  return real.posix_spawn(pid, path, actions, attributes, argv, envp);
}

RSOCK_EXPORT int posix_spawnp(pid_t* pid, const char* file,
                              const posix_spawn_file_actions_t* actions,
                              const posix_spawnattr_t* attributes, char* const argv[],
                              char* const envp[]) {
  set_down_for_child(actions != nullptr ? was_copied : nullptr);
  return real.posix_spawnp(pid, file, actions, attributes, argv, envp);
}

RSOCK_EXPORT int posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t* actions, int fd,
                                                  int target) noexcept {
  note_copied(fd);
  return real.posix_spawn_file_actions_adddup2(actions, fd, target);
}

RSOCK_EXPORT int system(const char* command) {
  set_down_for_child();
  return real.system(command);
}

RSOCK_EXPORT FILE* popen(const char* command, const char* mode) {
  set_down_for_child();
  return real.popen(command, mode);
}
