#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <map>
#include <set>
#include <vector>

namespace hvd::libtorch {

/// Multiplies gradients, and checks whether one contained inf or nan. On a GPU, gradients of a
/// dtype that LibTorch supports take one launch together, and the host does not wait.
///
/// Not thread-safe. For one step: uses() and add() for each parameter, then run().
class Unscaler {
 public:
  explicit Unscaler(double factor) : factor_(factor) {}

  /// Announces a parameter's device. run() returns its result on the GPU if a parameter is there,
  /// even without a gradient, so that all ranks reduce the result on the same type of device.
  void uses(torch::Device device);
  /// @param values of a gradient. On the host they are multiplied at once, on a GPU by run().
  void add(const torch::Tensor& values);
  /// @return [1], float32: 0 if all gradients were finite
  torch::Tensor run();

 private:
  const double factor_;
  torch::Device device_ = torch::kCPU;
  bool finite_ = true;  ///< whether all gradients on the host were finite
  /// Gradients of dtypes that LibTorch multiplies together in one launch.
  std::map<torch::ScalarType, std::vector<torch::Tensor>> together_;
  std::vector<torch::Tensor> alone_;
};

inline void Unscaler::uses(torch::Device device) {
  if (device.is_cuda()) device_ = device;
}

inline void Unscaler::add(const torch::Tensor& values) {
  if (!values.is_cuda()) {
    finite_ = finite_ && torch::isfinite(values).all().item<bool>();
    values.mul_(factor_);
  } else if (values.scalar_type() == torch::kFloat32 || values.scalar_type() == torch::kFloat16) {
    together_[values.scalar_type()].push_back(values);
  } else {
    alone_.push_back(values);
  }
}

inline torch::Tensor Unscaler::run() {
  const auto options = torch::TensorOptions().dtype(torch::kFloat32).device(device_);
  torch::Tensor found = torch::full({1}, finite_ ? 0.0F : 1.0F, options);
  for (auto& [type, values] : together_) {
    at::_amp_foreach_non_finite_check_and_unscale_(values, found,
                                                   torch::full({1}, factor_, options));
  }
  for (const torch::Tensor& values : alone_) {
    found = torch::maximum(found, torch::isfinite(values).logical_not().any().to(torch::kFloat32));
    values.mul_(factor_);
  }
  return found;
}

/// Multiplies the gradients of an optimizer's parameters, each once. @return as Unscaler::run()
inline torch::Tensor unscale_gradients(torch::optim::Optimizer& optimizer, double factor) {
  const torch::NoGradGuard no_grad;
  Unscaler unscaler(factor);
  std::set<const c10::TensorImpl*> seen;
  for (auto& group : optimizer.param_groups()) {
    for (torch::Tensor& parameter : group.params()) {
      torch::Tensor& gradient = parameter.mutable_grad();
      unscaler.uses(parameter.device());
      if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      // Entries with the same indices are added, and their sum may overflow.
      if (gradient.is_sparse()) gradient = gradient.coalesce();
      unscaler.add(gradient.is_sparse() ? gradient._values() : gradient.detach());
    }
  }
  return unscaler.run();
}

}  // namespace hvd::libtorch
