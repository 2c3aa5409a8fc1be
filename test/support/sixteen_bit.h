#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hvd/types.h"
#include "kernels/half.h"

/// The numbers behind the bits of the two 16-bit floating types. @pre the type is one of them
namespace hvd::testing {

inline float widened(DataType type, std::uint16_t bits) {
  return type == DataType::kFloat16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

/// Rounded to nearest, ties to even.
inline std::uint16_t narrowed(DataType type, float value) {
  return type == DataType::kFloat16 ? float_to_half(value) : float_to_bfloat16(value);
}

/// The ranks' inputs to an average, and the mean computed in fp64.
struct SixteenBitAverage {
  std::vector<std::vector<std::uint16_t>> inputs;  ///< by rank
  std::vector<double> mean;
};

/// Inputs between 0.5 and 2, the same in every run.
SixteenBitAverage sixteen_bit_average(DataType, int ranks, std::size_t count);

/// The mean of the signed relative errors of all numbers.
double mean_relative_error(DataType, std::span<const std::uint16_t> actual,
                           std::span<const double> expected);

}  // namespace hvd::testing
