#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace hvd::libtorch {

/// How closely the tensors of the ranks are compared.
enum class Comparison {
  kExact,      ///< bit for bit
  kProjection  ///< up to roundings
};

/// The projection of a tensor that contains inf or nan.
inline constexpr std::int64_t kNotFinite = INT32_MIN;

/// A number that is equal on two ranks if the tensor is. kExact: a hash of all bits. kProjection:
/// the projection on a fixed direction of +1 and -1, relative to the tensor's norm, in sixteenths
/// of the tolerance of its dtype; see docs/decisions/0018-parameters-are-compared.md.
/// @param tensor dense, on the CPU. A projection of contiguous float32 does not allocate.
std::int64_t fingerprint_of(const torch::Tensor& tensor, Comparison comparison);

/// kExact fingerprints of dense tensors on one GPU. The host waits for a copy of each 64 MiB, or of
/// each tensor if the GPU has no memory to concatenate them.
std::vector<std::int64_t> gpu_hashes(std::span<const torch::Tensor> tensors);

/// kProjection fingerprints of dense tensors on one GPU: [tensors], int64, on that GPU. The host
/// does not wait. The number of launches depends on the size of the tensors, not on their number:
/// about ten for each 64 MiB. A tensor that is not contiguous is copied first.
torch::Tensor gpu_projections(std::span<const torch::Tensor> tensors);

/// Whether the least and the largest fingerprint of all ranks are too far apart.
bool differ(std::int64_t least, std::int64_t largest, Comparison comparison);

std::int64_t hash_of(const std::vector<std::string>& lines);

}  // namespace hvd::libtorch
