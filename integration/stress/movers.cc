#include "movers.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <shared_mutex>
#include <thread>

#include "end.h"
#include "waiter.h"

extern char** environ;

namespace stress {
namespace {

/// Calls `act` about `rate` times a second for as long as the process lives, watched under `name`.
template <typename Act>
void repeat(const char* name, int rate, uint64_t seed, Act act) {
  if (rate == 0) return;
  std::thread([=]() mutable {
    Doing* doing = new_doing(name);
    Random random(options.seed, seed, static_cast<uint64_t>(rate));
    for (;;) {
      sleep_us(static_cast<int64_t>(random.below(2'000'000 / static_cast<size_t>(rate)) + 1));
      const InCall in(doing, name, true);
      act(random, doing);
    }
  }).detach();
}

void pass_to_myself(int fd) {
  int ends[2];
  CHECKED(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
  char byte = 'x';
  iovec part{&byte, 1};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof(room);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  *reinterpret_cast<int*>(CMSG_DATA(header)) = fd;
  CHECKED(sendmsg(ends[0], &message, 0));
  CHECKED(recvmsg(ends[1], &message, MSG_CMSG_CLOEXEC));
  header = CMSG_FIRSTHDR(&message);
  if (header == nullptr) fail("no descriptor came");
  CHECKED(close(*reinterpret_cast<int*>(CMSG_DATA(header))));
  CHECKED(close(ends[0]));
  CHECKED(close(ends[1]));
}

void look_at(int fd, Random& random) {
  int value = 0;
  socklen_t size = sizeof(value);
  sockaddr_storage address;
  socklen_t address_size = sizeof(address);
  tcp_info info;
  socklen_t info_size = sizeof(info);
  struct stat status;
  switch (random.below(6)) {
    case 0:
      (void)ioctl(fd, FIONREAD, &value);
      break;
    case 1:
      (void)ioctl(fd, SIOCOUTQ, &value);
      break;
    case 2:
      (void)getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &info_size);
      break;
    case 3:
      (void)getpeername(fd, reinterpret_cast<sockaddr*>(&address), &address_size);
      break;
    case 4:
      (void)getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &value, &size);
      break;
    default:
      (void)fstat(fd, &status);
      break;
  }
}

void move_one(Random& random, Doing*) {
  const std::shared_ptr<End> end = random_end(random);
  if (end == nullptr) return;
  const std::shared_lock lock(end->fds);
  const int fd = end->fd;
  if (fd < 0) return;
  counts.moves++;
  const int on = 1;
  switch (random.below(16)) {
    case 0: {
      const int copy = static_cast<int>(CHECKED(fcntl(fd, F_DUPFD_CLOEXEC, 0)));
      sleep_us(static_cast<int64_t>(random.size(3'000)));
      CHECKED(close(copy));
      break;
    }
    case 1: {  // dup3 onto the number of something else
      const int other = static_cast<int>(CHECKED(open("/dev/null", O_RDONLY | O_CLOEXEC)));
      CHECKED(dup3(fd, other, O_CLOEXEC));
      CHECKED(close(other));
      break;
    }
    case 2:
    case 3:
    case 4:
      if (!end->toggles) {
        look_at(fd, random);
        break;
      }
      CHECKED(fcntl(fd, F_SETFL, O_RDWR | (random.percent(50) ? O_NONBLOCK : 0)));
      break;
    case 5:
      (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      break;
    case 6: {  // not SO_RCVBUF: TCP drops what is on its way to a window that shrank, and stands
               // still for seconds
      const int size = static_cast<int>(4096 + random.size(1 << 20));
      (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
      break;
    }
    case 7:
      if (random.percent(20)) pass_to_myself(fd);
      break;
    case 8:
      if (random.percent(20)) {  // SIGIO would be the kernel's to send; nobody owns the descriptor
        int flags = static_cast<int>(CHECKED(fcntl(fd, F_GETFL)));
        CHECKED(fcntl(fd, F_SETFL, flags | O_ASYNC));
      }
      break;
    case 9:
      if (random.percent(20)) {
        const int copy = static_cast<int>(CHECKED(fcntl(fd, F_DUPFD_CLOEXEC, 0)));
        FILE* file = fdopen(copy, "r+");
        // EAGAIN, where Linux does it: our replay waits for the peer (core/DESIGN.md, "Known
        // limits").
        if (file == nullptr && errno != EAGAIN) fail("fdopen: %s", errno_name(errno));
        if (file == nullptr ? close(copy) != 0 : fclose(file) != 0)
          fail("fclose: %s", errno_name(errno));
      }
      break;
    case 10:
      // EINVAL with several threads; but the library sets everything down before it, ends its own,
      // and lifts again.
      if (random.percent(10)) (void)unshare(CLONE_THREAD);
      break;
    default:
      look_at(fd, random);
      break;
  }
}

void fork_one(Random& random, Doing*) {
  const int64_t life = random.percent(50) ? 0 : static_cast<int64_t>(random.size(30'000));
  const pid_t child = fork();
  if (child < 0) fail("fork: %s", errno_name(errno));
  if (child == 0) {
    if (life > 0) sleep_us(life);
    _exit(0);
  }
  counts.forks++;
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0) fail("a forked child ended with %#x", static_cast<unsigned>(status));
}

void spawn_one(Random& random, Doing*) {
  counts.spawns++;
  int status = 0;
  pid_t child = -1;
  char program[] = "/bin/true";
  char* arguments[] = {program, nullptr};
  switch (random.below(4)) {
    case 0:
      status = system("true");
      break;
    case 1: {
      FILE* pipe = popen("true", "r");
      if (pipe == nullptr) fail("popen: %s", errno_name(errno));
      status = pclose(pipe);
      break;
    }
    case 2:
      child = vfork();
      if (child == 0) {
        execv(program, arguments);
        _exit(1);
      }
      break;
    default:
      if (posix_spawn(&child, program, nullptr, nullptr, arguments, environ) != 0)
        fail("posix_spawn");
      break;
  }
  if (child > 0) {
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  }
  if (status != 0) fail("a spawned program ended with %#x", static_cast<unsigned>(status));
}

std::atomic<uint64_t> handled{0};
void on_signal(int) { handled.fetch_add(1, std::memory_order_relaxed); }

/// To a random thread of the process: that of the library, too, blocks what is the program's.
void signal_one(Random& random, Doing*) {
  DIR* tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return;
  std::vector<int> ids;
  while (const dirent* entry = readdir(tasks)) {
    if (const int id = atoi(entry->d_name); id > 0) ids.push_back(id);
  }
  closedir(tasks);
  for (int i = 0; i < 4 && !ids.empty(); ++i) {
    const int id = ids[random.below(ids.size())];
    if (syscall(SYS_tgkill, getpid(), id, random.percent(50) ? SIGUSR1 : SIGUSR2) == 0)
      counts.signals++;
  }
}

}  // namespace

void start_movers(bool server) {
  const Mix& mix = options.mix;
  struct sigaction action {};
  action.sa_handler = on_signal;
  CHECKED(sigaction(SIGUSR1, &action, nullptr));
  action.sa_flags = SA_RESTART;
  CHECKED(sigaction(SIGUSR2, &action, nullptr));
  const uint64_t seed = server ? 1000 : 2000;
  repeat("mover", mix.moves, seed + 1, move_one);
  repeat("forker", mix.forks, seed + 2, fork_one);
  repeat("spawner", mix.spawns, seed + 3, spawn_one);
  repeat("signaller", mix.signals / 4, seed + 4, signal_one);
  repeat("poker", mix.pokes, seed + 5, [](Random& random, Doing*) { poke_one(random); });
  repeat("controller", mix.ctls, seed + 6, [](Random& random, Doing*) {
    if (const auto epoll = random_epoll(random)) epoll->disturb(random);
  });
}

}  // namespace stress
