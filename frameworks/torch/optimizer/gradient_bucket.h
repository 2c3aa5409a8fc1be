#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "optimizer/gradient_reduction.h"

namespace hvd::libtorch {

/// Gradients of several parameters, reduced as one tensor. Not thread-safe.
///
/// On the CPU they lie one behind the other in memory that the ranks of a host share, and are views
/// of it. That memory lives as long as the bucket or any view of it. On a GPU each stays where
/// autograd has put it, and one launch packs all of them when they are reduced; see decision 23.
class GradientBucket {
 public:
  /// @param parameters dense, of one dtype and device
  GradientBucket(std::string name, const GradientReduction& how,
                 std::span<const torch::Tensor> parameters);

  /// CPU: a tensor of the parameter's shape, and of its strides if those leave no gaps. It is no
  /// view in the sense of autograd, so that the optimizer may detach it in place.
  const torch::Tensor& view(std::size_t parameter) const { return views_[parameter]; }

  /// GPU: gradients stay where they are.
  bool gathers() const noexcept { return gathered_ != nullptr; }
  /// Before it is submitted: where each parameter's gradient is, in the order of the parameters.
  /// Undefined: it has none, nor needs one. @param gradient as ReducedParameter::gather() says
  void add(const torch::Tensor& gradient);
  /// What was added is forgotten. @param done whoever may get the gradients' memory next comes
  /// after the reduction; otherwise they are kept until the device is done with them
  void let_go(bool done);

  /// In elements, with what lies between the gradients.
  std::int64_t elements() const noexcept { return elements_; }
  /// Of each parameter, the position of its first element.
  std::span<const std::int64_t> first() const noexcept { return first_; }
  /// CPU: all of its memory, as one row of elements. Undefined on a GPU.
  const torch::Tensor& flat() const noexcept { return flat_; }

  /// The same at each call, but for what the caller sets: on a GPU where it begins.
  Submission& submission() noexcept { return submission_; }

 private:
  void lay_out(std::span<const torch::Tensor> parameters, std::size_t bytes);
  void begin_gathering();

  /// What an operation under way uses.
  struct Gathered {
    std::vector<TensorPart> parts;
    std::vector<torch::Tensor> gradients;
  };

  Submission submission_;
  std::vector<torch::Tensor> views_;
  std::vector<std::int64_t> first_;
  std::int64_t elements_ = 0;
  std::int64_t first_own_row_ = 0;  ///< of the rows that this rank gets, if it gets some only
  torch::Tensor flat_;
  std::shared_ptr<Gathered> gathered_;
};

}  // namespace hvd::libtorch
