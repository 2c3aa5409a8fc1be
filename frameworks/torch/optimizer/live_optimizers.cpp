#include "optimizer/live_optimizers.h"

#include "hvd/error.h"

namespace hvd::libtorch {

using torch::optim::Optimizer;

LiveOptimizers& LiveOptimizers::instance() {
  static LiveOptimizers live;
  return live;
}

void LiveOptimizers::add(const Optimizer& optimizer,
                         std::span<const GradientReducer::Parameter> parameters, bool averaging) {
  const std::lock_guard lock(mutex_);
  if (wrapped_.contains(&optimizer)) {
    throw UsageError(
        "DistributedOptimizer: this optimizer is wrapped by another DistributedOptimizer "
        "already, so every gradient "
        "would be reduced twice; destroy the first one before");
  }
  for (const auto& parameter : parameters) {
    if (!owners_.contains(parameter.tensor.unsafeGetTensorImpl())) continue;
    throw UsageError("DistributedOptimizer: parameter '" + parameter.name +
                     "' belongs to another DistributedOptimizer, of another optimizer, so its "
                     "gradient would be reduced twice; expected each parameter in "
                     "one DistributedOptimizer at a time; destroy the first one before, or give "
                     "each its own parameters");
  }
  wrapped_.insert(&optimizer);
  for (const auto& parameter : parameters)
    owners_.emplace(parameter.tensor.unsafeGetTensorImpl(), &optimizer);
  averaging_ += averaging ? 1 : 0;
}

void LiveOptimizers::remove(const Optimizer& optimizer, bool averaging) {
  const std::lock_guard lock(mutex_);
  wrapped_.erase(&optimizer);
  std::erase_if(owners_, [&](const auto& item) { return item.second == &optimizer; });
  averaging_ -= averaging ? 1 : 0;
}

int LiveOptimizers::averaging() const {
  const std::lock_guard lock(mutex_);
  return averaging_;
}

std::string LiveOptimizers::next_scope(const ProcessSet& process_set) {
  const std::lock_guard lock(mutex_);
  return "opt" + std::to_string(constructed_[{process_set.id(), process_set.ranks()}]++);
}

}  // namespace hvd::libtorch
