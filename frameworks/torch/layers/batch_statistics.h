#pragma once

#include <torch/types.h>

/// The arithmetic of batch normalization, split where ranks exchange something: without any
/// communication, and outside autograd. Inputs are [N, C, ...], dense, on any device, in one of
/// LibTorch's memory formats; statistics are [C] in statistics_type(), on the input's device.
namespace hvd::libtorch {

/// float32; for float64 float64.
torch::ScalarType statistics_type(torch::ScalarType input) noexcept;

/// One rank's batch, as a row [1, 2 + 2C] that others can be put beneath: how many values each
/// channel has (in two parts, as a float32 has 24 bits), their means, and their sums of squared
/// deviations from the means. All zeros for an empty batch.
torch::Tensor batch_moments(const torch::Tensor& input);

/// All batches together. `count` is a float64 scalar on the device: nobody waits for it.
struct JoinedMoments {
  torch::Tensor count;
  torch::Tensor mean;
  torch::Tensor var;           ///< biased, as the batch is normalized by it
  torch::Tensor unbiased_var;  ///< as running statistics have it
};
/// @param rows [ranks, 2 + 2C]. Merged as by Chan, Golub and LeVeque: no difference of large sums.
JoinedMoments join_moments(const torch::Tensor& rows);

/// What a channel is normalized by.
struct Normalization {
  torch::Tensor mean;
  torch::Tensor var;
  torch::Tensor weight;  ///< undefined: ones
  double eps = 0;
};

/// (input - mean) / sqrt(var + eps) * weight + bias; `bias` may be undefined.
torch::Tensor normalize(const torch::Tensor& input, const Normalization&,
                        const torch::Tensor& bias);

/// This rank's [2, C]: sums of the output's gradient, and of it times the normalized input. They
/// are the gradients of bias and weight.
torch::Tensor gradient_sums(const torch::Tensor& gradient, const torch::Tensor& input,
                            const Normalization&);

/// The gradient of the input, given the sums over all ranks.
torch::Tensor input_gradient(const torch::Tensor& gradient, const torch::Tensor& input,
                             const Normalization&, const torch::Tensor& sums,
                             const torch::Tensor& count);

}  // namespace hvd::libtorch
