// The door to the kernel: one place through which every call of core passes, and descriptors that
// stay out of the program's way.

#include "core/os/os.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "core/base/raw_syscall.h"
#include "core/os/owned_fd.h"

namespace rsock::os {
namespace {

/// Restores the kernel's door.
struct Doorman {
  explicit Doorman(Door door) { set_door(door); }
  ~Doorman() { set_door(nullptr); }
};

TEST(Os, EveryCallPassesTheDoor) {
  static long last = 0;
  Doorman doorman([](long number, long, long, long, long, long, long) noexcept -> long {
    last = number;
    return -ENOSYS;
  });
  EXPECT_EQ(os::socket(AF_INET, SOCK_STREAM, 0).error(), ENOSYS);
  EXPECT_EQ(last, SYS_socket);
  EXPECT_EQ(os::memfd_create("x", 0).error(), ENOSYS);
  EXPECT_EQ(last, SYS_memfd_create);
  EXPECT_EQ(os::map_shared(1, 4096).error(), ENOSYS);
  EXPECT_EQ(last, SYS_mmap);
  char byte;
  EXPECT_EQ(os::recv(0, &byte, 1, 0).error(), ENOSYS);
  EXPECT_EQ(last, SYS_recvfrom);
}

TEST(Os, NoDoorMeansTheKernels) {
  set_door(nullptr);
  EXPECT_EQ(os::getpid(), ::getpid());
  EXPECT_EQ(os::read(-1, nullptr, 0).error(), EBADF);
}

TEST(Os, AnErrorIsTheKernelsNumberAndErrnoIsLeftAlone) {
  errno = 77;
  EXPECT_EQ(os::close(-1).error(), EBADF);
  EXPECT_EQ(os::open("/nonexistent/file", O_RDONLY, 0).error(), ENOENT);
  EXPECT_EQ(errno, 77);
}

TEST(Os, AnOldKernelWithoutEpollPwait2WaitsInMilliseconds) {
  static int milliseconds;
  Doorman doorman([](long number, long a, long b, long c, long d, long e, long f) noexcept -> long {
    if (number == SYS_epoll_pwait2) return -ENOSYS;
    if (number == SYS_epoll_pwait) milliseconds = static_cast<int>(d);
    return number == SYS_epoll_pwait ? 0 : raw_syscall(number, a, b, c, d, e, f);
  });
  epoll_event event;
  const timespec tiny{0, 1};
  ASSERT_TRUE(os::epoll_pwait2(0, &event, 1, &tiny, nullptr, 0));
  EXPECT_EQ(milliseconds, 1) << "rounded up: never a busy loop";
  const timespec ages{int64_t{1} << 40, 0};
  ASSERT_TRUE(os::epoll_pwait2(0, &event, 1, &ages, nullptr, 0));
  EXPECT_EQ(milliseconds, INT32_MAX);
  ASSERT_TRUE(os::epoll_pwait2(0, &event, 1, nullptr, nullptr, 0));
  EXPECT_EQ(milliseconds, -1);
}

TEST(Os, AFutexThatHasChangedDoesNotSleep) {
  const uint32_t word = 5;
  EXPECT_EQ(os::futex_wait(&word, 4, nullptr).error(), EAGAIN);
  const timespec soon{0, 1000};
  EXPECT_EQ(os::futex_wait(&word, 5, &soon).error(), ETIMEDOUT);
}

TEST(Os, AFutexSleeperIsWoken) {
  std::atomic<uint32_t> word{0};
  std::thread sleeper([&] {
    while (word.load() == 0) (void)os::futex_wait(&word, 0, nullptr);
  });
  word.store(1);
  // Once per turn: the sleeper may arrive late.
  os::futex_wake(&word, 1);
  sleeper.join();
}

// --- internal descriptors
// -----------------------------------------------------------------------------

TEST(OwnedFd, ARaisedDescriptorIsHighAndClosedOnExec) {
  const int low = ::open("/dev/null", O_RDONLY);
  auto high = raise(low);
  ASSERT_TRUE(high);
  EXPECT_GE(high->get(), 256);
  EXPECT_GE(static_cast<uint64_t>(high->get()),
            std::min<uint64_t>(60'000, rlimit_nofile_soft() - rlimit_nofile_soft() / 4));
  EXPECT_NE(::fcntl(high->get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(::fcntl(low, F_GETFD), -1) << "the low number is the program's again";
}

TEST(OwnedFd, WithoutRoomAboveTheLowNumberIsTheProgramsAgain) {
  for (const int error : {EMFILE, EINVAL}) {
    static int refusal;
    refusal = error;
    Doorman doorman(
        [](long number, long a, long b, long c, long d, long e, long f) noexcept -> long {
          if (number == SYS_fcntl && b == F_DUPFD_CLOEXEC) return -refusal;
          return raw_syscall(number, a, b, c, d, e, f);
        });
    const int low = ::open("/dev/null", O_RDONLY);
    const auto none = raise(low);
    ASSERT_FALSE(none);
    EXPECT_EQ(none.error(), EMFILE);
    EXPECT_EQ(::fcntl(low, F_GETFD), -1);
  }
}

TEST(OwnedFd, ANumberThatACloseLoopTookIsLeftAlone) {
  static std::vector<int> heard;
  heard.clear();
  set_internal_fd_hook([](int fd, bool) noexcept { heard.push_back(fd); });
  static long closed;
  closed = 0;
  Doorman doorman([](long number, long a, long b, long c, long d, long e, long f) noexcept -> long {
    if (number == SYS_close) ++closed;
    return raw_syscall(number, a, b, c, d, e, f);
  });
  const int low = ::open("/dev/null", O_RDONLY);
  ::close(low);
  EXPECT_EQ(raise(low).error(), EBADF);
  EXPECT_EQ(closed, 0) << "by now it may be the program's";
  EXPECT_TRUE(heard.empty());
  set_internal_fd_hook(nullptr);
}

TEST(OwnedFd, WhoFreesNumbersWaitsForOneInTheMaking) {
  std::atomic<bool> made{false};
  std::atomic<int> fresh{-1};
  std::thread maker([&] {
    const auto fd = make_internal([&]() -> Result<int> {
      const int low = ::open("/dev/null", O_RDONLY);
      fresh = low;
      while (!made) std::this_thread::yield();
      return low;
    });
    EXPECT_TRUE(fd);
  });
  while (fresh < 0) std::this_thread::yield();
  std::thread helper([&] { made = true; });
  wait_for_low_numbers();  // bounded, so that a handler on top of the maker goes on
  helper.join();
  maker.join();
  wait_for_low_numbers();
  EXPECT_EQ(::fcntl(fresh, F_GETFD), -1);
}

TEST(OwnedFd, ACopyThatMustBeHadIsTakenLowWhereNothingIsFreeAbove) {
  Doorman doorman([](long number, long a, long b, long c, long d, long e, long f) noexcept -> long {
    if (number == SYS_fcntl && b == F_DUPFD_CLOEXEC && c != 0) return -EMFILE;
    return raw_syscall(number, a, b, c, d, e, f);
  });
  EXPECT_EQ(dup_internal(0).error(), EMFILE);
  const auto low = dup_internal_anywhere(0);
  ASSERT_TRUE(low);
  EXPECT_NE(::fcntl(low->get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(OwnedFd, AFailureToMakeOneIsHandedOn) {
  EXPECT_EQ(make_internal([]() -> Result<int> { return fail(ENFILE); }).error(), ENFILE);
  EXPECT_EQ(dup_internal(-1).error(), EBADF);
}

TEST(OwnedFd, TheHookHearsOfEveryInternalNumberBeforeItCanBeUsedAgain) {
  static std::vector<std::pair<int, bool>> heard;
  static bool open_when_unregistered = false;
  heard.clear();
  set_internal_fd_hook([](int fd, bool opened) noexcept {
    heard.emplace_back(fd, opened);
    if (!opened) open_when_unregistered = ::fcntl(fd, F_GETFD) != -1;
  });
  int number = -1;
  {
    auto fd = raise(::open("/dev/null", O_RDONLY));
    ASSERT_TRUE(fd);
    number = fd->get();
  }
  set_internal_fd_hook(nullptr);
  EXPECT_EQ(heard, (std::vector<std::pair<int, bool>>{{number, true}, {number, false}}));
  EXPECT_TRUE(open_when_unregistered);
  EXPECT_EQ(::fcntl(number, F_GETFD), -1);
}

TEST(OwnedFd, MovingLeavesNothingBehindAndClosesWhatWasThere) {
  OwnedFd a(::open("/dev/null", O_RDONLY));
  OwnedFd b(::open("/dev/null", O_RDONLY));
  const int first = a.get();
  const int second = b.get();
  a = std::move(b);
  EXPECT_EQ(a.get(), second);
  EXPECT_FALSE(b);
  EXPECT_EQ(::fcntl(first, F_GETFD), -1);
  a = std::move(*&a);
  EXPECT_EQ(a.get(), second) << "onto itself";
  EXPECT_NE(::fcntl(second, F_GETFD), -1);
  EXPECT_EQ(a.release(), second);
  a.reset();
  EXPECT_NE(::fcntl(second, F_GETFD), -1) << "released: no longer ours to close";
  ::close(second);
}

}  // namespace
}  // namespace rsock::os
