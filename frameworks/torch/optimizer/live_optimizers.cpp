#include "optimizer/live_optimizers.h"

#include "hvd/error.h"

namespace hvd::libtorch {

using torch::optim::Optimizer;

LiveOptimizers& LiveOptimizers::instance() {
  static LiveOptimizers live;
  return live;
}

void LiveOptimizers::add(const Optimizer& optimizer, std::span<const ReducedParameter> parameters,
                         bool averaging) {
  state_.withLock([&](State& state) {
    if (state.wrapped.contains(&optimizer)) {
      throw UsageError(
          "DistributedOptimizer: this optimizer is wrapped by another DistributedOptimizer "
          "already, so every gradient would be reduced twice; destroy the first one before");
    }
    for (const auto& parameter : parameters) {
      if (!state.owners.contains(parameter.tensor().unsafeGetTensorImpl())) continue;
      throw UsageError("DistributedOptimizer: parameter '" + parameter.name() +
                       "' belongs to another DistributedOptimizer, of another optimizer, so its "
                       "gradient would be reduced twice; expected each parameter in one "
                       "DistributedOptimizer at a time; destroy the first one before, or give each "
                       "its own parameters");
    }
    state.wrapped.insert(&optimizer);
    for (const auto& parameter : parameters)
      state.owners.emplace(parameter.tensor().unsafeGetTensorImpl(), &optimizer);
    state.averaging += averaging ? 1 : 0;
  });
}

void LiveOptimizers::remove(const Optimizer& optimizer, bool averaging) {
  state_.withLock([&](State& state) {
    state.wrapped.erase(&optimizer);
    std::erase_if(state.owners, [&](const auto& item) { return item.second == &optimizer; });
    state.averaging -= averaging ? 1 : 0;
  });
}

int LiveOptimizers::averaging() const {
  return state_.withLock([](const State& state) { return state.averaging; });
}

std::string LiveOptimizers::next_scope(const ProcessSet& process_set) {
  return "opt" + std::to_string(state_.withLock([&](State& state) {
           return state.constructed[{process_set.id(), process_set.ranks()}]++;
         }));
}

}  // namespace hvd::libtorch
