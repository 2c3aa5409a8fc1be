#pragma once

#include <bit>
#include <cstdint>

/// Conversions between fp32 and the two 16-bit floating types, whose values are raw bits. They
/// round to nearest, ties to even, and keep subnormals, infinities and NaN (a NaN becomes quiet and
/// keeps the payload bits that fit), as the F16C instructions do. They have no branches, so that
/// loops vectorise, and they assume the default rounding mode. Thread-safe.
namespace hvd {

inline float half_to_float(std::uint16_t half) noexcept {
  const std::uint32_t magnitude = half & 0x7fffu;
  const std::uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
  const std::uint32_t special = 0x7f800000u | (magnitude << 13) | quiet;
  const std::uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  // A subnormal is magnitude * 2^-24, which is exact and normal in fp32.
  const auto subnormal = std::bit_cast<std::uint32_t>(
      static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  const std::uint32_t finite = magnitude >= 0x0400u ? normal : subnormal;
  const std::uint32_t bits = magnitude >= 0x7c00u ? special : finite;
  return std::bit_cast<float>(bits | (static_cast<std::uint32_t>(half & 0x8000u) << 16));
}

inline std::uint16_t float_to_half(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  const std::uint32_t normal =
      (magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
  // Floats near 0.5 are 2^-24 apart, as subnormals of fp16 are, so the addition rounds.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;  // below 2^-14
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to infinity
  half = magnitude > 0x7f800000u ? nan : half;
  return static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u));
}

inline float bfloat16_to_float(std::uint16_t value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

inline std::uint16_t float_to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x0040u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

}  // namespace hvd
