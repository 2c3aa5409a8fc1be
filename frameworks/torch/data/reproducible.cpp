#include "data/reproducible.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <mutex>
#include <numeric>

namespace hvd::libtorch {

// Words 1 and 2 of the state are a bijection of `start`. The algorithm uses one bit of word 0.
at::Generator generator_from(std::uint64_t start) {
  at::mt19937_data_pod state{};
  state.seed_ = start;
  state.left_ = 1;
  state.next_ = 0;
  state.seeded_ = true;
  state.state_[0] = 0x80000000U;
  for (std::size_t i = 1; i < state.state_.size(); ++i) {
    const std::uint64_t pair = mix(start + (i - 1) / 2);
    state.state_[i] = static_cast<std::uint32_t>(i % 2 == 1 ? pair >> 32 : pair);
  }
  at::mt19937 engine;
  engine.set_data(state);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
  generator.get<at::CPUGeneratorImpl>()->set_engine(engine);
  return generator;
}

std::vector<std::size_t> epoch_order(std::size_t dataset_size, bool shuffle, std::uint64_t seed,
                                     std::uint64_t epoch) {
  std::vector<std::size_t> order(dataset_size);
  if (!shuffle) {
    std::iota(order.begin(), order.end(), std::size_t{0});
    return order;
  }
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed + epoch);
  const at::Tensor permutation = at::randperm(static_cast<std::int64_t>(dataset_size), generator,
                                              at::TensorOptions(at::kLong));
  const auto* data = permutation.const_data_ptr<std::int64_t>();
  std::transform(data, data + dataset_size, order.begin(),
                 [](std::int64_t i) { return static_cast<std::size_t>(i); });
  return order;
}

void settle_vector_functions() {
  using VectorFunction = at::Tensor (*)(const at::Tensor&);
  // The functions that ATen/cpu/vml.h uses from MKL.
  static constexpr VectorFunction kFunctions[] = {
      at::acos, at::asin, at::atan,  at::cos, at::erf,  at::erfc, at::erfinv, at::exp,
      at::log,  at::log2, at::log10, at::sin, at::sqrt, at::tan,  at::tanh,   at::trunc};
  static std::once_flag once;
  std::call_once(once, [] {
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
      const at::Tensor value = at::full({1}, 0.5, at::TensorOptions(at::kCPU).dtype(type));
      for (const VectorFunction function : kFunctions) function(value);
    }
  });
}

}  // namespace hvd::libtorch
