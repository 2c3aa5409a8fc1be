#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "bench/step_contender.h"

namespace hvd::bench {

/// Parameters, and a loss whose backward pass computes the gradients of all of them.
class Model {
 public:
  virtual ~Model() = default;
  virtual at::Tensor loss() = 0;
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }

 protected:
  /// Shares the memory of `values`.
  explicit Model(const std::vector<at::Tensor>& values);

 private:
  std::vector<at::Tensor> parameters_;
};

/// The loss of the network of examples/mnist.cpp, with dropout.
/// @param parameters of parameter_set("mnist") @param images [N, 1, 28, 28] @param labels [N]
at::Tensor mnist_loss(const std::vector<at::Tensor>& parameters, const at::Tensor& images,
                      const at::Tensor& labels);

/// Returns the initial values of the parameters, equal on every rank.
std::vector<at::Tensor> initial_values(const ParameterSet& set);

/// @throws std::invalid_argument when options.compute names an unknown network.
std::unique_ptr<Model> make_model(const WorkloadOptions& options,
                                  const std::vector<at::Tensor>& values, int rank);

}  // namespace hvd::bench
