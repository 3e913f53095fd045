// Both ends of a channel in one process, for every backend that the contract tests know.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <ostream>
#include <utility>

#include "core/transport/fake/fake_channel.h"
#include "core/transport/shm/shm_channel.h"

namespace rsock::transport {

struct Pair {
  std::shared_ptr<Channel> a;  // caller
  std::shared_ptr<Channel> b;  // callee
};

inline constexpr size_t kTestCapacity = 64 * 1024;

/// As the rendezvous does it: one end creates, the other adopts the descriptor.
inline Pair make_shm_pair(size_t ring_size = kTestCapacity) {
  auto created = create_segment(ring_size);
  if (!created) ADD_FAILURE() << created.error().reason;
  auto adopted = adopt_segment(created->memfd.get(), ring_size);
  if (!adopted) ADD_FAILURE() << adopted.error().reason;
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {make_shm_channel(std::move(created->segment), os::OwnedFd(fds[0]), true),
          make_shm_channel(std::move(*adopted), os::OwnedFd(fds[1]), false)};
}

/// Whether `check` holds, at once or within what a loaded machine needs for a message to itself.
/// Where both ends share memory it holds at once.
template <typename Check>
bool eventually(Channel& c, Check check) {
  for (int i = 0; i < 100'000 && !check(); ++i) {
    if (c.decides_alone()) return false;
    const timespec nap{0, 100'000};
    nanosleep(&nap, nullptr);
  }
  return check();
}

inline Pair make_fake() {
  auto made = make_fake_pair({.capacity = kTestCapacity});
  EXPECT_TRUE(made.has_value());
  return {std::move(made->caller), std::move(made->callee)};
}

struct Backend {
  const char* name;
  Pair (*make)();
};
inline void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }

inline size_t write(Channel& c, const void* p, size_t n) {
  const iovec iov{const_cast<void*>(p), n};
  return c.tx_write(&iov, 1, 0, n);
}
inline size_t read(Channel& c, void* p, size_t n, bool peek = false) {
  const iovec iov{p, n};
  return c.rx_read(&iov, 1, 0, n, peek);
}

/// Byte i of an endless stream; a slip by any small distance shows.
inline uint8_t byte_at(uint64_t i) { return static_cast<uint8_t>((i * 2654435761u) >> 13); }

}  // namespace rsock::transport
