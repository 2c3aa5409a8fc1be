#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace hvd::libtorch {

/// What an elementwise optimizer keeps for a parameter: a number of steps, and tensors with an
/// element for each of the parameter's. Some may be undefined.
struct ElementState {
  std::int64_t step = 0;
  std::vector<torch::Tensor> tensors;
};

/// Whether the optimizer is exactly LibTorch's SGD, Adam, AdamW, Adagrad or RMSprop. These update
/// each element by itself, so that parts of parameters can be updated in different places.
bool is_elementwise(const torch::optim::Optimizer& optimizer);

/// The tensors are the state's own, not copies. @pre the state is of an elementwise optimizer
ElementState element_state_of(const torch::optim::OptimizerParamState& state);
/// @pre the optimizer is elementwise
std::unique_ptr<torch::optim::OptimizerParamState> make_state(
    const torch::optim::Optimizer& optimizer, const ElementState& state);
/// What the optimizer's constructor gives a parameter: null but for Adagrad.
std::unique_ptr<torch::optim::OptimizerParamState> first_state(
    const torch::optim::OptimizerOptions& options, const torch::Tensor& parameter);

}  // namespace hvd::libtorch
