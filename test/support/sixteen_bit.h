#pragma once

#include <cstdint>

#include "base/half.h"
#include "hvd/types.h"

/// The numbers behind the bits of the two 16-bit floating types. @pre the type is one of them
namespace hvd::testing {

inline float widened(DataType type, std::uint16_t bits) {
  return type == DataType::kFloat16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

/// Rounded to nearest, ties to even.
inline std::uint16_t narrowed(DataType type, float value) {
  return type == DataType::kFloat16 ? float_to_half(value) : float_to_bfloat16(value);
}

}  // namespace hvd::testing
