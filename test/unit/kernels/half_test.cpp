#include "kernels/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace hvd {
namespace {

// The value of finite bits according to the definition of the format.
double value_of(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                    : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

struct Format {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  float (*widen)(std::uint16_t);
  std::uint16_t (*narrow)(float);

  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  }
};

class HalfTest : public ::testing::TestWithParam<Format> {};

TEST_P(HalfTest, EveryValueWidensToItsDefinition) {
  const Format& format = GetParam();
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const unsigned magnitude = bits & 0x7fff;
    const float wide = format.widen(half);
    ASSERT_EQ(std::signbit(wide), bits >= 0x8000) << std::hex << bits;
    if (magnitude > format.infinity()) {
      ASSERT_TRUE(std::isnan(wide)) << std::hex << bits;
    } else if (magnitude == format.infinity()) {
      ASSERT_TRUE(std::isinf(wide)) << std::hex << bits;
    } else {
      ASSERT_EQ(static_cast<double>(wide),
                value_of(half, format.exponent_bits, format.mantissa_bits))
          << std::hex << bits;
    }
  }
}

TEST_P(HalfTest, EveryValueSurvivesTheRoundTrip) {
  const Format& format = GetParam();
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const bool is_nan = (bits & 0x7fff) > format.infinity();
    const unsigned quiet = is_nan ? 1u << (format.mantissa_bits - 1) : 0u;
    ASSERT_EQ(format.narrow(format.widen(half)), bits | quiet) << std::hex << bits;
  }
}

TEST_P(HalfTest, RoundsToNearestEvenBetweenAllNeighbours) {
  const Format& format = GetParam();
  for (unsigned low = 0; low + 1 < format.infinity(); ++low) {
    const double below =
        value_of(static_cast<std::uint16_t>(low), format.exponent_bits, format.mantissa_bits);
    const double above =
        value_of(static_cast<std::uint16_t>(low + 1), format.exponent_bits, format.mantissa_bits);
    const auto middle = static_cast<float>((below + above) /
                                           2);  // exact: fp32 has more bits, or (bf16) just enough
    const unsigned even = (low & 1) == 0 ? low : low + 1;
    ASSERT_EQ(format.narrow(middle), even) << std::hex << low;
    ASSERT_EQ(format.narrow(-middle), even | 0x8000) << std::hex << low;
    ASSERT_EQ(format.narrow(std::nextafter(middle, 0.0f)), low) << std::hex << low;
    ASSERT_EQ(format.narrow(std::nextafter(middle, std::numeric_limits<float>::infinity())),
              low + 1)
        << std::hex << low;
  }
}

TEST_P(HalfTest, OverflowsToInfinityHalfAStepAboveTheHighest) {
  const Format& format = GetParam();
  const auto highest = static_cast<std::uint16_t>(format.infinity() - 1);
  const double step =
      value_of(highest, format.exponent_bits, format.mantissa_bits) -
      value_of(static_cast<std::uint16_t>(highest - 1), format.exponent_bits, format.mantissa_bits);
  const auto limit =
      static_cast<float>(value_of(highest, format.exponent_bits, format.mantissa_bits) + step / 2);
  EXPECT_EQ(format.narrow(limit), format.infinity());
  EXPECT_EQ(format.narrow(std::nextafter(limit, 0.0f)), highest);
  EXPECT_EQ(format.narrow(std::numeric_limits<float>::max()), format.infinity());
  EXPECT_EQ(format.narrow(-std::numeric_limits<float>::infinity()), format.infinity() | 0x8000);
}

TEST_P(HalfTest, TheSmallestFloatsBecomeZeroWithTheirSign) {
  const Format& format = GetParam();
  EXPECT_EQ(format.narrow(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(format.narrow(-std::numeric_limits<float>::denorm_min()), 0x8000);
}

INSTANTIATE_TEST_SUITE_P(Formats, HalfTest,
                         ::testing::Values(Format{"float16", 5, 10, half_to_float, float_to_half},
                                           Format{"bfloat16", 8, 7, bfloat16_to_float,
                                                  float_to_bfloat16}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace hvd
