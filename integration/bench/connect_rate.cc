// Short connections: connect, one 64-byte request, one 64-byte reply, close.
//
//   connect_rate server [--port 0] [--port-file F] [--bind ADDR] [--threads 1] [--mode
//   thread|epoll] connect_rate client --port N [--host ADDR] [--threads 1] [--seconds 1]
//   [--connections 25000]
//
// The server accepts in --threads threads (one per client thread is the fair number), or serves
// everything from one epoll loop. The client stops at --seconds or --connections, whichever comes
// first: it closes first, so each connection leaves a port in TIME_WAIT, and beyond some 28,000 of
// them the kernel's search for a free port would be what is measured. Each run uses a fresh server
// port and so a fresh set of them. The client's last connection tells the server to end.

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "bench_util.h"
#include "histogram.h"

namespace {

using bench::Channel;
using bench::die;
using bench::die_plain;
using bench::Mode;
using bench::now_ns;

struct Request {
  char word[8];
  char padding[56];
};
static_assert(sizeof(Request) == 64);
constexpr char kWork[8] = {'r', 'e', 'q', 'u', 'e', 's', 't', '\0'};
constexpr char kQuit[8] = {'q', 'u', 'i', 't', 'n', 'o', 'w', '\0'};

bool is_quit(const Request& request) { return std::memcmp(request.word, kQuit, sizeof kQuit) == 0; }

// ---- server ------------------------------------------------------------------------------------

class ThreadServer {
 public:
  explicit ThreadServer(int listener) : listener_(listener) {}

  void run(uint64_t threads) {
    std::vector<std::thread> pool;
    for (uint64_t i = 0; i < threads; ++i) pool.emplace_back([this] { loop(); });
    for (std::thread& thread : pool) thread.join();
  }
  uint64_t served() const { return served_.load(std::memory_order_relaxed); }

 private:
  void loop() {
    for (;;) {
      int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) {
        // quit() shut the listener down: acquire pairs with its release, so that whoever gets the
        // error also sees the reason.
        if (quit_.load(std::memory_order_acquire)) return;
        if (errno == EINTR || errno == ECONNABORTED) continue;
        die("accept");
      }
      Channel channel(fd, Mode::kBlock);
      Request request;
      if (!channel.recv_all(&request, sizeof request)) continue;
      channel.send_all(&request, sizeof request);
      if (is_quit(request)) {
        quit_.store(true, std::memory_order_release);  // pairs with the acquire in loop()
        shutdown(listener_, SHUT_RDWR);                // wakes every thread in accept
        return;
      }
      served_.fetch_add(1, std::memory_order_relaxed);  // a count, read after join
      // The client closes first, as the header says; its end is this connection's end.
      channel.recv_some(&request, sizeof request);
    }
  }

  int listener_;
  std::atomic<bool> quit_{false};
  std::atomic<uint64_t> served_{0};
};

class EpollServer {
 public:
  explicit EpollServer(int listener) : listener_(listener), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ < 0) die("epoll_create1");
    if (fcntl(listener_, F_SETFL, O_NONBLOCK) != 0) die("O_NONBLOCK");
    watch(listener_);
  }
  ~EpollServer() { close(epoll_); }
  EpollServer(const EpollServer&) = delete;
  EpollServer& operator=(const EpollServer&) = delete;

  void run() {
    epoll_event events[64];
    while (!quit_) {
      int ready = epoll_wait(epoll_, events, 64, -1);
      if (ready < 0 && errno != EINTR) die("epoll_wait");
      for (int i = 0; i < ready; ++i) {
        if (events[i].data.fd == listener_)
          accept_all();
        else
          serve(events[i].data.fd);
      }
    }
  }
  uint64_t served() const { return served_; }

 private:
  void watch(int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) die("epoll_ctl");
  }

  void accept_all() {
    for (;;) {
      int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd >= 0)
        watch(fd);
      else if (errno == EAGAIN)
        return;
      else if (errno != EINTR && errno != ECONNABORTED)
        die("accept");
    }
  }

  void serve(int fd) {
    Request request;
    ssize_t got = recv(fd, &request, sizeof request, 0);
    if (got == static_cast<ssize_t>(sizeof request)) {
      if (send(fd, &request, sizeof request, MSG_NOSIGNAL) != got) die("send");
      if (is_quit(request))
        quit_ = true;
      else
        ++served_;
    } else if (got == 0) {
      close(fd);
    } else if (got > 0) {
      die_plain("connect_rate server: a request came in pieces");  // 64 bytes on loopback do not
    } else if (errno != EAGAIN && errno != EINTR) {
      die("recv");
    }
  }

  int listener_;
  int epoll_;
  bool quit_ = false;
  uint64_t served_ = 0;
};

