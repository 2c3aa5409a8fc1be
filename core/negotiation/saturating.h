#pragma once

#include <cstdint>
#include <limits>

#include "base/expect.h"

/// Byte counts of a request are a peer's word: sums and products of them stop at the largest number
/// instead of overflowing.
namespace hvd::control {

inline constexpr std::int64_t kMostBytes = std::numeric_limits<std::int64_t>::max();

/// @pre a >= 0 and b >= 0, as below.
inline std::int64_t saturating_sum(std::int64_t a, std::int64_t b) noexcept {
  HVD_EXPECT(a >= 0 && b >= 0, "counts are not negative");
  return a > kMostBytes - b ? kMostBytes : a + b;
}

inline std::int64_t saturating_product(std::int64_t a, std::int64_t b) noexcept {
  HVD_EXPECT(a >= 0 && b >= 0, "counts are not negative");
  return a != 0 && b > kMostBytes / a ? kMostBytes : a * b;
}

}  // namespace hvd::control
