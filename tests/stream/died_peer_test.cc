// A peer whose process died where the words go by a line: what it had read of our last bytes nobody
// knows.

#include "tests/stream/asking.h"

namespace rsock {
namespace {

using namespace rsock::testing;

/// What came before the peer's death is read, then the reset is told once, by whichever call meets
/// it, and then it is the end: as tcp_reset() leaves a connection.
TEST(DiedPeer, ItsBytesAreReadAndTheResetIsToldOnce) {
  configure_without_lifts();
  for (const bool by_option : {false, true}) {
    Asking a;
    Stream& s = a.left_stream();
    ASSERT_EQ(do_send(a.connection.left, "unread", 6), 6);
    ASSERT_EQ(do_send(a.connection.right, "last words", 10), 10);
    a.left->peer_dies();
    ::close(std::exchange(a.connection.right, -1));  // its kernel's FIN
    s.peer_gone = true;
    Asking::tend(s);
    const int fd = a.connection.left;
    EXPECT_EQ(poll_one(fd, POLLIN | POLLOUT | POLLRDHUP, 0),
              POLLIN | POLLOUT | POLLRDHUP | POLLERR | POLLHUP);
    char buffer[16];
    EXPECT_EQ(do_recv(fd, buffer, 4), 4);
    if (by_option) {
      int error = 0;
      socklen_t size = sizeof(error);
      EXPECT_EQ(stream::getsockopt(s, fd, SOL_SOCKET, SO_ERROR, &error, &size,
                                   [&]() -> long {
                                     return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
                                   }),
                0);
      EXPECT_EQ(error, ECONNRESET);
    }
    EXPECT_EQ(do_recv(fd, buffer, sizeof(buffer)), 6);
    if (!by_option) {
      EXPECT_EQ(do_recv(fd, buffer, sizeof(buffer)), -ECONNRESET);
    }
    EXPECT_EQ(do_recv(fd, buffer, sizeof(buffer)), 0);
    EXPECT_EQ(do_recv(fd, buffer, sizeof(buffer)), 0);
    EXPECT_EQ(do_send(fd, "x", 1, MSG_NOSIGNAL), -EPIPE);
    EXPECT_EQ(poll_one(fd, POLLIN | POLLRDHUP, 0), POLLIN | POLLRDHUP | POLLHUP);
  }
}

}  // namespace
}  // namespace rsock
