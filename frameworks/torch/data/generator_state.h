#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

namespace hvd::libtorch {

/// A CPU generator whose whole state is made of 64 bits; another state for each of them. LibTorch
/// seeds its own with 32 bits.
at::Generator generator_from(std::uint64_t start);

}  // namespace hvd::libtorch
