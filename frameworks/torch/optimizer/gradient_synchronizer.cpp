#include "hvd/torch/gradient_synchronizer.h"

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hvd/elastic.h"
#include "hvd/error.h"
#include "operations/membership.h"
#include "optimizer/live_optimizers.h"
#include "optimizer/optimizer_wrapper.h"
#include "reducer/gradient_hooks.h"
#include "reducer/gradient_reducer.h"

namespace hvd {
namespace {

using libtorch::GradientReducer;
using libtorch::locked;
using libtorch::ReducedParameter;

constexpr const char* kSynchronizer = "GradientSynchronizer";

/// Each tensor once, under its first name.
std::vector<ReducedParameter> reduced_parameters(
    const NamedParameters& named, const std::vector<std::vector<std::string>>& groups) {
  std::map<std::string, int> group_of = libtorch::groups_by_name(groups, kSynchronizer);
  std::vector<ReducedParameter> parameters;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : named) {
    if (item.key().empty() || !item.value().defined())
      throw UsageError(std::string(kSynchronizer) +
                       ": expected a name and a tensor for each parameter");
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    const auto group = group_of.extract(item.key());
    parameters.emplace_back(item.key(), item.value(), group ? group.mapped() : -1);
  }
  if (!group_of.empty()) {
    throw UsageError(std::string(kSynchronizer) + ": groups: '" + group_of.begin()->first +
                     "' is not the name of a parameter (a tied parameter goes by its first name)");
  }
  if (parameters.empty())
    throw UsageError(std::string(kSynchronizer) + ": expected at least one parameter, got none");
  return parameters;
}

}  // namespace

GradientSynchronizer::GradientSynchronizer(std::vector<ReducedParameter> parameters,
                                           libtorch::GradientReduction how, int passes_per_step,
                                           const NamedParameters& named)
    : named_(named), self_(std::make_shared<GradientSynchronizer*>(this)) {
  libtorch::forget_departed(parameters);
  reducer_ = std::make_shared<SharedReducer>(
      std::make_unique<GradientReducer>(std::move(parameters), std::move(how), passes_per_step));
  locked(*reducer_, &GradientReducer::compare_frozen, named);
  locked(*reducer_, &GradientReducer::install_hooks, reducer_);
  if (!libtorch::waits_for_rank()) locked(*reducer_, &GradientReducer::open_device_queue);
  generations_ = elastic::at_each_generation([self = self_] { (*self)->begin_generation(); });
}

/// LibTorch may still call hooks of the former reducer, which then return at once.
GradientSynchronizer::GradientSynchronizer(std::vector<ReducedParameter> parameters,
                                           GradientSynchronizer& former,
                                           const NamedParameters& named)
    : named_(named), self_(former.self_), generations_(std::move(former.generations_)) {
  *self_ = this;
  locked(*former.reducer_, &GradientReducer::remove_hooks);
  libtorch::forget_departed(parameters);
  reducer_ =
      std::make_shared<SharedReducer>(locked(*former.reducer_, [&](const GradientReducer& reducer) {
        return std::make_unique<GradientReducer>(std::move(parameters), reducer);
      }));
  if (!locked(*reducer_, &GradientReducer::has_reduced))
    locked(*reducer_, &GradientReducer::compare_frozen, named);
  locked(*reducer_, &GradientReducer::install_hooks, reducer_);
}

namespace {

libtorch::GradientReduction reduction_for(const DistributedOptimizerOptions& options) {
  libtorch::check_options(options, kSynchronizer);
  if (options.adasum_delta) {
    throw UsageError(std::string(kSynchronizer) +
                     ": adasum_delta: expected false, because the caller makes the step; reduce "
                     "the changes with grouped_allreduce_()");
  }
  return libtorch::reduction_of(options, "");
}

}  // namespace

GradientSynchronizer::GradientSynchronizer(const NamedParameters& parameters,
                                           const DistributedOptimizerOptions& options) {
  libtorch::GradientReduction how = reduction_for(options);
  std::vector<ReducedParameter> reduced = reduced_parameters(parameters, options.groups);
  how.scope = libtorch::LiveOptimizers::instance().next_scope(options.process_set);
  GradientSynchronizer made(std::move(reduced), std::move(how), options.backward_passes_per_step,
                            parameters);
  locked(*made.reducer_, &GradientReducer::skip_reduction, made.reducer_);
  reducer_ = std::exchange(made.reducer_, nullptr);
  named_ = parameters;
  self_ = made.self_;
  *self_ = this;
  generations_ = std::move(made.generations_);
}

/// Replaces the reducer, because the ranks of the job have changed. A process set ends with its
/// generation, so the reducer of a process set is not replaced, and its operations fail.
void GradientSynchronizer::begin_generation() {
  reducer_->withLock([this](std::unique_ptr<GradientReducer>& reducer) {
    if (!reducer->of_all_ranks()) return;
    auto next = std::make_unique<GradientReducer>(
        *reducer, libtorch::LiveOptimizers::instance().next_scope(reducer->process_set()));
    reducer->remove_hooks();
    reducer->drop_gradients();
    reducer = std::move(next);
    reducer->compare_frozen(named_);
    reducer->install_hooks(reducer_);
    reducer->open_device_queue();
  });
}

GradientSynchronizer::~GradientSynchronizer() {
  if (reducer_) locked(*reducer_, &GradientReducer::remove_hooks);
}

void GradientSynchronizer::synchronize() { locked(*reducer_, &GradientReducer::synchronize); }

void GradientSynchronizer::end_step() {
  locked(*reducer_, &GradientReducer::begin_cycle);
  locked(*reducer_, &GradientReducer::install_hooks, reducer_);
}

void GradientSynchronizer::discard() {
  locked(*reducer_, &GradientReducer::discard);
  locked(*reducer_, &GradientReducer::install_hooks, reducer_);
}

bool GradientSynchronizer::in_flight() const {
  return locked(*reducer_, &GradientReducer::in_flight);
}

bool GradientSynchronizer::synchronized() const {
  return locked(*reducer_, &GradientReducer::reduced);
}

NoSync GradientSynchronizer::no_sync() {
  return NoSync(libtorch::counted_scope(locked(*reducer_, &GradientReducer::no_sync_depth)));
}

void GradientSynchronizer::set_backward_passes_per_step(int passes) {
  if (passes < 1) {
    throw UsageError(std::string(kSynchronizer) +
                     "::set_backward_passes_per_step: expected at least 1, got " +
                     std::to_string(passes));
  }
  locked(*reducer_, &GradientReducer::set_passes_per_step, passes);
}

void set_gradient_error_handler(void (*handler)()) noexcept {
  libtorch::GradientHooks::error_handler = handler;
}

}  // namespace hvd
