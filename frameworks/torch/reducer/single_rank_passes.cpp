#include "reducer/single_rank_passes.h"

#include <utility>

#include "base/text.h"

namespace hvd::libtorch {

UsageError too_many_passes(const std::string& wrapper, const std::string& name, int expected) {
  return UsageError(text(wrapper, ": backward() reached parameter '", name,
                         "' again after its gradient was handed over for this step (expected ",
                         expected,
                         " backward pass(es) per step); call step() or zero_grad() first, raise "
                         "backward_passes_per_step, or accumulate under no_sync()"));
}

UsageError graph_would_be_lost(const std::string& wrapper, const std::string& name) {
  return UsageError(
      text(wrapper, ": backward(create_graph = true) reached parameter '", name,
           "', whose gradient would be reduced and lose its graph; expected a backward() without "
           "create_graph; compute what needs the graph with torch::autograd::grad(), or under "
           "no_sync() and detach_() the gradients before step()"));
}

bool SingleRankPasses::suffice(const GradientReduction& how) {
  const bool same_values =
      how.prescale == 1 && how.postscale == 1 && how.compression == Compression::kNone;
  const bool plain = !how.sharded && !how.reduces_changes && !how.error_if_nonfinite && !how.hook;
  return same_values && plain && how.process_set.size() == 1;
}

SingleRankPasses::SingleRankPasses(const char* wrapper,
                                   std::span<const ReducedParameter> parameters,
                                   std::shared_ptr<std::atomic<int>> no_sync_depth,
                                   int passes_per_step)
    : wrapper_(wrapper),
      no_sync_depth_(std::move(no_sync_depth)),
      passes_per_step_(passes_per_step) {
  for (const ReducedParameter& parameter : parameters) {
    Counted& counted = parameters_.emplace_back();
    counted.name = parameter.name();
    counted.parameter = parameter.tensor();
  }
}

void SingleRankPasses::begin_pass(std::size_t parameter) {
  Counted& counted = parameters_[parameter];
  const bool counts = no_sync_depth_->load(std::memory_order_relaxed) == 0;
  if (counts && torch::GradMode::is_enabled()) throw graph_would_be_lost(wrapper_, counted.name);
  reached_.store(true, std::memory_order_relaxed);
  int passes = counted.passes.load(std::memory_order_relaxed);
  // The program has reset the gradients.
  if (passes > 0 && !counted.parameter.grad().defined()) passes = 0;
  const int expected = passes_per_step_.load(std::memory_order_relaxed);
  if (passes >= expected) throw too_many_passes(wrapper_, counted.name, expected);
  if (counts && ++passes == expected) complete_.store(true, std::memory_order_relaxed);
  counted.passes.store(passes, std::memory_order_relaxed);
}

void SingleRankPasses::end_cycle() noexcept {
  reached_.store(false, std::memory_order_relaxed);
  complete_.store(false, std::memory_order_relaxed);
  for (Counted& counted : parameters_) counted.passes.store(0, std::memory_order_relaxed);
}

}  // namespace hvd::libtorch
