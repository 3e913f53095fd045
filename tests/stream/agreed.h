// A channel that was agreed on honestly; from there on the test is the peer and writes its words.
#pragma once

#include <linux/futex.h>

#include <climits>

#include "tests/stream/impostor.h"

namespace rsock::testing {

/// A stream that listens for its caller, an impostor that has called, and the memory between them.
struct Agreed {
  Agreed() : connection(connect_to_impostor(StreamIs::kCallee)), peer(connection.right) {
    wake_interest(connection);
    EXPECT_TRUE(peer.agree_as_caller());
    EXPECT_TRUE(eventually([this] { return has_channel(connection.left); }));
    page = peer.memory.page;
  }
  wire::DirectionWords& to_stream() { return page->direction[0]; }
  wire::DirectionWords& from_stream() { return page->direction[1]; }
  std::byte* ring_to_stream() {
    return reinterpret_cast<std::byte*>(page) + wire::kControlPageSize;
  }
  int fd() const { return connection.left; }
  Stream& stream() const { return *FdTable::stream(connection.left); }

  /// The stream's keeper looks, and whoever sleeps wakes.
  void make_it_look() {
    peer.kick(peer.good_hello().nonce);
    for (wire::DirectionWords* d : {&to_stream(), &from_stream()}) {
      for (std::atomic<uint32_t>* bell : {&d->rx_bell, &d->tx_bell}) {
        bell->fetch_add(1, std::memory_order_release);
        ask_kernel(SYS_futex, bell, FUTEX_WAKE, INT_MAX, 0, 0, 0);
      }
    }
  }
  /// The stream sends into the ring: the impostor is ready, and no send is in the kernel.
  void lift_sending() {
    from_stream().ready.store(1, std::memory_order_release);
    make_it_look();
    EXPECT_TRUE(eventually([this] { return sends_in_ring(stream()); }));
  }
  /// The impostor sends into the ring from here on, like an honest peer. It has sent nothing on
  /// TCP.
  void start_sending() {
    EXPECT_TRUE(
        eventually([this] { return to_stream().ready.load(std::memory_order_acquire) != 0; }));
    to_stream().start.store(1, std::memory_order_release);
  }
  void publish(uint64_t tail) { to_stream().tail.store(tail, std::memory_order_seq_cst); }

  Connection connection;
  Impostor peer;
  wire::ControlPage* page = nullptr;
};

}  // namespace rsock::testing
