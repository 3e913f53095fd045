#include "histogram.h"

#include <gtest/gtest.h>

#include <initializer_list>

namespace bench {
namespace {

TEST(Histogram, SmallValuesAreExact) {
  Histogram histogram;
  for (uint64_t ns = 1; ns <= 100; ++ns) histogram.add(ns);
  EXPECT_EQ(histogram.quantile(0.50), 50u);
  EXPECT_EQ(histogram.quantile(0.99), 99u);
  EXPECT_EQ(histogram.quantile(1.00), 100u);
  EXPECT_DOUBLE_EQ(histogram.mean(), 50.5);
}

TEST(Histogram, EveryScaleIsWithinOnePercent) {
  for (uint64_t ns = 1; ns < uint64_t{1} << 62; ns += ns / 4 + 1) {
    Histogram histogram;
    histogram.add(0);
    histogram.add(ns);
    histogram.add(UINT64_MAX);
    double found = static_cast<double>(histogram.quantile(0.5));
    EXPECT_NEAR(found / static_cast<double>(ns), 1.0, 0.01) << ns;
  }
}

TEST(Histogram, OneOutlierDoesNotMoveTheMedian) {
  Histogram histogram;
  for (int i = 0; i < 99; ++i) histogram.add(1000);
  histogram.add(1'000'000'000);
  EXPECT_NEAR(static_cast<double>(histogram.quantile(0.5)), 1000.0, 10.0);
  EXPECT_EQ(histogram.max(), 1'000'000'000u);
  EXPECT_EQ(histogram.min(), 1000u);
}

TEST(Histogram, MergedHistogramsCountTogether) {
  Histogram left, right;
  for (int i = 0; i < 10; ++i) left.add(10);
  for (int i = 0; i < 30; ++i) right.add(20);
  left.merge(right);
  EXPECT_EQ(left.count(), 40u);
  EXPECT_EQ(left.quantile(0.25), 10u);
  EXPECT_EQ(left.quantile(0.26), 20u);
}

TEST(Histogram, AnEmptyOneSaysZero) {
  Histogram histogram;
  EXPECT_EQ(histogram.quantile(0.5), 0u);
  EXPECT_EQ(histogram.min(), 0u);
  EXPECT_DOUBLE_EQ(histogram.mean(), 0.0);
}

}  // namespace
}  // namespace bench
