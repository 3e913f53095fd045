// A number that is closed while calls of other threads are inside; a sleep that pthread_cancel
// ends; a buffer that is bad.
#include "core/stream/stay.h"

#include <sys/mman.h>

#include <thread>

#include "core/base/call_state.h"
#include "tests/base/faults.h"
#include "tests/stream/between.h"

namespace rsock {
namespace {

using namespace rsock::testing;

class Stay : public ::testing::Test {
 protected:
  void SetUp() override {
    configure({"RSOCK_RING_BYTES=65536", "RSOCK_SPIN_US=0"});
    ASSERT_TRUE(ping_until_lifted(c));
  }
  /// A call on c.right in a thread of its own, which is inside by now.
  template <typename Call>
  std::thread inside(Call call) {
    Stream& s = *FdTable::stream(c.right);
    const int before = s.inside.load();
    std::thread thread([this, call] {
      state = &call_state();
      call();
    });
    EXPECT_TRUE(eventually([&] { return s.inside.load() == before + 1; }));
    return thread;
  }
  /// The peer's view.
  bool ended() { return poll_one(c.left, POLLRDHUP, 0) != 0; }
  void close_right() { close_fd(std::exchange(c.right, -1)); }

  Connection c = Connection::make();
  std::atomic<CallState*> state{nullptr};
};

TEST_F(Stay, AReceiverGoesOnAndTheEndComesBehindIt) {
  char got[4] = {};
  const int number = c.right;
  std::thread receiver =
      inside([&, fd = c.right] { EXPECT_EQ(do_recv(fd, got, 4, MSG_WAITALL), 4); });
  Stream& s = *FdTable::stream(number);
  close_right();
  EXPECT_EQ(FdTable::stream(number), nullptr);
  EXPECT_EQ(::fcntl(number, F_GETFD), -1);
  EXPECT_EQ(do_send(c.left, "ab", 2), 2);
  nap_us(20'000);
  EXPECT_FALSE(ended());
  EXPECT_EQ(do_send(c.left, "cd", 2), 2);
  receiver.join();
  EXPECT_EQ(std::string(got, 4), "abcd");
  EXPECT_TRUE(eventually([&] { return ended(); }));
  char byte;
  EXPECT_EQ(do_recv(c.left, &byte, 1), 0);
  EXPECT_TRUE(eventually([&] { return !s.orphaned.load(); }));
}

// Its own call would read whatever has the number now.
TEST_F(Stay, AReceiverWhoseStreamIsSetDownReadsTcpWithoutItsNumber) {
  char got[4] = {};
  const int number = c.right;
  std::thread receiver = inside([&, fd = c.right] { EXPECT_EQ(do_recv(fd, got, 4), 4); });
  close_right();
  const int other = ::open("/dev/zero", O_RDWR | O_CLOEXEC);
  EXPECT_EQ(::dup3(other, number, O_CLOEXEC), number);
  EXPECT_EQ(stream::pin_to_tcp(c.left, "a test"), 0);
  nap_us(20'000);
  EXPECT_FALSE(ended());
  EXPECT_EQ(do_send(c.left, "abcd", 4), 4);
  receiver.join();
  EXPECT_EQ(std::string(got, 4), "abcd");
  EXPECT_TRUE(eventually([&] { return ended(); }));
  ::close(other);
  ::close(number);
}

TEST_F(Stay, ASenderGoesOnWithAllItsBytesOverASetDown) {
  constexpr size_t kBytes = 8 << 20;
  std::string bytes(kBytes, 'x');
  std::thread sender = inside([&, fd = c.right] {
    EXPECT_EQ(do_send(fd, bytes.data(), kBytes), static_cast<long>(kBytes));
  });
  close_right();
  std::string got(kBytes, '\0');
  EXPECT_EQ(do_recv(c.left, got.data(), kBytes / 2, MSG_WAITALL), static_cast<long>(kBytes / 2));
  EXPECT_EQ(stream::pin_to_tcp(c.left, "a test"), 0);
  EXPECT_EQ(do_recv(c.left, got.data() + kBytes / 2, kBytes / 2, MSG_WAITALL),
            static_cast<long>(kBytes / 2));
  sender.join();
  EXPECT_EQ(got, bytes);
  EXPECT_EQ(do_recv(c.left, got.data(), 1), 0);
}

TEST_F(Stay, ACancelledSleepLeavesNothingBehind) {
  Stream& s = *FdTable::stream(c.right);
  char byte = 0;
  std::thread receiver =
      inside([&, fd = c.right] { EXPECT_EQ(do_recv(fd, &byte, 1), -ECANCELED); });
  EXPECT_TRUE(eventually([&] { return state.load()->request_and_hold(); }));
  state.load()->wake_held();
  receiver.join();
  EXPECT_EQ(s.inside.load(), 0);
  EXPECT_EQ(do_send(c.left, "a", 1), 1);
  EXPECT_EQ(do_recv(c.right, &byte, 1), 1);
  EXPECT_EQ(byte, 'a');
}

TEST_F(Stay, AWaitInPollIsCancelledAndKeepsItsStream) {
  Stream& s = *FdTable::stream(c.right);
  std::thread poller = inside([&, fd = c.right] { EXPECT_EQ(poll_one(fd, POLLIN), 0); });
  close_right();
  nap_us(20'000);
  EXPECT_FALSE(ended());
  EXPECT_EQ(s.inside.load(), 1);
  EXPECT_TRUE(eventually([&] { return state.load()->request_and_hold(); }));
  state.load()->wake_held();
  poller.join();
  EXPECT_TRUE(eventually([&] { return ended(); }));
}

TEST_F(Stay, ABadBufferMovesNothing) {
  test::FaultsRecovered faults;
  constexpr size_t kPage = 4096;
  char* base = static_cast<char*>(
      ::mmap(nullptr, 33 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  char* end = base + 32 * kPage;
  ASSERT_EQ(::mprotect(end, kPage, PROT_NONE), 0);
  std::memset(base, 'q', 32 * kPage);
  EXPECT_EQ(do_send(c.left, end - 10, 20), -EFAULT);
  EXPECT_EQ(do_send(c.left, end - 10'000, 20'000), -EFAULT);
  EXPECT_EQ(do_send(c.left, "abcdef", 6), 6);
  EXPECT_EQ(do_recv(c.right, end - 3, 6), -EFAULT);
  EXPECT_EQ(do_recv(c.right, end - 3, 6, MSG_PEEK), -EFAULT);
  char got[6] = {};
  EXPECT_EQ(do_recv(c.right, got, 6), 6);
  EXPECT_EQ(std::string(got, 6), "abcdef");
  // What went before the bad page counts.
  const long n = do_send(c.left, end - 40'000, 50'000);
  EXPECT_GT(n, 0);
  EXPECT_LE(n, 40'000);
  std::string all(static_cast<size_t>(n), '\0');
  EXPECT_EQ(do_recv(c.right, all.data(), all.size(), MSG_WAITALL), n);
  EXPECT_EQ(all, std::string(static_cast<size_t>(n), 'q'));
  ::munmap(base, 33 * kPage);
}

}  // namespace
}  // namespace rsock
