#pragma once

#include <torch/types.h>

#include <map>
#include <vector>

namespace hvd::libtorch {

/// Multiplies gradients and notes whether there was an inf or nan in one. Those on a GPU are looked
/// at by the GPU, all in one launch for each type where LibTorch can, and nobody waits.
///
/// Not thread-safe. Made for one step: uses() and add() for each parameter, then run().
class Unscaler {
 public:
  explicit Unscaler(double factor) : factor_(factor) {}

  /// run() returns its result on the GPU if a parameter is there, with or without a gradient, so
  /// that ranks do alike.
  void uses(torch::Device device);
  /// @param values of a gradient: those on the host are multiplied at once, others by run()
  void add(const torch::Tensor& values);
  /// @return [1], float32: 0 if all was finite
  torch::Tensor run();

 private:
  const double factor_;
  torch::Device device_ = torch::kCPU;
  bool finite_ = true;  ///< what was on the host
  /// Of what LibTorch takes many of in one launch.
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

}  // namespace hvd::libtorch
