// What the measuring programs share: arguments, the clock, sockets, and one line of JSON.
//
// The programs know nothing of librsock: they use the sockets API as any program does, so that the
// same binary is measured with and without LD_PRELOAD. Errors end the program with a message and
// status 1 (a measurement that half worked is worthless); a usage error ends it with status 2.
//
// Thread safety: the functions are; an object belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace bench {

// Every program warms up for at least this long and this many messages before it measures, so that
// caches, TCP windows and any acceleration that starts on busy connections have settled.
constexpr double kWarmupSeconds = 0.2;
constexpr uint64_t kWarmupMessages = 1000;

[[noreturn]] void die(const char* what);               // with errno's text
[[noreturn]] void die_plain(const std::string& what);  // without
[[noreturn]] void die_usage(const std::string& what);  // status 2

uint64_t now_ns();

// `--name value` pairs. Sizes take the suffixes K, M and G (powers of 1024).
class Args {
 public:
  Args(int argc, char** argv, int first);
  std::string text(const std::string& name, const std::string& fallback);
  uint64_t size(const std::string& name, uint64_t fallback);
  double real(const std::string& name, double fallback);
  // Call after the last lookup: ends the program if an argument was never asked for. Also arms an
  // alarm (--timeout, seconds), so that a peer that never comes cannot leave us behind for ever.
  void finish();

 private:
  std::map<std::string, std::string> given_;
};

// One flat JSON object, printed on one line.
class JsonLine {
 public:
  explicit JsonLine(std::string_view tool) { add("tool", tool); }
  JsonLine& add(std::string_view name, std::string_view value);
  JsonLine& add(std::string_view name, const char* value) {
    return add(name, std::string_view(value));
  }
  JsonLine& add(std::string_view name, double value);
  JsonLine& add(std::string_view name, uint64_t value);
  JsonLine& add(std::string_view name, bool value);
  void print();

 private:
  void key(std::string_view name);
  std::string body_;
};

// Listens on address and port (0: any) and writes the port's number to port_file, by rename, so
// that whoever waits for the file never reads half of it.
int listen_on(const std::string& address, uint16_t port, const std::string& port_file);
int connect_to(const std::string& address, uint16_t port);
int accept_one(int listener);
void set_nodelay(int fd);

enum class Mode { kBlock, kPoll, kEpoll };
Mode parse_mode(const std::string& text);
const char* mode_name(Mode mode);

// A connected socket, used the way a program of the given kind uses it: blocking calls, or
// non-blocking calls with poll or epoll before each. Owns the descriptor.
class Channel {
 public:
  Channel(int fd, Mode mode);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  void send_all(const void* data, size_t size);
  // Up to size bytes; 0 at the end of the stream.
  size_t recv_some(void* data, size_t size);
  // Exactly size bytes; false if the stream ended before the first of them.
  bool recv_all(void* data, size_t size);
  int fd() const { return fd_; }

 private:
  void wait_for(short events);

  int fd_;
  int epoll_fd_ = -1;
  Mode mode_;
  short epoll_events_ = 0;
};

}  // namespace bench
