// A randomised stress of readiness: `stress server|client|alone [seed=N] [seconds=S] [slots=N]
// [mix=NAME] [stall=S]`.
//
// Slots of the client make one connection after the other; both ends move known bytes and check
// each. Every wait is one of all kinds, everything that can happen to a stream beside it happens
// (mix=), and nobody may sleep while there is something to do. Started by run_stress, which says
// what a stalled process was waiting in.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <thread>

#include "end.h"
#include "movers.h"
#include "pool.h"
#include "stress.h"
#include "waiter.h"

namespace stress {
namespace {

constexpr uint32_t kMagic = 0x73747273;
struct Header {
  uint32_t magic, slot, life, reserved;
};

std::atomic<int> serving{0};

void run_threads(const std::shared_ptr<End>& end, Random& random) {
  if (random.percent(50)) {
    Waiter(*end, true, true, random).run();
    return;
  }
  // A reader and a writer.
  end->writer_doing = new_doing(end->client ? "client out" : "server out");
  end->writer_doing->slot = end->plan.slot;
  end->writer_doing->life = end->plan.life;
  end->writer_doing->fd = end->write_fd;
  Random other(random.next());
  std::thread writer([&] { Waiter(*end, false, true, other).run(); });
  Waiter(*end, true, false, random).run();
  {
    const InCall in(end->doing, nullptr);
    writer.join();
  }
  give_back(end->writer_doing);
  end->writer_doing = end->doing;
}

/// A child has the stream to itself, as a server that forks for each connection.
void run_in_child(const std::shared_ptr<End>& end, Random& random) {
  const pid_t child = fork();
  if (child < 0) fail("fork: %s", errno_name(errno));
  if (child == 0) {
    in_child = true;
    // Other streams' ends must not wait for this process.
    int kept[] = {2, known_file(), end->fd, end->write_fd};
    std::sort(std::begin(kept), std::end(kept));
    for (size_t i = 0; i < std::size(kept); ++i) {
      const unsigned from = static_cast<unsigned>(kept[i]) + 1;
      const unsigned to = i + 1 < std::size(kept) ? static_cast<unsigned>(kept[i + 1]) : ~0u;
      if (to > from) (void)close_range(from, to == ~0u ? to : to - 1, 0);
    }
    Waiter(*end, true, true, random).run();
    end->close_all();
    _exit(0);
  }
  end->close_all();
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0) fail("a serving child ended with %#x", static_cast<unsigned>(status));
}

/// Bytes of a peer that has ended before the fork stay with the parent (core/DESIGN.md, "Known
/// limits"): here it can't have, because it waits for a turn of ours.
bool may_fork(const Plan& plan, bool client) {
  if (plan.shape != Shape::kExchange || plan.rude != 0) return false;
  const auto& theirs = client ? plan.from_server : plan.from_client;
  const size_t last =
      static_cast<size_t>(std::find(theirs.begin(), theirs.end(), theirs.back()) - theirs.begin());
  if (client) return plan.from_client[last] > 0;
  return last > 0 && plan.from_server[last - 1] > 0;
}

void live(int fd, bool client, const Plan& plan) {
  const auto end = std::make_shared<End>(fd, client, plan);
  Random random(options.seed * 2 + client, static_cast<uint64_t>(plan.slot),
                static_cast<uint64_t>(plan.life));
  if (may_fork(plan, client) && random.percent(2 * options.mix.served_by_fork)) {
    run_in_child(end, random);
  } else {
    publish(end);
    if (random.percent(options.mix.pooled)) {
      serve_by_pool(end, random);
    } else {
      run_threads(end, random);
    }
    withdraw(end.get());
    end->close_all();
  }
  counts.lives++;
}

// ---- the server ----

void serve(int fd) {
  Doing* doing = new_doing("greeting");
  doing->fd = fd;
  Header header{};
  {
    const InCall in(doing, "the header", true);
    for (size_t got = 0; got < sizeof(header);) {
      const ssize_t n = recv(fd, reinterpret_cast<char*>(&header) + got, sizeof(header) - got, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) fail("header: %zd %s", n, errno_name(errno));
      got += static_cast<size_t>(n);
    }
  }
  give_back(doing);
  if (header.magic != kMagic) fail("a strange header");
  live(fd, false, make_plan(static_cast<int>(header.slot), static_cast<int>(header.life)));
  serving--;
}

void accept_all(int listener) {
  Random random(options.seed, 4711);
  const int epfd = static_cast<int>(CHECKED(epoll_create1(EPOLL_CLOEXEC)));
  epoll_event event{EPOLLIN, {}};
  CHECKED(epoll_ctl(epfd, EPOLL_CTL_ADD, listener, &event));
  for (;;) {
    pollfd p{listener, POLLIN, 0};
    const size_t way = random.below(3);
    if (way == 0) (void)poll(&p, 1, -1);
    if (way == 1) (void)epoll_wait(epfd, &event, 1, -1);
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0 && errno == EINTR) continue;
    CHECKED(fd);
    serving++;
    std::thread(serve, fd).detach();
  }
}

