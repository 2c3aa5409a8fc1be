#include "optimizer/live_optimizers.h"

#include "hvd/error.h"

namespace hvd::libtorch {

using torch::optim::Optimizer;

LiveOptimizers& LiveOptimizers::instance() {
  static LiveOptimizers live;
  return live;
}

void LiveOptimizers::State::own(const Optimizer& optimizer,
                                std::span<const ReducedParameter> parameters,
                                const std::string& who) {
  for (const auto& parameter : parameters) {
    const auto owner = owners.find(parameter.tensor().unsafeGetTensorImpl());
    if (owner == owners.end() || owner->second == &optimizer) continue;
    throw UsageError(
        who + ": parameter '" + parameter.name() +
        "' belongs to another DistributedOptimizer or ShardedOptimizer, of another "
        "optimizer, so its gradient would be reduced twice; expected each parameter in "
        "one of them at a time; destroy the first one before, or give each its own "
        "parameters");
  }
  for (const auto& parameter : parameters)
    owners.emplace(parameter.tensor().unsafeGetTensorImpl(), &optimizer);
}

void LiveOptimizers::add(const Optimizer& optimizer, std::span<const ReducedParameter> parameters,
                         bool averaging, const std::string& who) {
  state_.withLock([&](State& state) {
    if (state.wrapped.contains(&optimizer)) {
      throw UsageError(
          who +
          ": this optimizer is wrapped by another DistributedOptimizer or ShardedOptimizer "
          "already, so every gradient would be reduced twice; destroy the first one before");
    }
    state.own(optimizer, parameters, who);
    state.wrapped.insert(&optimizer);
    state.averaging += averaging ? 1 : 0;
  });
}

void LiveOptimizers::extend(const Optimizer& optimizer,
                            std::span<const ReducedParameter> parameters, const std::string& who) {
  state_.withLock([&](State& state) { state.own(optimizer, parameters, who); });
}

void LiveOptimizers::shrink(const Optimizer& optimizer, std::span<const torch::Tensor> parameters) {
  state_.withLock([&](State& state) {
    std::erase_if(state.owners, [&](const auto& item) { return item.second == &optimizer; });
    for (const torch::Tensor& parameter : parameters)
      state.owners.emplace(parameter.unsafeGetTensorImpl(), &optimizer);
  });
}

void LiveOptimizers::remove(const Optimizer& optimizer, bool averaging) {
  state_.withLock([&](State& state) {
    state.wrapped.erase(&optimizer);
    state.sharded.erase(&optimizer);
    std::erase_if(state.owners, [&](const auto& item) { return item.second == &optimizer; });
    state.averaging -= averaging ? 1 : 0;
  });
}

void LiveOptimizers::set_sharded(const Optimizer& optimizer) {
  state_.withLock([&](State& state) { state.sharded.insert(&optimizer); });
}

bool LiveOptimizers::is_sharded(const Optimizer& optimizer) const {
  return state_.withLock([&](const State& state) { return state.sharded.contains(&optimizer); });
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
