#pragma once

#include <torch/types.h>

/// The arithmetic of batch normalization, split at the exchanges between ranks, without
/// communication and autograd. Inputs have shape [N, C, ...] and are dense, on any device, in one
/// of LibTorch's memory formats. Statistics have shape [C] and dtype statistics_type() and are on
/// the input's device.
namespace hvd::libtorch {

/// float64 for float64, otherwise float32.
torch::ScalarType statistics_type(torch::ScalarType input) noexcept;

/// The statistics of one rank's batch, as a row of shape [1, 2 + 2C]: the number of values of each
/// channel (in two parts, since a float32 has 24 bits), their means, and their sums of squared
/// deviations from the means. All zeros for an empty batch.
torch::Tensor batch_moments(const torch::Tensor& input);

/// The statistics of all batches together. `count` is a float64 scalar on the device; the host does
/// not wait for it.
struct JoinedMoments {
  torch::Tensor count;
  torch::Tensor mean;
  torch::Tensor var;           ///< biased; normalizes the batch
  torch::Tensor unbiased_var;  ///< for running statistics
};
/// Merges the batches with the formulas of Chan, Golub and LeVeque, which subtract no large sums.
/// @param rows of shape [ranks, 2 + 2C]
JoinedMoments join_moments(const torch::Tensor& rows);

/// The parameters of a normalization, per channel.
struct Normalization {
  torch::Tensor mean;
  torch::Tensor var;
  torch::Tensor weight;  ///< undefined: ones
  double eps = 0;
};

/// Returns (input - mean) / sqrt(var + eps) * weight + bias; `bias` may be undefined.
torch::Tensor normalize(const torch::Tensor& input, const Normalization&,
                        const torch::Tensor& bias);

/// This rank's sums, of shape [2, C]: of the output's gradient, and of its product with the
/// normalized input. They are the gradients of bias and weight.
torch::Tensor gradient_sums(const torch::Tensor& gradient, const torch::Tensor& input,
                            const Normalization&);

/// The gradient of the input, given the sums over all ranks.
torch::Tensor input_gradient(const torch::Tensor& gradient, const torch::Tensor& input,
                             const Normalization&, const torch::Tensor& sums,
                             const torch::Tensor& count);

}  // namespace hvd::libtorch
