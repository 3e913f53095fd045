// What is decided about a device before anything is made on it: no device is needed for that.

#include <gtest/gtest.h>

#include "core/transport/verbs/device.h"
#include "core/transport/verbs/rdma_library.h"

namespace rsock::transport::verbs {
namespace {

int g_status = 0;
int g_init = 0;
int g_inits = 0;

int status() { return g_status; }
int init() {
  ++g_inits;
  return g_init;
}

TEST(Forks, AreLeftToTheKernelWhereItCopies) {
  g_inits = 0;
  g_status = 2;  // IBV_FORK_UNNEEDED
  EXPECT_TRUE(prepare_for_forks(status, init));
  EXPECT_EQ(g_inits, 0);
}

TEST(Forks, AreTheLibrarysElsewhere) {
  g_inits = 0;
  g_status = 0;  // IBV_FORK_DISABLED
  g_init = 0;
  EXPECT_TRUE(prepare_for_forks(status, init));
  EXPECT_TRUE(prepare_for_forks(nullptr, init)) << "an rdma-core that can't tell";
  EXPECT_EQ(g_inits, 2);
}

TEST(Forks, AreSaidToBeUnsafeWhereTheLibraryRefuses) {
  g_status = 0;
  g_init = 22;
  EXPECT_FALSE(prepare_for_forks(status, init));
  EXPECT_FALSE(prepare_for_forks(nullptr, nullptr));
}

TEST(Iwarp, NeverHasMoreSendsOnTheWayThanReceives) {
  for (const uint32_t slots : {kDataSlots, kDataSlotsOfPackets}) {
    for (const uint32_t receives : {64u, 100u, kReceives}) {
      const uint32_t streams = streams_for_receives(receives, slots);
      EXPECT_LE(streams * (slots / 2 + kCreditSlots), receives);
    }
  }
  EXPECT_EQ(streams_for_receives(64, kDataSlotsOfPackets), 0u) << "refused";
  EXPECT_GE(streams_for_receives(kReceives, kDataSlots), 32u);
}

}  // namespace
}  // namespace rsock::transport::verbs
