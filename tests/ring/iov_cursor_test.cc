#include "core/ring/iov_cursor.h"

#include <gtest/gtest.h>

#include <string>

namespace rsock::ring {
namespace {

std::string gather(IovCursor& c, size_t n) {
  std::string s(n, '?');
  s.resize(c.gather(reinterpret_cast<std::byte*>(s.data()), n));
  return s;
}

struct Pieces {
  char a[4] = {'a', 'b', 'c', 'd'};
  char b[3] = {'e', 'f', 'g'};
  iovec iov[4] = {{a, 4}, {nullptr, 0}, {b, 3}, {nullptr, 0}};
};

TEST(IovCursor, GathersAcrossPiecesAndEmptyOnes) {
  Pieces p;
  IovCursor c(p.iov, 4, 0);
  EXPECT_EQ(gather(c, 2), "ab");
  EXPECT_EQ(gather(c, 3), "cde");
  EXPECT_FALSE(c.done());
  EXPECT_EQ(gather(c, 9), "fg");
  EXPECT_TRUE(c.done());
  EXPECT_EQ(gather(c, 9), "");
}

TEST(IovCursor, SkipsIntoTheMiddleOfALaterPiece) {
  Pieces p;
  IovCursor c(p.iov, 4, 5);
  EXPECT_EQ(gather(c, 9), "fg");
}

TEST(IovCursor, SkipToOrBeyondTheEndLeavesNothing) {
  Pieces p;
  EXPECT_TRUE(IovCursor(p.iov, 4, 7).done());
  EXPECT_TRUE(IovCursor(p.iov, 4, 1000).done());
  EXPECT_TRUE(IovCursor(nullptr, 0, 0).done());
}

TEST(IovCursor, ScattersExactlyTheLimit) {
  Pieces p;
  IovCursor c(p.iov, 4, 2);
  EXPECT_EQ(c.scatter(reinterpret_cast<const std::byte*>("1234567"), 3), 3u);
  EXPECT_EQ(std::string(p.a, 4), "ab12");
  EXPECT_EQ(std::string(p.b, 3), "3fg");
  EXPECT_EQ(c.scatter(reinterpret_cast<const std::byte*>("89xyz"), 5), 2u);
  EXPECT_EQ(std::string(p.b, 3), "389");
}

}  // namespace
}  // namespace rsock::ring
