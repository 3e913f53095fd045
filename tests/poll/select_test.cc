// select: how far it looks.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "core/poll/readiness_ops.h"
#include "core/stream/fd_table.h"

namespace rsock {
namespace {

using stream::FdKind;
using stream::FdTable;

TEST(Select, OurDescriptorsDoNotMakeItLookFurther) {
  const int ours = ::fcntl(0, F_DUPFD_CLOEXEC, 9'000);
  if (ours < 0) GTEST_SKIP() << "the descriptor limit is low";
  FdTable::set(ours, FdKind::kInternal);
  EXPECT_EQ(poll::select_width(5), 5);
  EXPECT_EQ(poll::select_width(-1), -1);
  EXPECT_EQ(poll::select_width(1'024), 1'024);
  EXPECT_EQ(poll::select_width(9'500), 1'024);
  EXPECT_EQ(poll::select_width(ours + 1), 1'024);
  const int high = ::fcntl(0, F_DUPFD_CLOEXEC, 3'000);
  EXPECT_EQ(poll::select_width(high + 1), high + 1) << "the program's own";
  EXPECT_EQ(poll::select_width(9'500), 4'096) << "the table that Linux would have made for it";
  EXPECT_EQ(poll::select_width(2'000), 2'000);
  ::close(high);
  FdTable::clear(ours);
  ::close(ours);
}

}  // namespace
}  // namespace rsock
