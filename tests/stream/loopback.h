// TCP connections over loopback whose ends are streams, and the program's calls on them.
//
// Purpose: what preload/ does for a program, done by hand: every call goes through core/stream's
// and core/poll's doors, with a KernelCall that asks the kernel. Loopback and free ports only.
// Ownership: a Connection closes what is left of its ends. Thread safety: the calls, as the
// kernel's own.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/base/config.h"
#include "core/base/raw_syscall.h"
#include "core/poll/readiness_ops.h"
#include "core/stream/moves.h"
#include "core/stream/socket_ops.h"

/// Runs a suite twice: waits that sleep at once, and waits that spin first.
#define RSOCK_WITH_AND_WITHOUT_SPINNING(suite)                                                     \
  INSTANTIATE_TEST_SUITE_P(Waits, suite, ::testing::Values("RSOCK_SPIN_US=0", "RSOCK_SPIN_US=50"), \
                           [](const ::testing::TestParamInfo<const char*>& info) {                 \
                             return std::string(info.index == 0 ? "Sleeping" : "Spinning");        \
                           })

namespace rsock::testing {

using stream::FdTable;
using stream::Stream;

/// The settings of a test: everything is worth lifting at once.
inline void configure(std::vector<std::string> more = {}) {
  static std::vector<std::string> texts;
  texts = {"RSOCK_LIFT_CALLS=1", "RSOCK_LIFT_BYTES=1", "RSOCK_CONFIG=/dev/null"};
  texts.insert(texts.end(), more.begin(), more.end());
  // For a look by hand: what the library says while a test runs.
  if (const char* log = getenv("RSOCK_LOG")) texts.push_back(std::string("RSOCK_LOG=") + log);
  std::vector<const char*> environment;
  for (const std::string& t : texts) environment.push_back(t.c_str());
  environment.push_back(nullptr);
  load_config(environment.data());
  ASSERT_EQ(config_complaints(), 0u) << config_complaint(0);
}

template <typename... A>
long ask_kernel(long number, A... arguments) {
  return raw_syscall(number, (long)(arguments)...);
}

// --- the program's calls
// ---------------------------------------------------------------------------

inline long do_send(int fd, const void* data, size_t n, int flags = 0) {
  flags |= MSG_NOSIGNAL;
  auto kernel = [&]() -> long { return ask_kernel(SYS_sendto, fd, data, n, flags, 0, 0); };
  Stream* s = FdTable::stream(fd);
  const iovec iov{const_cast<void*>(data), n};
  return s == nullptr ? kernel() : stream::send(*s, fd, &iov, 1, flags, kernel);
}

inline long do_recv(int fd, void* data, size_t n, int flags = 0) {
  auto kernel = [&]() -> long { return ask_kernel(SYS_recvfrom, fd, data, n, flags, 0, 0); };
  Stream* s = FdTable::stream(fd);
  const iovec iov{data, n};
  return s == nullptr ? kernel() : stream::recv(*s, fd, &iov, 1, flags, kernel);
}

inline long do_shutdown(int fd, int how) {
  auto kernel = [&]() -> long { return ask_kernel(SYS_shutdown, fd, how); };
  Stream* s = FdTable::stream(fd);
  return s == nullptr ? kernel() : stream::shutdown(*s, fd, how, kernel);
}

/// revents of one descriptor; 0 when the time is over.
inline short poll_one(int fd, short events, int timeout_ms = -1) {
  pollfd p{fd, events, 0};
  timespec limit{timeout_ms / 1000, (timeout_ms % 1000) * 1'000'000L};
  const timespec* timeout = timeout_ms < 0 ? nullptr : &limit;
  auto kernel = [&]() -> long {
    timespec copy = limit;
    return ask_kernel(SYS_ppoll, &p, 1, timeout == nullptr ? nullptr : &copy, 0, 8);
  };
  const long r = poll::poll(&p, 1, timeout, nullptr, kernel);
  return r > 0 ? p.revents : 0;
}

inline void close_fd(int fd) {
  if (stream::before_close(fd)) ::close(fd);
  stream::after_close();
}

/// Another program that this process starts shall have it.
inline void keep_over_exec(int fd) { EXPECT_EQ(::fcntl(fd, F_SETFD, 0), 0); }

inline void set_nonblocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL) | O_NONBLOCK;
  ::fcntl(fd, F_SETFL, flags);
  if (Stream* s = FdTable::stream(fd)) stream::on_set_flags(*s, flags);
}

// --- connections
// -----------------------------------------------------------------------------------

/// A listening socket on a port of the kernel's choice.
inline int listen_somewhere(sockaddr_in* address) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  *address = sockaddr_in{};
  address->sin_family = AF_INET;
  address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(address), sizeof(*address)), 0);
  EXPECT_EQ(::listen(fd, 64), 0);
  socklen_t len = sizeof(*address);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(address), &len), 0);
  stream::on_socket(fd, AF_INET, SOCK_STREAM, 0);
  return fd;
}

