// An epoll instance and the program's calls on it, as preload/ makes them, and the tests' fixture.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/os/os.h"
#include "core/poll/instance.h"
#include "tests/stream/loopback.h"

namespace rsock::testing {

class Epoll {
 public:
  Epoll() : fd_(::epoll_create1(EPOLL_CLOEXEC)) { poll::on_epoll_create(fd_); }
  ~Epoll() { close_fd(fd_); }
  Epoll(const Epoll&) = delete;
  Epoll& operator=(const Epoll&) = delete;

  int fd() const { return fd_; }
  poll::Instance& instance() const { return *poll::instance_of(fd_); }

  long control(int op, int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = kData + static_cast<uint64_t>(fd);
    return control(op, fd, &event);
  }
  long control(int op, int fd, epoll_event* event) {
    return poll::epoll_ctl(fd_, op, fd, event,
                           [&]() -> long { return ask_kernel(SYS_epoll_ctl, fd_, op, fd, event); });
  }
  long wait(epoll_event* events, int max, int timeout_ms) {
    const timespec limit{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
    return poll::epoll_wait(
        fd_, events, max, timeout_ms < 0 ? nullptr : &limit, nullptr,
        [&]() -> long { return ask_kernel(SYS_epoll_pwait, fd_, events, max, timeout_ms, 0, 8); });
  }
  /// The events of the one descriptor that is ready, 0 for none, ~0 for any other answer.
  uint32_t wait_for(int fd, int timeout_ms) {
    epoll_event events[4] = {};
    const long n = wait(events, 4, timeout_ms);
    if (n == 0) return 0;
    return n == 1 && events[0].data.u64 == kData + static_cast<uint64_t>(fd) ? events[0].events
                                                                             : ~0u;
  }

 private:
  static constexpr uint64_t kData = 0x1234'5678'0000'0000;
  int fd_;
};

class EpollStreams : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536", GetParam()}); }
};

}  // namespace rsock::testing
