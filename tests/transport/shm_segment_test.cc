#include "core/transport/shm/shm_segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "core/os/os.h"

namespace rsock::transport {
namespace {

constexpr size_t kRing = 64 * 1024;

/// A memfd made by hand, as a peer might send it.
struct Memfd {
  explicit Memfd(size_t size = segment_bytes(kRing), unsigned flags = MFD_ALLOW_SEALING)
      : fd(memfd_create("test", MFD_CLOEXEC | flags)) {
    EXPECT_EQ(ftruncate(fd, static_cast<off_t>(size)), 0);
    wire::ControlPage page{};
    page.magic = wire::kControlMagic;
    page.version = 1;
    page.ring_size = kRing;
    put(page);
  }
  ~Memfd() { close(fd); }
  Memfd(const Memfd&) = delete;
  Memfd& operator=(const Memfd&) = delete;

  Memfd& put(const wire::ControlPage& page) {
    EXPECT_EQ(pwrite(fd, &page, 16, 0), 16);
    return *this;
  }
  Memfd& seal(int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) {
    EXPECT_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
    return *this;
  }
  std::string refusal(uint64_t ring = kRing) {
    const auto r = adopt_segment(fd, ring);
    return r ? "" : r.error().reason;
  }
  int fd;
};

TEST(ShmSegment, WhatOneEndCreatesTheOtherAdopts) {
  auto created = create_segment(kRing);
  ASSERT_TRUE(created) << created.error().reason;
  auto adopted = adopt_segment(created->memfd.get(), kRing);
  ASSERT_TRUE(adopted) << adopted.error().reason;
  created->segment.ring(1)[kRing - 1] = std::byte{42};
  EXPECT_EQ(adopted->ring(1)[kRing - 1], std::byte{42});
  EXPECT_NE(&created->segment.page(), &adopted->page());
}

TEST(ShmSegment, TheSizeCannotChangeAnyMore) {
  const auto created = create_segment(kRing);
  ASSERT_TRUE(created);
  EXPECT_NE(ftruncate(created->memfd.get(), 0), 0);
  EXPECT_NE(ftruncate(created->memfd.get(), 1 << 30), 0);
  EXPECT_NE(fcntl(created->memfd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE), 0);
  EXPECT_TRUE(fcntl(created->memfd.get(), F_GETFD) & FD_CLOEXEC);
}

TEST(ShmSegment, AMappingOutlivesItsDescriptor) {
  auto created = create_segment(kRing);
  ASSERT_TRUE(created);
  created->memfd.reset();
  std::memset(created->segment.ring(0), 1, 2 * kRing);
  EXPECT_EQ(created->segment.page().magic, wire::kControlMagic);
}

TEST(ShmSegment, RefusesBadRingSizes) {
  for (const size_t n : {size_t{0}, kRing / 2, kRing + 4096, size_t{128} << 20, SIZE_MAX}) {
    EXPECT_FALSE(create_segment(n));
    EXPECT_STREQ(adopt_segment(-1, n).error().reason, "ring size out of range");
  }
}

TEST(ShmSegment, AdoptsOnlyWhatIsSealedForGood) {
  EXPECT_EQ(Memfd().refusal(), "memfd not sealed");
  EXPECT_EQ(Memfd().seal(F_SEAL_SHRINK | F_SEAL_GROW).refusal(), "memfd not sealed");
  EXPECT_EQ(Memfd().seal(F_SEAL_SHRINK | F_SEAL_SEAL).refusal(), "memfd not sealed");
  EXPECT_EQ(Memfd().seal(F_SEAL_GROW | F_SEAL_SEAL).refusal(), "memfd not sealed");
  EXPECT_EQ(Memfd(segment_bytes(kRing), 0).refusal(), "memfd not sealed");
  EXPECT_EQ(Memfd().seal().refusal(), "");
}

TEST(ShmSegment, RefusesAMemfdThatOnlyItsMakerCanWrite) {
  EXPECT_EQ(Memfd().seal(F_SEAL_FUTURE_WRITE).seal().refusal(), "memfd sealed against writing");
  EXPECT_EQ(Memfd().seal(F_SEAL_WRITE).seal().refusal(), "memfd sealed against writing");
}

TEST(ShmSegment, RefusesADescriptorThatIsNoMemfd) {
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  EXPECT_STREQ(adopt_segment(fds[0], kRing).error().reason, "not a memfd");
  EXPECT_STREQ(adopt_segment(-1, kRing).error().reason, "not a memfd");
  close(fds[0]);
  close(fds[1]);
}

TEST(ShmSegment, RefusesAnyOtherSize) {
  EXPECT_EQ(Memfd(segment_bytes(kRing) - 4096).seal().refusal(), "memfd of the wrong size");
  EXPECT_EQ(Memfd(segment_bytes(kRing) + 1).seal().refusal(), "memfd of the wrong size");
  EXPECT_EQ(Memfd(4096).seal().refusal(), "memfd of the wrong size");
  EXPECT_EQ(Memfd().seal().refusal(2 * kRing), "memfd of the wrong size");
}

TEST(ShmSegment, RefusesAControlPageThatDisagrees) {
  wire::ControlPage page{};
  page.magic = wire::kControlMagic;
  page.version = 1;
  page.ring_size = kRing;
  page.magic ^= 1;
  EXPECT_EQ(Memfd().put(page).seal().refusal(), "control page magic");
  page.magic ^= 1;
  page.version = 2;
  EXPECT_EQ(Memfd().put(page).seal().refusal(), "control page version");
  page.version = 1;
  page.ring_size = 2 * kRing;
  EXPECT_EQ(Memfd().put(page).seal().refusal(), "control page ring size");
}

// --- refusals of the system
// -------------------------------------------------------------------------

long refused_call = -1;
int refused_with = 0;

/// The reason create_segment() gives when the system refuses one call.
std::string refusal_of(long nr, int error) {
  static os::Door real = os::door();
  refused_call = nr;
  refused_with = error;
  os::set_door([](long n, long a, long b, long c, long d, long e, long f) noexcept -> long {
    return n == refused_call ? -refused_with : real(n, a, b, c, d, e, f);
  });
  const auto r = create_segment(kRing);
  os::set_door(real);
  if (r) return "";
  EXPECT_TRUE(r.error().error == error);
  return r.error().reason;
}

TEST(ShmSegment, SaysWhichStepTheSystemRefused) {
  EXPECT_EQ(refusal_of(SYS_memfd_create, EMFILE), "no memfd");
  EXPECT_EQ(refusal_of(SYS_memfd_create, ENOSYS), "no memfd");
  EXPECT_EQ(refusal_of(SYS_ftruncate, ENOSPC), "memfd refused its size");
  EXPECT_EQ(refusal_of(SYS_mmap, ENOMEM), "memfd could not be mapped");
}

}  // namespace
}  // namespace rsock::transport
