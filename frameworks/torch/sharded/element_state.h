#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace hvd::libtorch {

/// The state of an elementwise optimizer for a parameter: a number of steps, and tensors with an
/// element for each element of the parameter. Some tensors may be undefined.
struct ElementState {
  std::int64_t step = 0;
  std::vector<torch::Tensor> tensors;
};

/// Whether the optimizer is exactly LibTorch's SGD, Adam, AdamW, Adagrad or RMSprop. These update
/// each element by itself, so different ranks can update parts of a parameter.
bool is_elementwise(const torch::optim::Optimizer& optimizer);

/// Returns the state's own tensors, not copies. @pre the state is of an elementwise optimizer
ElementState element_state_of(const torch::optim::OptimizerParamState& state);
/// @pre the optimizer is elementwise
std::unique_ptr<torch::optim::OptimizerParamState> make_state(
    const torch::optim::Optimizer& optimizer, const ElementState& state);
/// The state that the optimizer's constructor creates: null for all types but Adagrad.
std::unique_ptr<torch::optim::OptimizerParamState> first_state(
    const torch::optim::OptimizerOptions& options, const torch::Tensor& parameter);

/// Some elements of a tensor in the order of its memory, as one row. The row shares the memory, but
/// is not a view in the sense of autograd. @pre the tensor is dense and has no gaps
torch::Tensor flat_part(const torch::Tensor& tensor, std::int64_t begin, std::int64_t size);
/// The same for all elements.
inline torch::Tensor flat(const torch::Tensor& tensor) {
  return flat_part(tensor, 0, tensor.numel());
}

/// Returns `tensor` if it is dense and has these strides, otherwise a copy with these strides.
torch::Tensor with_strides(at::IntArrayRef strides, const torch::Tensor& tensor);
/// Returns `tensor` if it has the strides of strides_for(parameter), otherwise a copy with these
/// strides.
torch::Tensor with_strides_of(const torch::Tensor& parameter, const torch::Tensor& tensor);

/// Copies `count` elements, counted in the order of memory. Neither tensor has gaps, and both have
/// the same dtype and device. A few elements on the CPU are copied without a call of LibTorch.
void copy_elements(const torch::Tensor& from, std::int64_t from_begin, const torch::Tensor& to,
                   std::int64_t to_begin, std::int64_t count);

/// A guard: as long as it exists, an optimizer has other parameters and their state. Not
/// thread-safe.
class Substitution {
 public:
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  /// @param by_group parameters of each group of the optimizer @param states their states; the
  /// destructor returns them as the optimizer has left them
  Substitution(torch::optim::Optimizer& optimizer,
               std::vector<std::vector<torch::Tensor>>& by_group, States& states)
      : optimizer_(optimizer), by_group_(by_group), states_(states) {
    swap();
  }
  Substitution(const Substitution&) = delete;
  Substitution& operator=(const Substitution&) = delete;
  ~Substitution() { swap(); }

 private:
  void swap() noexcept {
    for (std::size_t g = 0; g < by_group_.size(); ++g)
      optimizer_.param_groups()[g].params().swap(by_group_[g]);
    optimizer_.state().swap(states_);
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<torch::Tensor>>& by_group_;
  States& states_;
};

}  // namespace hvd::libtorch
