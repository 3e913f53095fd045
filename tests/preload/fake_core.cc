#include "tests/preload/fake_core.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>

#include "core/poll/readiness_ops.h"
#include "core/stream/iov.h"

namespace rsock::fake {
namespace {

struct Memory {
  int count;
  char lines[256][64];
};

Memory& memory() {
  static auto* shared = static_cast<Memory*>(
      mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  return *shared;
}

}  // namespace

Behaviour& behaviour() {
  static Behaviour b;
  return b;
}

stream::Stream* fake_stream() {
  alignas(8) static char nothing[8];
  return reinterpret_cast<stream::Stream*>(nothing);
}

void reset() {
  behaviour() = Behaviour{};
  memory().count = 0;
  for (int fd = 0; fd <= stream::FdTable::highest(); ++fd) stream::FdTable::clear(fd);
}

std::vector<std::string> calls() {
  std::vector<std::string> all;
  for (int i = 0; i < memory().count; ++i) all.emplace_back(memory().lines[i]);
  return all;
}

std::string line(const char* format, ...) {
  char text[64];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  return text;
}

void note(const char* format, ...) {
  Memory& m = memory();
  if (m.count == 256) return;
  va_list args;
  va_start(args, format);
  vsnprintf(m.lines[m.count++], sizeof(m.lines[0]), format, args);
  va_end(args);
}

}  // namespace rsock::fake

namespace rsock::stream {

using fake::behaviour;
using fake::note;

void on_socket(int fd, int domain, int type, int protocol) noexcept {
  note("on_socket");
  FdTable::set(fd, FdKind::kTcpSocket);
}
void on_connect(int fd, long result) noexcept { note("on_connect %d %ld", fd, result); }
void on_accept(int listener, int fd, int flags) noexcept {
  note("on_accept %d %d %d", listener, fd, flags);
}
void on_dup(int fd, int copy) noexcept {
  note("on_dup %d %d", fd, copy);
  FdTable::set(copy, FdKind::kStream, fake::fake_stream());
}
void after_close() noexcept {}
bool before_close(int fd) noexcept {
  note("before_close %d", fd);
  FdTable::clear(fd);
  return true;
}
void for_each_program_range(unsigned first, unsigned last, void (*range)(unsigned, unsigned, void*),
                            void* arg) noexcept {
  unsigned from = first;
  for (int i = 0; i <= FdTable::highest(); ++i) {
    const auto fd = static_cast<unsigned>(i);
    if (fd < from || fd > last || FdTable::kind(i) != FdKind::kInternal) continue;
    if (fd > from) range(from, fd - 1, arg);
    from = fd + 1;
  }
  if (from <= last) range(from, last, arg);
}

// Every direction is managed here: the entries have to gather the program's buffers.
std::optional<long> send_by_kernel(Stream&, int, KernelCall) { return std::nullopt; }
long recv_error_queue(Stream&, int, msghdr*, int, KernelCall kernel) { return kernel(); }
std::optional<long> recv_by_kernel(Stream&, int, KernelCall) { return std::nullopt; }
size_t send_short(Stream&, const void*, size_t, int) noexcept { return 0; }
size_t recv_short(Stream&, void*, size_t, int) noexcept { return 0; }
long send(Stream&, int fd, const iovec* iov, size_t n, int flags, KernelCall kernel) {
  if (!iov_acceptable(iov, n))
    return kernel();  // as core does; integration/semantics/io_vectors holds it to that
  note("send %d %zu %d", fd, n, flags);
  return behaviour().send ? behaviour().send(iov, n, flags) : kernel();
}
long recv(Stream&, int fd, const iovec* iov, size_t n, int flags, KernelCall kernel) {
  if (!iov_acceptable(iov, n)) return kernel();
  note("recv %d %zu %d", fd, n, flags);
  return behaviour().recv ? behaviour().recv(iov, n, flags) : kernel();
}
long sendfile(Stream&, int fd, int in, off_t*, size_t count, KernelCall kernel) {
  note("sendfile %d %d %zu", fd, in, count);
  return kernel();
}
long shutdown(Stream&, int fd, int how, KernelCall kernel) {
  note("shutdown %d %d", fd, how);
  return kernel();
}
long ioctl(Stream&, int fd, unsigned long request, void*, KernelCall kernel) {
  note("ioctl %d %lu", fd, request);
  return kernel();
}
long getsockopt(Stream&, int fd, int, int name, void*, socklen_t*, KernelCall kernel) {
  note("getsockopt %d %d", fd, name);
  return kernel();
}
long setsockopt(Stream&, int fd, int, int name, const void*, socklen_t, KernelCall kernel) {
  note("setsockopt %d %d", fd, name);
  return kernel();
}
void on_set_flags(Stream&, int flags) noexcept { note("on_set_flags %d", flags); }
int pin_to_tcp(int fd, const char* reason, bool) noexcept {
  note("pin_to_tcp %d %s", fd, reason);
  return behaviour().pins ? 0 : EAGAIN;
}
void leave_to_stdio(int fd) noexcept { note("leave_to_stdio %d", fd); }
uint32_t before_passing(const msghdr*) noexcept {
  note("before_passing");
  return 5;
}
void after_passing(const msghdr*, uint32_t key, bool sent) noexcept {
  note("after_passing %u %d", key, sent);
}
void on_descriptors_received(const msghdr*, bool) noexcept { note("on_descriptors_received"); }
bool is_left_to_us(int) noexcept { return false; }
void on_inherited(int fd, bool track) noexcept { note("on_inherited %d %d", fd, track); }
void after_failed_exec() noexcept { note("after_failed_exec"); }
void prepare_fork() noexcept { note("prepare_fork"); }
void before_fork() noexcept { note("before_fork"); }
void after_fork_parent(bool failed) noexcept { note("after_fork_parent %d", failed); }
void after_fork_child() noexcept { note("after_fork_child"); }
void before_spawn(bool (*copied)(int)) noexcept {
  note(copied != nullptr ? "before_spawn with copies" : "before_spawn");
}
void leave_to_child(int fd) noexcept { note("leave_to_child %d", fd); }
void set_own_process(bool (*)() noexcept) noexcept {}
void after_daemon() noexcept { note("after_daemon"); }
void before_exec() noexcept { note("before_exec"); }
void before_exit() noexcept { note("before_exit"); }
void before_thread_exit() noexcept {}
void before_sandbox() noexcept { note("before_sandbox"); }
void before_unshare() noexcept { note("before_unshare"); }
void after_unshare() noexcept {}
void first_thread_ends() noexcept { note("first_thread_ends"); }

}  // namespace rsock::stream

namespace rsock::poll {

using fake::behaviour;
using fake::note;

namespace {
long wait_or(KernelCall kernel) { return behaviour().wait ? behaviour().wait() : kernel(); }
}  // namespace

long poll(pollfd*, nfds_t n, const timespec* timeout, const sigset_t* mask, KernelCall kernel) {
  note("poll %d %ld %d", static_cast<int>(n), timeout != nullptr ? timeout->tv_nsec : -1,
       mask != nullptr);
  return wait_or(kernel);
}
int select_width(int nfds) noexcept { return nfds; }
long select(int n, fd_set*, fd_set*, fd_set*, const timespec* timeout, timespec* remaining,
            const sigset_t* mask, KernelCall kernel) {
  note("select %d %ld %d", n, timeout != nullptr ? timeout->tv_sec : -1, mask != nullptr);
  if (remaining != nullptr && behaviour().wait) *remaining = {1, 2000};
  return wait_or(kernel);
}
void on_epoll_create(int epfd) noexcept { note("on_epoll_create"); }
long epoll_ctl(int, int op, int, epoll_event*, KernelCall kernel) {
  note("epoll_ctl %d", op);
  return kernel();
}
long epoll_wait(int, epoll_event*, int most, const timespec* timeout, const sigset_t* mask,
                KernelCall kernel) {
  note("epoll_wait %d %ld %d", most, timeout != nullptr ? timeout->tv_nsec : -1, mask != nullptr);
  return wait_or(kernel);
}
bool may_matter() noexcept { return behaviour().may_matter; }

}  // namespace rsock::poll
