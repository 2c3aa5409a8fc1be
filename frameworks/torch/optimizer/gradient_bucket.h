#pragma once

#include <torch/types.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "optimizer/gradient_transfer.h"

namespace hvd::libtorch {

/// Gradients of several parameters one behind the other, reduced as one tensor: in memory that the
/// ranks of a host share, or on their GPU. Not thread-safe.
///
/// The memory lives as long as the bucket or any view of it.
class GradientBucket {
 public:
  /// GPU: the memory is allocated under the current stream. @param parameters dense, of one dtype
  /// and device
  GradientBucket(std::string name, const GradientReduction& how,
                 std::span<const torch::Tensor> parameters);

  /// A tensor of the parameter's shape, and of its strides if those leave no gaps. It is no view in
  /// the sense of autograd, so that the optimizer may detach it in place.
  const torch::Tensor& view(std::size_t parameter) const { return views_[parameter]; }
  /// The same at each call, but for what the caller sets: on a GPU where it begins.
  Submission& submission() noexcept { return submission_; }

 private:
  void lay_out_on_host(std::span<const torch::Tensor> parameters, std::size_t bytes);
  void lay_out_on_gpu(std::span<const torch::Tensor> parameters, std::size_t bytes);

  Submission submission_;
  std::vector<torch::Tensor> views_;
  torch::Tensor all_;
};

}  // namespace hvd::libtorch
