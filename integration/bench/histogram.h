// A histogram of nanoseconds with less than 1 % error at any scale, in constant memory.
//
// Values below 256 have a bucket each; above, every power of two is cut into 128 buckets.
// Thread safety: none; merge() the histograms of several threads after they ended.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace bench {

class Histogram {
 public:
  void add(uint64_t ns) {
    ++buckets_[index_of(ns)];
    ++count_;
    sum_ += ns;
    min_ = std::min(min_, ns);
    max_ = std::max(max_, ns);
  }

  void merge(const Histogram& other) {
    for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i] += other.buckets_[i];
    count_ += other.count_;
    sum_ += other.sum_;
    min_ = std::min(min_, other.min_);
    max_ = std::max(max_, other.max_);
  }

  uint64_t count() const { return count_; }
  double mean() const {
    return count_ == 0 ? 0 : static_cast<double>(sum_) / static_cast<double>(count_);
  }
  uint64_t min() const { return count_ == 0 ? 0 : min_; }
  uint64_t max() const { return max_; }

  // The smallest value that at least the given part of all values does not exceed.
  uint64_t quantile(double part) const {
    auto wanted = static_cast<uint64_t>(std::ceil(part * static_cast<double>(count_)));
    uint64_t seen = 0;
    for (size_t i = 0; i < buckets_.size(); ++i) {
      seen += buckets_[i];
      if (seen >= wanted && seen > 0) return std::clamp(middle_of(i), min(), max_);
    }
    return max_;
  }

 private:
  static constexpr size_t kSubBuckets = 128;

  static size_t index_of(uint64_t ns) {
    if (ns < 2 * kSubBuckets) return ns;
    // 8 bits of the value remain, the topmost of them set: 128 buckets for each shift.
    auto shift = static_cast<size_t>(std::bit_width(ns)) - 8;
    return shift * kSubBuckets + (ns >> shift);
  }

  static uint64_t middle_of(size_t index) {
    if (index < 2 * kSubBuckets) return index;
    size_t shift = index / kSubBuckets - 1;
    uint64_t low = (index - shift * kSubBuckets) << shift;
    return low + ((uint64_t{1} << shift) >> 1);
  }

  std::array<uint64_t, 58 * kSubBuckets> buckets_{};
  uint64_t count_ = 0;
  uint64_t sum_ = 0;
  uint64_t min_ = UINT64_MAX;
  uint64_t max_ = 0;
};

}  // namespace bench
