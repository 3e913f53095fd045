#include "core/base/try_copy.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/base/faults.h"

namespace rsock {
namespace {

constexpr size_t kPage = 4096;

/// Memory that ends where none can be touched.
class Edge {
 public:
  explicit Edge(size_t pages = 16, int beyond = PROT_NONE) : size_(pages * kPage) {
    base_ = static_cast<char*>(
        ::mmap(nullptr, size_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_EQ(::mprotect(end(), kPage, beyond), 0);
  }
  ~Edge() { ::munmap(base_, size_ + kPage); }
  char* end() const { return base_ + size_; }

 private:
  size_t size_;
  char* base_;
};

std::vector<size_t> sizes() {
  std::vector<size_t> all;
  for (size_t n = 0; n <= 300; ++n) all.push_back(n);
  for (const size_t n : {1000, 4095, 4096, 8193, 33000}) all.push_back(n);
  return all;
}

TEST(TryCopy, CopiesEverySizeAtEveryAlignment) {
  std::vector<char> from(40000), to(40000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 31 + i / 256);
  for (const size_t n : sizes()) {
    for (const size_t shift : {0, 1, 7, 15}) {
      std::fill(to.begin(), to.end(), 'x');
      ASSERT_TRUE(try_copy(to.data() + 8, from.data() + shift, n));
      ASSERT_EQ(std::memcmp(to.data() + 8, from.data() + shift, n), 0) << n;
      ASSERT_EQ(to[7], 'x');
      ASSERT_EQ(to[8 + n], 'x') << n;
    }
  }
}

TEST(TryCopy, FailsWhereTheSourceIsBadFromAnyByteOn) {
  test::FaultsRecovered faults;
  Edge edge;
  std::vector<char> to(40000);
  for (const size_t n : sizes()) {
    EXPECT_TRUE(try_copy(to.data(), edge.end() - n, n)) << n;
    for (size_t bad = 1; bad <= n; bad += 1 + n / 9) {
      ASSERT_FALSE(try_copy(to.data(), edge.end() - (n - bad), n)) << n << " " << bad;
    }
  }
}

TEST(TryCopy, FailsWhereTheTargetIsReadOnly) {
  test::FaultsRecovered faults;
  Edge edge(16, PROT_READ);
  std::vector<char> from(40000, 'a');
  for (const size_t n : sizes()) {
    EXPECT_TRUE(try_copy(edge.end() - n, from.data(), n)) << n;
    if (n != 0) {
      ASSERT_FALSE(try_copy(edge.end() - (n - 1), from.data(), n)) << n;
    }
  }
}

TEST(TryCopy, FailsAtAddressesThatAreNone) {
  test::FaultsRecovered faults;
  char to[200];
  for (const uintptr_t bad : {uintptr_t{0}, uintptr_t{0x1234567812345678}, ~uintptr_t{0} - 99}) {
    for (const size_t n : {1, 3, 5, 9, 20, 40, 80, 200}) {
      EXPECT_FALSE(try_copy(to, reinterpret_cast<void*>(bad), n)) << bad << " " << n;
    }
    EXPECT_FALSE(readable(reinterpret_cast<void*>(bad), 1));
    EXPECT_FALSE(writable(reinterpret_cast<void*>(bad), 1));
  }
}

TEST(TryCopy, FailsBeyondTheEndOfAMappedFile) {
  test::FaultsRecovered faults;
  const int fd = ::memfd_create("short", 0);
  ASSERT_EQ(::ftruncate(fd, kPage), 0);
  char* at = static_cast<char*>(::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  char to[1000];
  EXPECT_TRUE(try_copy(to, at, sizeof(to)));
  ASSERT_EQ(::ftruncate(fd, 0), 0);
  EXPECT_FALSE(try_copy(to, at, sizeof(to)));
  EXPECT_FALSE(try_copy(to, at, 10));
  EXPECT_FALSE(readable(at, 1));
  ::munmap(at, kPage);
  ::close(fd);
}

TEST(TryCopy, LooksAtEveryPageAndChangesNone) {
  test::FaultsRecovered faults;
  Edge edge(3);
  char* from = edge.end() - 2 * kPage - 5;
  std::memset(from, 'q', 2 * kPage + 5);
  EXPECT_TRUE(writable(from, 2 * kPage + 5));
  EXPECT_TRUE(readable(from, 2 * kPage + 5));
  EXPECT_FALSE(readable(from, 2 * kPage + 6));
  ASSERT_EQ(::mprotect(edge.end() - 2 * kPage, kPage, PROT_READ), 0);  // in the middle
  EXPECT_TRUE(readable(from, 2 * kPage + 5));
  EXPECT_FALSE(writable(from, 2 * kPage + 5));
  EXPECT_EQ(std::string(from, 2 * kPage + 5), std::string(2 * kPage + 5, 'q'));
  EXPECT_TRUE(readable(nullptr, 0));
  EXPECT_FALSE(readable(from, ~size_t{0}));
}

void fault_elsewhere() {
  test::FaultsRecovered faults;
  Edge edge;
  char to[1000];
  (void)try_copy(to, edge.end() - 10, 1000);
  *edge.end() = 1;
}
TEST(TryCopyDeathTest, AFaultThatIsNotOursIsOne) {
  EXPECT_EXIT(fault_elsewhere(), testing::KilledBySignal(SIGSEGV), "");
}

}  // namespace
}  // namespace rsock
