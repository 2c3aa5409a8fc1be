#pragma once

#include <bit>
#include <cstdint>

#include "kernels/half.h"

// These replace the conversions of the hardware. conversions_test checks that they are equal.
struct __half {
  std::uint16_t bits;
};
inline __half __ushort_as_half(std::uint16_t bits) { return {bits}; }
inline std::uint16_t __half_as_ushort(__half value) { return value.bits; }
inline float __half2float(__half value) { return hvd::half_to_float(value.bits); }
inline __half __float2half_rn(float value) { return {hvd::float_to_half(value)}; }
inline float __uint_as_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
