// Output, and the watch: one thread that looks at what the others wait in.

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <mutex>
#include <thread>

#include "stress.h"

namespace stress {
namespace {

constexpr int kMost = 4096;
Doing* table;  // shared with forked children
std::once_flag table_made;

int control_fd = -1;
std::atomic<bool> bye{false};

[[noreturn]] void stalled(const char* who) {
  say("STALLED: %s", who);
  if (strcmp(who, "the other role") != 0)
    (void)!send(control_fd, "S", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  for (int i = 0; i < kMost; ++i) {
    const Doing& d = table[i];
    if (!d.used.load()) continue;
    const char* call = d.call.load();
    say("  %-10s slot %2d life %4d fd %3d: %-28s %.1f s since progress", d.name.load(),
        d.slot.load(), d.life.load(), d.fd.load(), call != nullptr ? call : "busy",
        static_cast<double>(now_ns() - d.since.load()) / 1e9);
  }
  if (dump_streams != nullptr) dump_streams();
  say("DUMPED");
  // The driver takes backtraces of both roles meanwhile, and ends them.
  sleep_us(60'000'000);
  fail("stalled: %s", who);
}

void watch() {
  const int64_t limit = static_cast<int64_t>(options.stall * 1e9);
  for (;;) {
    pollfd p{control_fd, POLLIN, 0};
    if (poll(&p, 1, 250) > 0) {
      char word = 0;
      const ssize_t n = recv(control_fd, &word, 1, MSG_DONTWAIT);
      if (n == 1 && word == 'S') stalled("the other role");
      if (n == 1 && word == 'B') bye.store(true);
      if (n == 0) return;  // the other role is over
    }
    const int64_t now = now_ns();
    for (int i = 0; i < kMost; ++i) {
      const Doing& d = table[i];
      if (!d.used.load()) continue;
      const char* call = d.call.load();
      // Twice: the call may have ended, and the next begun, between two loads.
      if (call == nullptr || now - d.since.load() < limit || d.call.load() != call) continue;
      stalled(d.name.load());
    }
    const char* more = look_further != nullptr ? look_further(limit) : nullptr;
    if (more != nullptr) stalled(more);
  }
}

void put_line(const char* format, va_list arguments) {
  char line[512];
  int size = vsnprintf(line, sizeof(line) - 1, format, arguments);
  if (size > static_cast<int>(sizeof(line)) - 2) size = sizeof(line) - 2;
  line[size] = '\n';
  (void)!write(STDOUT_FILENO, line, static_cast<size_t>(size) + 1);
}

}  // namespace

void (*dump_streams)() = nullptr;
const char* (*look_further)(int64_t) = nullptr;

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void sleep_us(int64_t us) {
  timespec left{us / 1'000'000, us % 1'000'000 * 1000};
  while (nanosleep(&left, &left) < 0 && errno == EINTR) {
  }
}

const char* errno_name(int error) {
  const char* name = strerrorname_np(error);
  return name != nullptr ? name : "unknown errno";
}

void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  put_line(format, arguments);
  va_end(arguments);
}

void fail(const char* format, ...) {
  char why[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(why, sizeof(why), format, arguments);
  va_end(arguments);
  say("FAILED %s (pid %d, seed %llu)", why, getpid(),
      static_cast<unsigned long long>(options.seed));
  _exit(99);
}

long checked(long result, const char* what, int line) {
  if (result < 0) fail("line %d: %s: %s", line, what, errno_name(errno));
  return result;
}

Doing* new_doing(const char* name) {
  std::call_once(table_made, [] {
    void* memory = mmap(nullptr, kMost * sizeof(Doing), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    table = new (memory) Doing[kMost];
  });
  for (int i = 0; i < kMost; ++i) {
    bool used = false;
    if (!table[i].used.compare_exchange_strong(used, true)) continue;
    table[i].call.store(nullptr);
    table[i].since.store(now_ns());
    table[i].name.store(name);
    table[i].slot.store(-1);
    table[i].life.store(-1);
    table[i].fd.store(-1);
    return &table[i];
  }
  fail("too many threads");
}

void give_back(Doing* doing) {
  doing->call.store(nullptr);
  doing->used.store(false);
}

void start_watch(int control) {
  control_fd = control;
  give_back(new_doing("watch"));
  std::thread(watch).detach();
}

void say_bye() { (void)!send(control_fd, "B", 1, MSG_NOSIGNAL); }

void wait_for_bye() {
  while (!bye.load()) sleep_us(20'000);
}

}  // namespace stress
