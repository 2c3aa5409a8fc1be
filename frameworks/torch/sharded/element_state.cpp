#include "sharded/element_state.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstring>
#include <typeinfo>

#include "hvd/error.h"
#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;
using StatePtr = std::unique_ptr<OptimizerParamState>;

// One function for each kind of state, which visits its tensors.
template <class State, class Visit>
void each_tensor(State& state, const Visit& visit)
  requires std::derived_from<std::remove_const_t<State>, torch::optim::SGDParamState>
{
  visit(state.momentum_buffer());
}
template <class State>
concept AdamState = std::derived_from<std::remove_const_t<State>, torch::optim::AdamParamState> ||
                    std::derived_from<std::remove_const_t<State>, torch::optim::AdamWParamState>;
template <AdamState State, class Visit>
void each_tensor(State& state, const Visit& visit) {
  visit(state.exp_avg());
  visit(state.exp_avg_sq());
  visit(state.max_exp_avg_sq());
}
template <class State, class Visit>
void each_tensor(State& state, const Visit& visit)
  requires std::derived_from<std::remove_const_t<State>, torch::optim::AdagradParamState>
{
  visit(state.sum());
}
template <class State, class Visit>
void each_tensor(State& state, const Visit& visit)
  requires std::derived_from<std::remove_const_t<State>, torch::optim::RMSpropParamState>
{
  visit(state.square_avg());
  visit(state.momentum_buffer());
  visit(state.grad_avg());
}

template <class State>
bool read_as(const OptimizerParamState& state, ElementState& result) {
  const auto* const own = dynamic_cast<const State*>(&state);
  if (own == nullptr) return false;
  if constexpr (requires { own->step(); }) result.step = own->step();
  each_tensor(*own, [&](const torch::Tensor& tensor) { result.tensors.push_back(tensor); });
  return true;
}

template <class State>
StatePtr make_as(const ElementState& from) {
  auto state = std::make_unique<State>();
  if constexpr (requires { state->step(from.step); }) state->step(from.step);
  auto next = from.tensors.begin();
  each_tensor(*state, [&](torch::Tensor& tensor) { tensor = *next++; });
  return state;
}

}  // namespace

bool is_elementwise(const Optimizer& optimizer) {
  const std::type_info& type = typeid(optimizer);
  return type == typeid(torch::optim::SGD) || type == typeid(torch::optim::Adam) ||
         type == typeid(torch::optim::AdamW) || type == typeid(torch::optim::Adagrad) ||
         type == typeid(torch::optim::RMSprop);
}

ElementState element_state_of(const OptimizerParamState& state) {
  ElementState result;
  [[maybe_unused]] const bool known = read_as<torch::optim::SGDParamState>(state, result) ||
                                      read_as<torch::optim::AdamParamState>(state, result) ||
                                      read_as<torch::optim::AdamWParamState>(state, result) ||
                                      read_as<torch::optim::AdagradParamState>(state, result) ||
                                      read_as<torch::optim::RMSpropParamState>(state, result);
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(known, "the state of an elementwise optimizer");
  return result;
}

StatePtr make_state(const Optimizer& optimizer, const ElementState& state) {
  const std::type_info& type = typeid(optimizer);
  if (type == typeid(torch::optim::SGD)) return make_as<torch::optim::SGDParamState>(state);
  if (type == typeid(torch::optim::Adam)) return make_as<torch::optim::AdamParamState>(state);
  if (type == typeid(torch::optim::AdamW)) return make_as<torch::optim::AdamWParamState>(state);
  if (type == typeid(torch::optim::Adagrad)) return make_as<torch::optim::AdagradParamState>(state);
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(type == typeid(torch::optim::RMSprop),
                                   "an elementwise optimizer");
  return make_as<torch::optim::RMSpropParamState>(state);
}

StatePtr first_state(const torch::optim::OptimizerOptions& options,
                     const torch::Tensor& parameter) {
  const auto* const adagrad = dynamic_cast<const torch::optim::AdagradOptions*>(&options);
  if (adagrad == nullptr) return nullptr;
  return make_as<torch::optim::AdagradParamState>(
      {.step = 0,
       .tensors = {torch::full_like(parameter, adagrad->initial_accumulator_value(),
                                    parameter.options().requires_grad(false))}});
}

namespace {

/// LibTorch copies more bytes than this with several threads.
constexpr std::int64_t kFewBytes = std::int64_t{128} << 10;

}  // namespace

torch::Tensor flat_part(const torch::Tensor& tensor, std::int64_t begin, std::int64_t size) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(tensor.is_non_overlapping_and_dense());
  torch::Tensor row = torch::empty({0}, tensor.options().requires_grad(false));
  row.set_(tensor.storage(), tensor.storage_offset() + begin, {size}, {1});
  return row;
}

torch::Tensor with_strides(at::IntArrayRef strides, const torch::Tensor& tensor) {
  if (tensor.layout() == torch::kStrided && tensor.strides() == strides && !tensor.is_neg() &&
      !tensor.is_conj())
    return tensor;
  return torch::empty_strided(tensor.sizes(), strides, tensor.options().layout(torch::kStrided))
      .copy_(tensor.layout() == torch::kStrided ? tensor : tensor.to_dense());
}

torch::Tensor with_strides_of(const torch::Tensor& parameter, const torch::Tensor& tensor) {
  return with_strides(strides_for(parameter), tensor);
}

void copy_elements(const torch::Tensor& from, std::int64_t from_begin, const torch::Tensor& to,
                   std::int64_t to_begin, std::int64_t count) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(from.scalar_type() == to.scalar_type());
  const auto size = static_cast<std::int64_t>(from.element_size());
  if (!from.is_cpu() || !to.is_cpu() || count * size > kFewBytes) {
    flat_part(to, to_begin, count).copy_(flat_part(from, from_begin, count));
    return;
  }
  if (count == 0) return;
  std::memcpy(static_cast<std::byte*>(to.mutable_data_ptr()) + to_begin * size,
              static_cast<const std::byte*>(from.const_data_ptr()) + from_begin * size,
              static_cast<std::size_t>(count * size));
}

}  // namespace hvd::libtorch