int listen_somewhere(sockaddr_in* address) {
  socklen_t size = sizeof(*address);
  *address = {};
  address->sin_family = AF_INET;
  address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int listener = static_cast<int>(CHECKED(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  CHECKED(bind(listener, reinterpret_cast<sockaddr*>(address), size));
  CHECKED(listen(listener, 128));
  CHECKED(getsockname(listener, reinterpret_cast<sockaddr*>(address), &size));
  return listener;
}

// ---- the client ----

int connect_somehow(const sockaddr_in& address, Random& random) {
  const bool later = random.percent(30);
  const int fd = static_cast<int>(
      CHECKED(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | (later ? SOCK_NONBLOCK : 0), 0)));
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) fail("connect: %s", errno_name(errno));
    pollfd p{fd, POLLOUT, 0};
    while (poll(&p, 1, -1) <= 0) {
    }
    int error = 0;
    socklen_t size = sizeof(error);
    CHECKED(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
    if (error != 0) fail("connect: %s", errno_name(error));
  }
  if (later) CHECKED(fcntl(fd, F_SETFL, O_RDWR));
  return fd;
}

void run_slot(sockaddr_in address, int slot, int64_t until) {
  Random random(options.seed, static_cast<uint64_t>(slot), 99);
  for (int life = 0; now_ns() < until; ++life) {
    const int fd = connect_somehow(address, random);
    const Header header{kMagic, static_cast<uint32_t>(slot), static_cast<uint32_t>(life), 0};
    for (size_t done = 0; done < sizeof(header);) {
      const ssize_t n = send(fd, reinterpret_cast<const char*>(&header) + done,
                             sizeof(header) - done, MSG_NOSIGNAL);
      if (n < 0 && errno != EINTR) fail("header: %s", errno_name(errno));
      if (n > 0) done += static_cast<size_t>(n);
    }
    live(fd, true, make_plan(slot, life));
    if (random.below(20) == 0) sleep_us(static_cast<int64_t>(random.size(20'000)));
  }
}

void run_client(const sockaddr_in& address) {
  const int64_t until = now_ns() + static_cast<int64_t>(options.seconds * 1e9);
  std::vector<std::thread> slots;
  for (int slot = 0; slot < options.slots; ++slot)
    slots.emplace_back(run_slot, address, slot, until);
  for (std::thread& slot : slots) slot.join();
}

int run(int argc, char** argv) {
  const std::string role = argc > 1 ? argv[1] : "";
  const char* control_text = getenv("PAIR_CONTROL_FD");
  if ((role != "server" && role != "client" && role != "alone") || control_text == nullptr) {
    fail("usage: %s server|client|alone [OPTION=VALUE...], started by run_stress", argv[0]);
  }
  parse_options(argc, argv, 2);
  const int control = atoi(control_text);
  CHECKED(fcntl(control, F_SETFD, FD_CLOEXEC));
  signal(SIGPIPE, SIG_IGN);
  make_known_bytes(options.seed);
  (void)known_file();
  dump_streams = dump_ends;
  look_further = missed_poke;
  start_pools();
  sockaddr_in address{};
  if (role != "client") {
    const int listener = listen_somewhere(&address);
    if (role == "server") CHECKED(send(control, &address, sizeof(address), MSG_NOSIGNAL));
    std::thread(accept_all, listener).detach();
  } else {
    CHECKED(recv(control, &address, sizeof(address), 0));
  }
  start_watch(control);
  start_movers(role == "server");
  if (role == "server") {
    wait_for_bye();
  } else {
    run_client(address);
    say_bye();
  }
  while (serving > 0) sleep_us(10'000);
  say("lives %llu bytes %llu waits %llu moves %llu forks %llu spawns %llu signals %llu false_in "
      "%llu false_out %llu",
      static_cast<unsigned long long>(counts.lives), static_cast<unsigned long long>(counts.bytes),
      static_cast<unsigned long long>(counts.waits), static_cast<unsigned long long>(counts.moves),
      static_cast<unsigned long long>(counts.forks), static_cast<unsigned long long>(counts.spawns),
      static_cast<unsigned long long>(counts.signals),
      static_cast<unsigned long long>(counts.false_in),
      static_cast<unsigned long long>(counts.false_out));
  return 0;
}

}  // namespace
}  // namespace stress

int main(int argc, char** argv) {
  const int status = stress::run(argc, argv);
  // Threads are still there that never end: no destructors for them to trip over.
  fflush(nullptr);
  quick_exit(status);
}