inline int connect_stream(const sockaddr_in& address, bool tracked = true) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (tracked) stream::on_socket(fd, AF_INET, SOCK_STREAM, 0);
  const long r = ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  EXPECT_EQ(r, 0);
  if (tracked) stream::on_connect(fd, r);
  return fd;
}

inline int accept_stream(int listener, bool tracked = true) {
  const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  EXPECT_GE(fd, 0);
  if (tracked) stream::on_accept(listener, fd, 0);
  return fd;
}

/// Both ends in this process. `right_tracked` false: the right end is a plain socket, for a test
/// that plays the peer.
struct Connection {
  int left = -1;   // connected
  int right = -1;  // accepted

  static Connection make(bool left_tracked = true, bool right_tracked = true) {
    sockaddr_in address;
    const int listener = listen_somewhere(&address);
    Connection c;
    c.left = connect_stream(address, left_tracked);
    c.right = accept_stream(listener, right_tracked);
    close_fd(listener);
    return c;
  }
  Connection() = default;
  Connection(Connection&& o) noexcept
      : left(std::exchange(o.left, -1)), right(std::exchange(o.right, -1)) {}
  Connection& operator=(Connection&&) = delete;
  ~Connection() {
    for (int fd : {left, right}) {
      if (fd >= 0) close_fd(fd);
    }
  }
};

// --- what a stream is doing
// ------------------------------------------------------------------------

inline bool sends_in_ring(Stream& s) {
  MutexLock lock(s.tx.mutex);
  return s.tx.state == stream::TxState::kRing;
}
inline bool has_channel(int fd) {
  Stream* s = FdTable::stream(fd);
  return s != nullptr && s->has_channel.load(std::memory_order_acquire);
}

inline void nap_us(long us) {
  timespec t{us / 1'000'000, us % 1'000'000 * 1000};
  ::nanosleep(&t, nullptr);
}

/// Waits for something that another thread or process does. Bounded by turns, so that a failure is
/// a message.
template <typename F>
bool eventually(F&& holds, int turns = 20'000) {
  for (int i = 0; i < turns; ++i) {
    if (holds()) return true;
    nap_us(500);
  }
  return false;
}

/// Sends and receives small pieces until both directions are in the ring.
inline bool ping_until_lifted(const Connection& c) {
  char byte = 0;
  return eventually([&] {
    for (auto [from, to] : {std::pair{c.left, c.right}, std::pair{c.right, c.left}}) {
      if (do_send(from, "x", 1) != 1 || do_recv(to, &byte, 1) != 1) return false;
    }
    return sends_in_ring(*FdTable::stream(c.left)) && sends_in_ring(*FdTable::stream(c.right));
  });
}

/// `n` bytes there, `n` bytes back, compared: TCP or a channel, the stream works.
inline ::testing::AssertionResult echoes(int left, int right, size_t n) {
  for (auto [from, to] : {std::pair{left, right}, std::pair{right, left}}) {
    std::string out(n, '\0');
    for (size_t i = 0; i < n; ++i) out[i] = static_cast<char>(i * 31 + (i >> 8) + 7);
    std::string in(n, '\0');
    size_t sent = 0;
    for (size_t got = 0; got < n;) {
      if (sent < n) {
        const long r = do_send(from, out.data() + sent, n - sent, MSG_DONTWAIT);
        if (r > 0) sent += static_cast<size_t>(r);
        if (r <= 0 && r != -EAGAIN) return ::testing::AssertionFailure() << "send: " << r;
      }
      if (poll_one(to, POLLIN, sent < n ? 0 : 10'000) == 0) {
        if (sent < n) continue;
        return ::testing::AssertionFailure() << "silence after " << got << " of " << n << " bytes";
      }
      const long r = do_recv(to, in.data() + got, n - got, MSG_DONTWAIT);
      if (r == -EAGAIN) continue;
      if (r <= 0)
        return ::testing::AssertionFailure() << "recv: " << r << " after " << got << " bytes";
      got += static_cast<size_t>(r);
    }
    if (in != out) return ::testing::AssertionFailure() << "other bytes came out";
  }
  return ::testing::AssertionSuccess();
}

/// fork() with the hooks around it; the child's exit code is what `in_child` says.
template <typename F>
int in_forked_child(F&& in_child) {
  stream::prepare_fork();
  stream::before_fork();
  const pid_t child = ::fork();
  if (child == 0) {
    stream::after_fork_child();
    ::_exit(in_child() ? 0 : 1);
  }
  stream::after_fork_parent(child < 0);
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

}  // namespace rsock::testing
