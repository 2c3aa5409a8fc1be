#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "bench/step_contender.h"

namespace hvd::bench {

/// Parameters with gradients of their own, and a loss whose backward makes them all.
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

/// The same on every rank.
std::vector<at::Tensor> initial_values(const ParameterSet& set);

/// @throws std::invalid_argument when options.compute asks for a network that is not there.
std::unique_ptr<Model> make_model(const WorkloadOptions& options,
                                  const std::vector<at::Tensor>& values, int rank);

}  // namespace hvd::bench
