// One-way messages: the client sends messages of one size as fast as it can, the server counts.
//
//   stream server [--port 0] [--port-file F] [--bind ADDR] [--mode block|poll|epoll] [--warmup 0.2]
//   stream client --port N [--host ADDR] [--size 64] [--seconds 1] [--mode block|poll|epoll]
//                 [--nodelay 0|1] [--checksum 0|1] [--warmup 0.2]
//
// Every send() and recv() asks for one message. The figures are the receiver's: it starts to count
// after its own warm-up. With --checksum 1 both ends hash every byte in order (the client fills
// each message with fresh pseudo-random bytes); the client fails unless the hashes agree.

#include <sys/socket.h>
#include <unistd.h>
#include <cstring>
#include <vector>

#include "bench_util.h"

namespace {

using bench::Channel;
using bench::die_plain;
using bench::now_ns;

struct Hello {
  char magic[8];
  uint64_t size;
  uint64_t checksum;  // 0 or 1
};
constexpr char kMagic[8] = {'s', 't', 'r', 'h', 'e', 'l', 'l', 'o'};
constexpr uint64_t kMaxSize = uint64_t{64} << 20;

// The server's answer, sent back after the end of the client's stream.
struct Report {
  uint64_t total_bytes;
  uint64_t counted_bytes;
  uint64_t counted_ns;
  uint64_t hash;
};

// FNV-1a: depends on every byte and on their order, and on nothing else.
class Hash {
 public:
  void add(const char* data, size_t size) {
    for (size_t i = 0; i < size; ++i)
      value_ = (value_ ^ static_cast<unsigned char>(data[i])) * 0x100000001b3u;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

class Filler {
 public:
  void fill(std::vector<char>& message) {
    for (char& byte : message) {
      state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;  // xorshift64
      byte = static_cast<char>(state_ >> 32);
    }
  }

 private:
  uint64_t state_ = 0x9e3779b97f4a7c15u;
};

// A look at the clock costs as much as a small message on a fast path, so it is rare for them.
uint64_t messages_per_look(uint64_t size) { return size >= 65536 ? 1 : size >= 4096 ? 16 : 256; }

Report receive(Channel& channel, const Hello& hello, double warmup) {
  std::vector<char> message(hello.size);
  Hash hash;
  Report report{};
  const uint64_t look = messages_per_look(hello.size);
  const uint64_t warm_bytes = bench::kWarmupMessages * hello.size;
  const uint64_t warm_until = now_ns() + static_cast<uint64_t>(warmup * 1e9);
  uint64_t base_bytes = 0, base_ns = 0, calls = 0;
  for (;;) {
    size_t got = channel.recv_some(message.data(), message.size());
    if (got == 0) break;
    report.total_bytes += got;
    if (hello.checksum != 0) hash.add(message.data(), got);
    if (++calls % look != 0) continue;
    uint64_t now = now_ns();
    if (base_ns != 0) {
      // The last look is the end: the wait for the end of the stream is not the stream's.
      report.counted_bytes = report.total_bytes - base_bytes;
      report.counted_ns = now - base_ns;
    } else if (now >= warm_until && report.total_bytes >= warm_bytes) {
      base_ns = now;
      base_bytes = report.total_bytes;
    }
  }
  report.hash = hash.value();
  return report;
}

void print(const char* tool, bench::Mode mode, uint64_t size, const Report& report) {
  double seconds = static_cast<double>(report.counted_ns) / 1e9;
  double bytes = static_cast<double>(report.counted_bytes);
  bench::JsonLine line(tool);
  line.add("mode", bench::mode_name(mode)).add("size", size);
  line.add("total_bytes", report.total_bytes).add("seconds", seconds);
  line.add("bytes_per_s", seconds > 0 ? bytes / seconds : 0.0);
  line.add("messages_per_s", seconds > 0 ? bytes / static_cast<double>(size) / seconds : 0.0);
  line.add("hash", report.hash).print();
}

int run_server(bench::Args args) {
  auto port = static_cast<uint16_t>(args.size("--port", 0));
  std::string port_file = args.text("--port-file", "");
  std::string bind = args.text("--bind", "127.0.0.1");
  bench::Mode mode = bench::parse_mode(args.text("--mode", "block"));
  double warmup = args.real("--warmup", bench::kWarmupSeconds);
  args.finish();

  int listener = bench::listen_on(bind, port, port_file);
  Channel channel(bench::accept_one(listener), mode);
  close(listener);
  Hello hello;
  if (!channel.recv_all(&hello, sizeof hello)) die_plain("stream server: no client");
  if (std::memcmp(hello.magic, kMagic, sizeof kMagic) != 0 || hello.size == 0 ||
      hello.size > kMaxSize)
    die_plain("stream server: the client does not speak stream");
  Report report = receive(channel, hello, warmup);
  channel.send_all(&report, sizeof report);
  print("stream server", mode, hello.size, report);
  return 0;
}

int run_client(bench::Args args) {
  std::string host = args.text("--host", "127.0.0.1");
  auto port = static_cast<uint16_t>(args.size("--port", 0));
  Hello hello{{}, args.size("--size", 64), args.size("--checksum", 0)};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  bool nodelay = args.size("--nodelay", 0) != 0;
  double seconds = args.real("--seconds", 1);
  bench::Mode mode = bench::parse_mode(args.text("--mode", "block"));
  double warmup = args.real("--warmup", bench::kWarmupSeconds);
  args.finish();
  if (port == 0 || hello.size == 0 || hello.size > kMaxSize)
    bench::die_usage("stream client: --port, --size?");

  Channel channel(bench::connect_to(host, port), mode);
  if (nodelay) bench::set_nodelay(channel.fd());
  channel.send_all(&hello, sizeof hello);
  std::vector<char> message(hello.size, 's');
  Filler filler;
  Hash hash;
  const uint64_t look = messages_per_look(hello.size);
  const uint64_t end = now_ns() + static_cast<uint64_t>((warmup + seconds) * 1e9);
  uint64_t messages = 0;
  do {
    for (uint64_t i = 0; i < look; ++i) {
      if (hello.checksum != 0) {
        filler.fill(message);
        hash.add(message.data(), message.size());
      }
      channel.send_all(message.data(), message.size());
    }
    messages += look;
  } while (now_ns() < end || messages < 2 * bench::kWarmupMessages);

  if (shutdown(channel.fd(), SHUT_WR) != 0) bench::die("shutdown");
  Report report;
  if (!channel.recv_all(&report, sizeof report)) die_plain("stream client: no report");
  if (report.total_bytes != messages * hello.size)
    die_plain("stream client: sent " + std::to_string(messages * hello.size) +
              " bytes, the server received " + std::to_string(report.total_bytes));
  if (report.hash != hash.value()) die_plain("stream client: the server received other bytes");
  print("stream", mode, hello.size, report);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string role = argc > 1 ? argv[1] : "";
  if (role == "server") return run_server(bench::Args(argc, argv, 2));
  if (role == "client") return run_client(bench::Args(argc, argv, 2));
  bench::die_usage("usage: stream server|client [--name value]...");
}
