// Round trips between two processes: one message there, the same size back, one at a time.
//
//   rtt server [--port 0] [--port-file F] [--bind ADDR] [--mode block|poll|epoll] [--clients 1]
//   rtt client --port N [--host ADDR] [--size 64] [--seconds 1] [--warmup 0.2]
//              [--mode block|poll|epoll]
//
// The client prints the line that counts; the server prints how many messages it echoed.

#include <unistd.h>
#include <cstring>
#include <vector>

#include "bench_util.h"
#include "histogram.h"

namespace {

using bench::Channel;
using bench::die_plain;
using bench::now_ns;

// What the client says first. Both ends are the same binary on the same machine or on two of the
// same kind, so the struct travels as it is.
struct Hello {
  char magic[8];
  uint64_t size;
};
constexpr char kMagic[8] = {'r', 't', 't', 'h', 'e', 'l', 'l', 'o'};
constexpr uint64_t kMaxSize = uint64_t{64} << 20;

uint64_t echo(Channel& channel) {
  Hello hello;
  if (!channel.recv_all(&hello, sizeof hello)) return 0;
  if (std::memcmp(hello.magic, kMagic, sizeof kMagic) != 0 || hello.size == 0 ||
      hello.size > kMaxSize)
    die_plain("rtt server: the client does not speak rtt");
  std::vector<char> message(hello.size);
  uint64_t messages = 0;
  while (channel.recv_all(message.data(), message.size())) {
    channel.send_all(message.data(), message.size());
    ++messages;
  }
  return messages;
}

int run_server(bench::Args args) {
  auto port = static_cast<uint16_t>(args.size("--port", 0));
  std::string port_file = args.text("--port-file", "");
  std::string bind = args.text("--bind", "127.0.0.1");
  bench::Mode mode = bench::parse_mode(args.text("--mode", "block"));
  uint64_t clients = args.size("--clients", 1);
  args.finish();

  int listener = bench::listen_on(bind, port, port_file);
  uint64_t messages = 0;
  for (uint64_t i = 0; i < clients; ++i) {
    Channel channel(bench::accept_one(listener), mode);
    bench::set_nodelay(channel.fd());
    messages += echo(channel);
  }
  close(listener);
  bench::JsonLine("rtt server")
      .add("mode", bench::mode_name(mode))
      .add("messages", messages)
      .print();
  return 0;
}

class Pinger {
 public:
  Pinger(Channel& channel, uint64_t size) : channel_(channel), out_(size, 'p'), in_(size) {}

  void round_trip() {
    ++count_;
    // Each message differs from the one before, so an echo of stale bytes is noticed.
    out_[0] = static_cast<char>(count_);
    channel_.send_all(out_.data(), out_.size());
    if (!channel_.recv_all(in_.data(), in_.size())) die_plain("rtt client: the server went away");
    if (in_[0] != out_[0]) die_plain("rtt client: the echo is not what was sent");
  }
  uint64_t count() const { return count_; }

 private:
  Channel& channel_;
  std::vector<char> out_;
  std::vector<char> in_;
  uint64_t count_ = 0;
};

int run_client(bench::Args args) {
  std::string host = args.text("--host", "127.0.0.1");
  auto port = static_cast<uint16_t>(args.size("--port", 0));
  uint64_t size = args.size("--size", 64);
  double seconds = args.real("--seconds", 1);
  double warmup = args.real("--warmup", bench::kWarmupSeconds);
  bench::Mode mode = bench::parse_mode(args.text("--mode", "block"));
  args.finish();
  if (port == 0 || size == 0 || size > kMaxSize) bench::die_usage("rtt client: --port, --size?");

  Channel channel(bench::connect_to(host, port), mode);
  bench::set_nodelay(channel.fd());
  Hello hello{{}, size};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  channel.send_all(&hello, sizeof hello);

  Pinger pinger(channel, size);
  const uint64_t warm_until = now_ns() + static_cast<uint64_t>(warmup * 1e9);
  while (now_ns() < warm_until || pinger.count() < bench::kWarmupMessages) pinger.round_trip();

  bench::Histogram times;
  const uint64_t start = now_ns();
  const uint64_t end = start + static_cast<uint64_t>(seconds * 1e9);
  // One look at the clock per message: the end of one round trip is the start of the next.
  uint64_t last = start;
  while (last < end) {
    pinger.round_trip();
    uint64_t now = now_ns();
    times.add(now - last);
    last = now;
  }
  double elapsed = static_cast<double>(last - start) / 1e9;
  bench::JsonLine("rtt")
      .add("mode", bench::mode_name(mode))
      .add("size", size)
      .add("messages", times.count())
      .add("seconds", elapsed)
      .add("messages_per_s", static_cast<double>(times.count()) / elapsed)
      .add("mean_us", times.mean() / 1e3)
      .add("p50_us", static_cast<double>(times.quantile(0.50)) / 1e3)
      .add("p99_us", static_cast<double>(times.quantile(0.99)) / 1e3)
      .add("min_us", static_cast<double>(times.min()) / 1e3)
      .add("max_us", static_cast<double>(times.max()) / 1e3)
      .print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string role = argc > 1 ? argv[1] : "";
  if (role == "server") return run_server(bench::Args(argc, argv, 2));
  if (role == "client") return run_client(bench::Args(argc, argv, 2));
  bench::die_usage("usage: rtt server|client [--name value]...");
}
