#include "optimizer/live_optimizers.h"

#include <c10/util/Synchronized.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <unordered_map>

#include "hvd/elastic.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "operations/membership.h"

namespace hvd::libtorch {

using torch::optim::Optimizer;

LiveOptimizers::LiveOptimizers()
    : generations_(elastic::at_each_generation(
          [this] { registered_.withLock([](Registered& all) { all.constructed.clear(); }); })) {}

LiveOptimizers& LiveOptimizers::instance() {
  static LiveOptimizers live;
  return live;
}

void LiveOptimizers::Registered::own(const Optimizer& optimizer,
                                     std::span<const ReducedParameter> parameters,
                                     const std::string& who) {
  for (const auto& parameter : parameters) {
    const auto owner = owners.find(parameter.tensor().unsafeGetTensorImpl());
    if (owner == owners.end() || owner->second == &optimizer) continue;
    throw UsageError(
        who + ": parameter '" + parameter.name() +
        "' belongs to another DistributedOptimizer or ShardedOptimizer, of another "
        "optimizer, so its gradient would be reduced twice; expected each parameter in "
        "one of them at a time; destroy the first one, or give each its own parameters");
  }
  for (const auto& parameter : parameters)
    owners.emplace(parameter.tensor().unsafeGetTensorImpl(), &optimizer);
}

void LiveOptimizers::add(const Optimizer& optimizer, std::span<const ReducedParameter> parameters,
                         bool averaging, const std::string& who) {
  registered_.withLock([&](Registered& all) {
    if (all.wrapped.contains(&optimizer)) {
      throw UsageError(
          who +
          ": this optimizer is wrapped by another DistributedOptimizer or ShardedOptimizer "
          "already, so every gradient would be reduced twice; destroy the first wrapper");
    }
    all.own(optimizer, parameters, who);
    all.wrapped.insert(&optimizer);
    all.averaging += averaging ? 1 : 0;
  });
}

void LiveOptimizers::extend(const Optimizer& optimizer,
                            std::span<const ReducedParameter> parameters, const std::string& who) {
  registered_.withLock([&](Registered& all) { all.own(optimizer, parameters, who); });
}

void LiveOptimizers::shrink(const Optimizer& optimizer, std::span<const torch::Tensor> parameters) {
  registered_.withLock([&](Registered& all) {
    std::erase_if(all.owners, [&](const auto& item) { return item.second == &optimizer; });
    for (const torch::Tensor& parameter : parameters)
      all.owners.emplace(parameter.unsafeGetTensorImpl(), &optimizer);
  });
}

void LiveOptimizers::remove(const Optimizer& optimizer, bool averaging) {
  registered_.withLock([&](Registered& all) {
    all.wrapped.erase(&optimizer);
    all.sharded.erase(&optimizer);
    all.wrappers.erase(&optimizer);
    std::erase_if(all.owners, [&](const auto& item) { return item.second == &optimizer; });
    all.averaging -= averaging ? 1 : 0;
  });
}

void LiveOptimizers::set_sharded(const Optimizer& optimizer) {
  registered_.withLock([&](Registered& all) { all.sharded.insert(&optimizer); });
}

bool LiveOptimizers::is_sharded(const Optimizer& optimizer) const {
  return registered_.withLock(
      [&](const Registered& all) { return all.sharded.contains(&optimizer); });
}

void LiveOptimizers::set_wrapper(const Optimizer& optimizer, OptimizerWrapper* wrapper,
                                 const std::shared_ptr<Reducer>& reducer) {
  registered_.withLock([&](Registered& all) { all.wrappers[&optimizer] = {wrapper, reducer}; });
}

OptimizerWrapper* LiveOptimizers::wrapper_of(const Optimizer& optimizer) const {
  return registered_.withLock([&](const Registered& all) -> OptimizerWrapper* {
    const auto found = all.wrappers.find(&optimizer);
    return found == all.wrappers.end() ? nullptr : found->second.wrapper;
  });
}

std::shared_ptr<LiveOptimizers::Reducer> LiveOptimizers::reducer_of(
    const Optimizer& optimizer) const {
  return registered_.withLock([&](const Registered& all) {
    const auto found = all.wrappers.find(&optimizer);
    return found == all.wrappers.end() ? nullptr : found->second.reducer.lock();
  });
}

bool LiveOptimizers::trains(const torch::Tensor& parameter) const {
  return registered_.withLock(
      [&](const Registered& all) { return all.owners.contains(parameter.unsafeGetTensorImpl()); });
}

int LiveOptimizers::averaging() const {
  return registered_.withLock([](const Registered& all) { return all.averaging; });
}

std::string LiveOptimizers::next_scope(const ProcessSet& process_set) {
  return "opt" + std::to_string(registered_.withLock([&](Registered& all) {
           return all.constructed[{process_set.id(), membership_of(process_set).ranks}]++;
         }));
}

namespace {

/// The backward pass that causes a warning. One or two passes may belong to an evaluation.
constexpr int kPasses = 3;

struct Watch {
  std::atomic<bool> over = false;
  std::atomic<int> passes = 0;
};

using Watches = std::unordered_map<const c10::TensorImpl*, std::shared_ptr<Watch>>;

c10::Synchronized<Watches>& watches() {
  static auto* const all =
      new c10::Synchronized<Watches>();  // hooks may run after static destructors
  return *all;
}

void end(Watches& all, const torch::Tensor& parameter) {
  const auto found = all.find(parameter.unsafeGetTensorImpl());
  if (found == all.end()) return;
  found->second->over = true;
  all.erase(found);
}

}  // namespace

/// Watches one parameter, which represents all. The parameter owns the hook, so the hook does not
/// keep it alive.
void watch_departed(std::span<const ReducedParameter> parameters, const std::string& wrapper) {
  const auto first = std::find_if(parameters.begin(), parameters.end(),
                                  [](const auto& parameter) { return parameter.active(); });
  if (first == parameters.end()) return;
  const auto watch = std::make_shared<Watch>();
  watches().withLock([&](Watches& all) {
    end(all, first->tensor());
    all.emplace(first->tensor().unsafeGetTensorImpl(), watch);
  });
  first->tensor().register_hook([watch, wrapper, name = first->name()](const torch::Tensor&) {
    if (watch->over || !is_initialized() || ++watch->passes != kPasses) return;
    watch->over = true;
    TORCH_WARN("backward() has reached parameter '", name, "' ", kPasses, " times since the ",
               wrapper,
               " was destroyed, so its gradient is no longer reduced. If step() of the wrapped "
               "optimizer is called, each rank trains a model of its own: keep the ",
               wrapper, " for as long as the model is trained");
  });
}

void forget_departed(std::span<const ReducedParameter> parameters) {
  watches().withLock([&](Watches& all) {
    if (all.empty()) return;
    for (const ReducedParameter& parameter : parameters) end(all, parameter.tensor());
  });
}

}  // namespace hvd::libtorch
