// Setting down when the other end is not there, does not read, or has ended: bounded waits, and
// every byte or an error.

#include <sys/sendfile.h>

#include "tests/stream/agreed.h"

namespace rsock {
namespace {

using namespace rsock::testing;

class SetDown : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=1048576"}); }
};

std::string read_all(int fd, size_t n) {
  std::string in(n, '\0');
  size_t got = 0;
  for (long r; got < n && (r = do_recv(fd, in.data() + got, n - got)) > 0;) {
    got += static_cast<size_t>(r);
  }
  in.resize(got);
  return in;
}

/// A thread with as little stack as threads may have, and some for the test.
template <typename F>
void on_a_small_stack(F f) {
  pthread_attr_t attr;
  pthread_attr_init(&attr);
  ASSERT_EQ(pthread_attr_setstacksize(&attr, 32 * 1024), 0);
  pthread_t thread;
  ASSERT_EQ(pthread_create(
                &thread, &attr,
                [](void* arg) -> void* { return (*static_cast<F*>(arg))(), nullptr; }, &f),
            0);
  pthread_join(thread, nullptr);
}

TEST_F(SetDown, ASmallStackIsEnoughForSendfile) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  const int file = ::memfd_create("file", MFD_CLOEXEC);
  const std::string bytes(200'000, 'f');
  ASSERT_EQ(::write(file, bytes.data(), bytes.size()), 200'000);
  long sent = 0;
  on_a_small_stack([&] {
    off_t at = 0;
    sent = stream::sendfile(*FdTable::stream(c.left), c.left, file, &at, bytes.size(),
                            [] { return -1L; });
  });
  EXPECT_EQ(sent, 200'000);
  EXPECT_EQ(read_all(c.right, bytes.size()), bytes);
  ::close(file);
}

}  // namespace
}  // namespace rsock
