#include "kernels/cast.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "hvd/error.h"
#include "kernels/kernels_loop.h"
#include "support/sixteen_bit.h"
#include "unit/kernels/instruction_sets.h"

namespace hvd {
namespace {

using kernels::InstructionSet;
using testing::widened;

/// Special values of both types, and ordinary numbers of all magnitudes.
std::vector<float> awkward_numbers(std::size_t count) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> special = {0.0F,
                                      -0.0F,
                                      kInfinity,
                                      -kInfinity,
                                      std::numeric_limits<float>::quiet_NaN(),
                                      65504.0F,
                                      65519.0F,
                                      65520.0F,
                                      -65520.0F,
                                      70000.0F,
                                      0x1p-14F,
                                      0x1.ffcp-15F,
                                      0x1p-24F,
                                      0x1p-25F,
                                      0x1.000002p-25F,
                                      1e-40F,
                                      3.4e38F,
                                      2049.0F,
                                      2051.0F,
                                      0x1.01p0F,
                                      0x1.03p0F,
                                      std::numeric_limits<float>::denorm_min()};
  std::mt19937 random(11);
  std::vector<float> numbers;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 3 == 0) {
      numbers.push_back(special[i / 3 % special.size()]);
    } else {
      numbers.push_back(std::ldexp(static_cast<float>(static_cast<int>(random() % 20001) - 10000),
                                   static_cast<int>(random() % 60) - 45));
    }
  }
  return numbers;
}

bool same(float a, float b) {
  return std::isnan(a) ? std::isnan(b) : std::memcmp(&a, &b, sizeof(float)) == 0;
}

class Cast : public ::testing::TestWithParam<DataType> {};
INSTANTIATE_TEST_SUITE_P(Types, Cast, ::testing::Values(DataType::kFloat16, DataType::kBFloat16),
                         [](const auto& type) { return std::string(to_string(type.param)); });

TEST_P(Cast, ConvertsEachElementWithAnyInstructionSetAndAlignment) {
  for (const std::size_t count : {0U, 1U, 7U, 8U, 9U, 63U, 1000U}) {
    const std::vector<float> numbers = awkward_numbers(count);
    for (const InstructionSet instructions : kernels::supported_instruction_sets()) {
      for (const double factor : {1.0, 0.25, -3.1, 1e6}) {
        for (const std::size_t shift : {0U, 1U, 2U, 5U}) {
          std::vector<std::byte> wide(count * 4 + shift), narrowed(count * 2 + shift + 1),
              back(count * 4 + shift + 1);
          if (count > 0) std::memcpy(wide.data() + shift, numbers.data(), count * 4);
          narrowed.back() = back.back() = std::byte{0x5a};  // guard
          kernels::narrow_with(instructions, wide.data() + shift, narrowed.data() + shift,
                               static_cast<std::int64_t>(count), GetParam(), factor);
          kernels::widen_with(instructions, narrowed.data() + shift, back.data() + shift,
                              static_cast<std::int64_t>(count), GetParam(), factor);
          ASSERT_EQ(narrowed.back(), std::byte{0x5a});
          ASSERT_EQ(back.back(), std::byte{0x5a});
          for (std::size_t i = 0; i < count; ++i) {
            std::uint16_t bits = 0;
            std::memcpy(&bits, narrowed.data() + shift + 2 * i, 2);
            const std::uint16_t expected =
                testing::narrowed(GetParam(), numbers[i] * static_cast<float>(factor));
            ASSERT_TRUE(bits == expected || (std::isnan(widened(GetParam(), bits)) &&
                                             std::isnan(widened(GetParam(), expected))))
                << numbers[i] << " by " << factor << ": " << bits << ", expected " << expected;
            float result = 0;
            std::memcpy(&result, back.data() + shift + 4 * i, 4);
            ASSERT_TRUE(same(result, widened(GetParam(), bits) * static_cast<float>(factor)))
                << bits << " by " << factor << ": " << result;
          }
        }
      }
    }
  }
}

TEST_P(Cast, ANumberOf16BitsSurvivesTheRoundTrip) {
  std::vector<std::uint16_t> all, again(65536);
  for (unsigned bits = 0; bits < 65536; ++bits) all.push_back(static_cast<std::uint16_t>(bits));
  std::vector<float> wide(65536);
  widen(reinterpret_cast<const std::byte*>(all.data()), reinterpret_cast<std::byte*>(wide.data()),
        65536, GetParam(), 1);
  narrow(reinterpret_cast<const std::byte*>(wide.data()),
         reinterpret_cast<std::byte*>(again.data()), 65536, GetParam(), 1);
  for (unsigned bits = 0; bits < 65536; ++bits) {
    if (!std::isnan(wide[bits])) {
      ASSERT_EQ(again[bits], bits);
    } else {
      ASSERT_TRUE(std::isnan(widened(GetParam(), again[bits])));
    }
  }
}

TEST(CastErrors, NameTheType) {
  std::byte nothing{};
  EXPECT_THROW(narrow(&nothing, &nothing, 0, DataType::kInt16, 1), Error);
  EXPECT_THROW(widen(&nothing, &nothing, 0, DataType::kFloat32, 1), Error);
}

}  // namespace
}  // namespace hvd
