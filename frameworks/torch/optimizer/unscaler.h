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

}  // namespace hvd::libtorch