int run_server(bench::Args args) {
  auto port = static_cast<uint16_t>(args.size("--port", 0));
  std::string port_file = args.text("--port-file", "");
  std::string bind = args.text("--bind", "127.0.0.1");
  std::string mode = args.text("--mode", "thread");
  uint64_t threads = args.size("--threads", 1);
  args.finish();

  uint64_t served = 0;
  if (mode == "thread") {
    int listener = bench::listen_on(bind, port, port_file);
    ThreadServer server(listener);
    server.run(threads);
    served = server.served();
    close(listener);
  } else if (mode == "epoll") {
    int listener = bench::listen_on(bind, port, port_file);
    EpollServer server(listener);
    server.run();
    served = server.served();
    close(listener);
  } else {
    bench::die_usage("--mode takes thread or epoll, not " + mode);
  }
  bench::JsonLine("connect_rate server").add("mode", mode).add("served", served).print();
  return 0;
}

// ---- client ------------------------------------------------------------------------------------

void one_connection(const std::string& host, uint16_t port, const char* word) {
  Channel channel(bench::connect_to(host, port), Mode::kBlock);
  Request request{};
  std::memcpy(request.word, word, sizeof request.word);
  channel.send_all(&request, sizeof request);
  Request reply;
  if (!channel.recv_all(&reply, sizeof reply)) die_plain("connect_rate client: no reply");
  if (std::memcmp(&request, &reply, sizeof reply) != 0)
    die_plain("connect_rate client: the reply is not the request");
}

int run_client(bench::Args args) {
  std::string host = args.text("--host", "127.0.0.1");
  auto port = static_cast<uint16_t>(args.size("--port", 0));
  uint64_t threads = args.size("--threads", 1);
  uint64_t limit = args.size("--connections", 25000);
  double seconds = args.real("--seconds", 1);
  args.finish();
  if (port == 0 || threads == 0) bench::die_usage("connect_rate client: --port, --threads?");

  std::atomic<uint64_t> started{0};
  std::vector<std::unique_ptr<bench::Histogram>> times(threads);
  std::vector<std::thread> pool;
  const uint64_t start = now_ns();
  const uint64_t end = start + static_cast<uint64_t>(seconds * 1e9);
  for (uint64_t i = 0; i < threads; ++i) {
    times[i] = std::make_unique<bench::Histogram>();
    pool.emplace_back([&, mine = times[i].get()] {
      uint64_t last = now_ns();
      // Relaxed: the counter only shares out the limit; join() orders the results.
      while (last < end && started.fetch_add(1, std::memory_order_relaxed) < limit) {
        one_connection(host, port, kWork);
        uint64_t now = now_ns();
        mine->add(now - last);
        last = now;
      }
    });
  }
  for (std::thread& thread : pool) thread.join();
  double elapsed = static_cast<double>(now_ns() - start) / 1e9;
  one_connection(host, port, kQuit);

  for (uint64_t i = 1; i < threads; ++i) times[0]->merge(*times[i]);
  const bench::Histogram& all = *times[0];
  bench::JsonLine("connect_rate")
      .add("threads", threads)
      .add("connections", all.count())
      .add("seconds", elapsed)
      .add("connections_per_s", static_cast<double>(all.count()) / elapsed)
      .add("p50_us", static_cast<double>(all.quantile(0.50)) / 1e3)
      .add("p99_us", static_cast<double>(all.quantile(0.99)) / 1e3)
      .print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string role = argc > 1 ? argv[1] : "";
  if (role == "server") return run_server(bench::Args(argc, argv, 2));
  if (role == "client") return run_client(bench::Args(argc, argv, 2));
  bench::die_usage("usage: connect_rate server|client [--name value]...");
}
