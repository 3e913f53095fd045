#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "bench_util.h"

namespace bench {
namespace {

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

Address make_address(const std::string& text, uint16_t port) {
  Address address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.size = sizeof *v4;
  } else if (inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.size = sizeof *v6;
  } else {
    die_usage("not an address: " + text);
  }
  return address;
}

void write_port_file(const std::string& path, uint16_t port) {
  if (path.empty()) return;
  std::string temporary = path + ".new";
  std::FILE* file = std::fopen(temporary.c_str(), "w");
  if (file == nullptr) die(temporary.c_str());
  std::fprintf(file, "%u\n", static_cast<unsigned>(port));
  if (std::fclose(file) != 0) die(temporary.c_str());
  if (std::rename(temporary.c_str(), path.c_str()) != 0) die(path.c_str());
}

// SOCK_STREAM alone, and accept() rather than accept4(): librspreload, which these programs also
// run under, leaves the newer forms to TCP, and refuses FD_CLOEXEC. Nothing here calls exec.
int stream_socket(const Address& address) {
  int fd = socket(address.storage.ss_family, SOCK_STREAM, 0);
  if (fd < 0) die("socket");
  return fd;
}

}  // namespace

int listen_on(const std::string& text, uint16_t port, const std::string& port_file) {
  Address address = make_address(text, port);
  int fd = stream_socket(address);
  int on = 1;
  if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) die("SO_REUSEADDR");
  if (bind(fd, address.get(), address.size) != 0) die("bind");
  if (listen(fd, 1024) != 0) die("listen");
  if (getsockname(fd, address.get(), &address.size) != 0) die("getsockname");
  // The port stands at the same place in both families' addresses.
  write_port_file(port_file, ntohs(reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port));
  return fd;
}

int connect_to(const std::string& text, uint16_t port) {
  Address address = make_address(text, port);
  int fd = stream_socket(address);
  if (connect(fd, address.get(), address.size) != 0) die("connect");
  return fd;
}

int accept_one(int listener) {
  int fd;
  do {
    fd = accept(listener, nullptr, nullptr);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) die("accept");
  return fd;
}

void set_nodelay(int fd) {
  int on = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) die("TCP_NODELAY");
}

Mode parse_mode(const std::string& text) {
  if (text == "block") return Mode::kBlock;
  if (text == "poll") return Mode::kPoll;
  if (text == "epoll") return Mode::kEpoll;
  die_usage("--mode takes block, poll or epoll, not " + text);
}

const char* mode_name(Mode mode) {
  switch (mode) {
    case Mode::kBlock:
      return "block";
    case Mode::kPoll:
      return "poll";
    case Mode::kEpoll:
      return "epoll";
  }
  return "?";
}

Channel::Channel(int fd, Mode mode) : fd_(fd), mode_(mode) {
  if (mode == Mode::kBlock) return;
  int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) die("O_NONBLOCK");
  if (mode != Mode::kEpoll) return;
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_fd_ < 0) die("epoll_create1");
  epoll_event event{};
  event.events = EPOLLIN;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) die("epoll_ctl");
  epoll_events_ = POLLIN;
}

Channel::~Channel() {
  if (epoll_fd_ >= 0) close(epoll_fd_);
  close(fd_);
}

void Channel::wait_for(short events) {
  if (mode_ == Mode::kPoll) {
    pollfd entry{fd_, events, 0};
    if (poll(&entry, 1, -1) < 0 && errno != EINTR) die("poll");
    return;
  }
  epoll_event event{};
  if (events != epoll_events_) {
    event.events = events == POLLOUT ? EPOLLOUT : EPOLLIN;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd_, &event) != 0) die("epoll_ctl");
    epoll_events_ = events;
  }
  if (epoll_wait(epoll_fd_, &event, 1, -1) < 0 && errno != EINTR) die("epoll_wait");
}

void Channel::send_all(const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    ssize_t sent = send(fd_, next, size, MSG_NOSIGNAL);
    if (sent > 0) {
      next += sent;
      size -= static_cast<size_t>(sent);
    } else if (sent < 0 && errno == EAGAIN && mode_ != Mode::kBlock) {
      wait_for(POLLOUT);
    } else if (sent < 0 && errno != EINTR) {
      die("send");
    }
  }
}

size_t Channel::recv_some(void* data, size_t size) {
  for (;;) {
    // An event loop asks for readiness first: that wait is a part of what it costs.
    if (mode_ != Mode::kBlock) wait_for(POLLIN);
    ssize_t got = recv(fd_, data, size, 0);
    if (got >= 0) return static_cast<size_t>(got);
    if (errno != EINTR && !(errno == EAGAIN && mode_ != Mode::kBlock)) die("recv");
  }
}

bool Channel::recv_all(void* data, size_t size) {
  char* next = static_cast<char*>(data);
  size_t got = 0;
  while (got < size) {
    size_t part = recv_some(next + got, size - got);
    if (part == 0) {
      if (got == 0) return false;
      die_plain("the stream ended within a message");
    }
    got += part;
  }
  return true;
}

}  // namespace bench
