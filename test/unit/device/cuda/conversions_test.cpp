// Checks that the conversions in CUDA's headers, which the kernels use, equal those of base/half.h.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/half.h"

namespace hvd::testing {
namespace {

template <class Value>
std::uint16_t bits_of(Value value) {
  return std::bit_cast<std::uint16_t>(value);
}

TEST(Conversions, WideningIsExact) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float expected = half_to_float(static_cast<std::uint16_t>(bits));
    const float actual = __half2float(__half(__half_raw{static_cast<unsigned short>(bits)}));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(actual)) << bits;
    } else {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(actual), std::bit_cast<std::uint32_t>(expected))
          << bits;
    }
  }
}

TEST(Conversions, NarrowingRoundsToNearestEven) {
  for (std::uint64_t bits = 0; bits <= 0xffffffffU;
       bits += 2039) {  // a prime, so that all low bits occur
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    const std::uint16_t half = bits_of(__float2half_rn(value));
    const std::uint16_t bfloat16 = bits_of(__float2bfloat16_rn(value));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(half_to_float(half)) && std::isnan(bfloat16_to_float(bfloat16)))
          << bits;
    } else {
      ASSERT_EQ(half, float_to_half(value)) << bits;
      ASSERT_EQ(bfloat16, float_to_bfloat16(value)) << bits;
    }
  }
}

}  // namespace
}  // namespace hvd::testing
