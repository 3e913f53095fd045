#include "core/stream/zero_copy.h"

#include <gtest/gtest.h>

namespace rsock::stream {
namespace {

ZeroCopies::Range translated(ZeroCopies& z, uint32_t first, uint32_t last) {
  return z.translate({first, last, false});
}

TEST(ZeroCopies, KernelsNumbersAreTheProgramsUntilAChannelTakesOne) {
  ZeroCopies z;
  for (int i = 0; i < 3; ++i) z.taken_by_kernel();
  const auto told = translated(z, 0, 2);
  EXPECT_EQ(told.first, 0u);
  EXPECT_EQ(told.last, 2u);
  EXPECT_FALSE(z.pending());
}

TEST(ZeroCopies, CopiedOnesFollowTheKernelsAndBecomeOneRange) {
  ZeroCopies z;
  z.taken_by_kernel();
  z.taken_by_kernel();
  for (int i = 0; i < 4; ++i) z.copied();
  ASSERT_TRUE(z.pending());
  const auto told = z.take();
  EXPECT_EQ(told.first, 2u);
  EXPECT_EQ(told.last, 5u);
  EXPECT_TRUE(told.copied);
  EXPECT_FALSE(z.pending());
}

TEST(ZeroCopies, KernelsNumbersAreBehindAfterASetDown) {
  ZeroCopies z;
  z.taken_by_kernel();  // 0, the kernel's 0
  z.copied();           // 1
  z.copied();           // 2
  z.taken_by_kernel();  // 3, the kernel's 1
  z.taken_by_kernel();  // 4, the kernel's 2
  z.copied();           // 5
  z.taken_by_kernel();  // 6, the kernel's 3
  EXPECT_EQ(translated(z, 0, 0).first, 0u);
  EXPECT_EQ(translated(z, 1, 2).first, 3u);
  EXPECT_EQ(translated(z, 1, 2).last, 4u);
  EXPECT_EQ(translated(z, 3, 3).first, 6u);
}

TEST(ZeroCopies, ARangeOverASetDownIsToldInParts) {
  ZeroCopies z;
  z.taken_by_kernel();  // 0
  z.copied();           // 1
  z.taken_by_kernel();  // 2, the kernel's 1
  (void)z.take();
  const auto told = translated(z, 0, 1);
  EXPECT_EQ(told.first, 0u);
  EXPECT_EQ(told.last, 0u);
  ASSERT_TRUE(z.pending());
  const auto rest = z.take();
  EXPECT_EQ(rest.first, 2u);
  EXPECT_EQ(rest.last, 2u);
  EXPECT_FALSE(rest.copied);
}

}  // namespace
}  // namespace rsock::stream
