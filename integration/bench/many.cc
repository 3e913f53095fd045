// Many connections, few of them busy: what do the others cost?
//
//   many server [--port 0] [--port-file F] [--bind ADDR]
//   many client --port N [--host ADDR] [--connections 100] [--hot 64] [--rounds 20] [--settle 2]
//   [--seconds 2]
//
// The client opens all connections and makes --rounds round trips of 64 bytes on each. Then the
// first --hot go on in turn, for --settle seconds; it says "steady" (on stderr), and they go on for
// --seconds more, in which somebody looks at both processes from outside. The server ends with its
// last connection.

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <vector>

#include "bench_util.h"

namespace {

using bench::Channel;
using bench::die;
using bench::now_ns;

constexpr size_t kMessage = 64;

// Level-triggered and one thread, as many servers are. Each connection echoes a whole message at a
// time.
class Server {
 public:
  explicit Server(int listener) : listener_(listener), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ < 0) die("epoll_create1");
    watch(listener_);
  }
  ~Server() { close(epoll_); }

  void run() {
    epoll_event events[64];
    while (open_ > 0 || accepted_ == 0) {
      int ready = epoll_wait(epoll_, events, 64, -1);
      if (ready < 0 && errno != EINTR) die("epoll_wait");
      for (int i = 0; i < ready; ++i)
        events[i].data.fd == listener_ ? accept_new() : echo(events[i].data.fd);
    }
  }
  uint64_t accepted() const { return accepted_; }
  uint64_t messages() const { return messages_; }

 private:
  void watch(int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) die("epoll_ctl");
  }

  void accept_new() {
    int fd = bench::accept_one(listener_);
    bench::set_nodelay(fd);
    watch(fd);
    ++open_;
    ++accepted_;
  }

  void echo(int fd) {
    char message[kMessage];
    ssize_t got = recv(fd, message, sizeof message, MSG_WAITALL);
    if (got < 0) die("recv");
    if (got == static_cast<ssize_t>(sizeof message)) {
      if (send(fd, message, sizeof message, MSG_NOSIGNAL) != got) die("send");
      ++messages_;
      return;
    }
    if (got > 0) bench::die_plain("many server: the stream ended within a message");
    close(fd);
    --open_;
  }

  int listener_;
  int epoll_;
  uint64_t open_ = 0;
  uint64_t accepted_ = 0;
  uint64_t messages_ = 0;
};

int run_server(bench::Args args) {
  auto port = static_cast<uint16_t>(args.size("--port", 0));
  std::string port_file = args.text("--port-file", "");
  std::string bind = args.text("--bind", "127.0.0.1");
  args.finish();

  int listener = bench::listen_on(bind, port, port_file);
  Server server(listener);
  server.run();
  close(listener);
  bench::JsonLine("many server")
      .add("connections", server.accepted())
      .add("messages", server.messages())
      .print();
  return 0;
}

void round_trip(Channel& channel) {
  char message[kMessage] = {'m'};
  channel.send_all(message, sizeof message);
  if (!channel.recv_all(message, sizeof message))
    bench::die_plain("many client: the server went away");
}

// The first `hot` in turn, until `end`.
uint64_t keep_busy(std::vector<std::unique_ptr<Channel>>& channels, uint64_t hot, uint64_t end) {
  uint64_t messages = 0;
  while (now_ns() < end) {
    for (uint64_t i = 0; i < hot; ++i) round_trip(*channels[i]);
    messages += hot;
  }
  return messages;
}

uint64_t after(double seconds) { return now_ns() + static_cast<uint64_t>(seconds * 1e9); }

int run_client(bench::Args args) {
  std::string host = args.text("--host", "127.0.0.1");
  auto port = static_cast<uint16_t>(args.size("--port", 0));
  uint64_t connections = args.size("--connections", 100);
  uint64_t hot = std::min(args.size("--hot", 64), connections);
  uint64_t rounds = args.size("--rounds", 20);
  double settle = args.real("--settle", 2);
  double seconds = args.real("--seconds", 2);
  args.finish();
  if (port == 0 || hot == 0) bench::die_usage("many client: --port, --connections, --hot?");

  std::vector<std::unique_ptr<Channel>> channels;
  for (uint64_t i = 0; i < connections; ++i) {
    channels.push_back(
        std::make_unique<Channel>(bench::connect_to(host, port), bench::Mode::kBlock));
    bench::set_nodelay(channels.back()->fd());
  }
  // The last first: those that stay busy are the youngest in use when the others are done.
  for (uint64_t i = connections; i-- > 0;)
    for (uint64_t n = 0; n < rounds; ++n) round_trip(*channels[i]);
  keep_busy(channels, hot, after(settle));
  std::fputs("steady\n", stderr);
  uint64_t start = now_ns();
  uint64_t messages = keep_busy(channels, hot, after(seconds));
  bench::JsonLine("many")
      .add("connections", connections)
      .add("hot", hot)
      .add("messages_per_s",
           static_cast<double>(messages) / (static_cast<double>(now_ns() - start) / 1e9))
      .print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string role = argc > 1 ? argv[1] : "";
  if (role == "server") return run_server(bench::Args(argc, argv, 2));
  if (role == "client") return run_client(bench::Args(argc, argv, 2));
  bench::die_usage("usage: many server|client [--name value]...");
}
