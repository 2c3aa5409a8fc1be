#include "hvd/torch/distributed_optimizer.h"

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "gradient_reducer.h"
#include "hvd/error.h"
#include "hvd/torch/operations.h"
#include "live_optimizers.h"

namespace hvd {
namespace {

using libtorch::GradientReducer;
using torch::optim::Optimizer;

/// What the optimizers of this process must know of each other. Thread-safe.
class LiveOptimizers {
 public:
  static LiveOptimizers& instance() {
    static LiveOptimizers live;
    return live;
  }

  void add(const Optimizer& optimizer, bool averaging) {
    const std::lock_guard lock(mutex_);
    if (!wrapped_.insert(&optimizer).second) {
      throw UsageError(
          "DistributedOptimizer: this optimizer is wrapped by another DistributedOptimizer "
          "already, so every gradient "
          "would be reduced twice; destroy the first one before");
    }
    averaging_ += averaging ? 1 : 0;
  }
  void remove(const Optimizer& optimizer, bool averaging) {
    const std::lock_guard lock(mutex_);
    wrapped_.erase(&optimizer);
    averaging_ -= averaging ? 1 : 0;
  }
  /// "opt0", "opt1", ...: the n-th DistributedOptimizer of a process set, on every rank of it.
  std::string next_scope(int process_set) {
    const std::lock_guard lock(mutex_);
    return "opt" + std::to_string(constructed_[process_set]++);
  }
  int averaging() const {
    const std::lock_guard lock(mutex_);
    return averaging_;
  }

 private:
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::set<const Optimizer*> wrapped_;
  std::map<int, std::uint64_t> constructed_;
  int averaging_ = 0;
};

void check_options(const DistributedOptimizerOptions& options) {
  const std::string who = "DistributedOptimizer: ";
  if (options.op != ReduceOp::kAverage && options.op != ReduceOp::kSum &&
      options.op != ReduceOp::kAdasum) {
    throw UsageError(who + "op: expected average, sum or adasum, got " +
                     std::string(to_string(options.op)));
  }
  if (options.backward_passes_per_step < 1) {
    throw UsageError(who + "backward_passes_per_step: expected at least 1, got " +
                     std::to_string(options.backward_passes_per_step));
  }
  if (!(options.gradient_predivide_factor > 0)) {
    throw UsageError(who + "gradient_predivide_factor: expected a positive number, got " +
                     std::to_string(options.gradient_predivide_factor));
  }
  if (options.gradient_predivide_factor != 1 && options.op != ReduceOp::kAverage) {
    throw UsageError(
        who + "gradient_predivide_factor splits the division of an average, but op is " +
        std::string(to_string(options.op)) + "; use ReduceOp::kAverage or leave the factor at 1");
  }
  if (!options.process_set.included()) {
    throw UsageError(who + "this rank is not in process set " +
                     std::to_string(options.process_set.id()));
  }
}

libtorch::GradientReduction reduction_of(const DistributedOptimizerOptions& options) {
  return {.op = options.op,
          .prescale = 1 / options.gradient_predivide_factor,
          .postscale = options.gradient_predivide_factor,
          .compression = options.compression,
          .process_set = options.process_set,
          .sparse = options.sparse_as_dense ? libtorch::SparseGradients::kMakeDense
                                            : libtorch::SparseGradients::kReduceSparse,
          .bucket_views = options.gradient_as_bucket_view};
}

/// By name: which of the user's groups a parameter is in.
std::map<std::string, int> groups_by_name(const DistributedOptimizerOptions& options) {
  std::map<std::string, int> groups;
  for (std::size_t g = 0; g < options.groups.size(); ++g) {
    for (const std::string& name : options.groups[g]) {
      if (!groups.emplace(name, static_cast<int>(g)).second) {
        throw UsageError("DistributedOptimizer: groups: parameter '" + name +
                         "' occurs twice; expected each name in at most one group");
      }
    }
  }
  return groups;
}

/// The optimizer's parameters in its own order, each once, with their names.
std::vector<GradientReducer::Parameter> name_parameters(
    const Optimizer& optimizer, const NamedParameters& named,
    const DistributedOptimizerOptions& options) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : named) {
    if (item.key().empty()) throw UsageError("DistributedOptimizer: a parameter has an empty name");
    // Tied parameters have several names; the first one counts.
    if (item.value().defined()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  std::map<std::string, int> groups = groups_by_name(options);
  std::vector<GradientReducer::Parameter> parameters;
  std::set<const c10::TensorImpl*> seen;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& params = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!seen.insert(params[i].unsafeGetTensorImpl()).second) continue;
      const auto name = names.find(params[i].unsafeGetTensorImpl());
      if (name == names.end()) {
        throw UsageError("DistributedOptimizer: parameter " + std::to_string(i) +
                         " of parameter group " + std::to_string(g) + ", shape " +
                         shape_to_string(params[i].sizes().vec()) +
                         ", has no name; pass the named_parameters() of every module that the "
                         "optimizer updates");
      }
      const auto group = groups.extract(name->second);
      parameters.push_back(
          {.name = name->second, .tensor = params[i], .group = group ? group.mapped() : -1});
    }
  }
  if (!groups.empty()) {
    throw UsageError("DistributedOptimizer: groups: '" + groups.begin()->first +
                     "' is not the name of a parameter of this optimizer (a tied parameter goes by "
                     "its first name)");
  }
  return parameters;
}

/// Multiplies gradients and notes whether there was an inf or nan in one. Those on a GPU are looked at by the GPU, all in one launch for
/// each type where LibTorch can, and nobody waits.
class Unscaler {
 public:
  explicit Unscaler(double factor) : factor_(factor) {}

  /// run() returns its result on the GPU if a parameter is there, with or without a gradient, so that ranks do alike.
  void uses(torch::Device device) {
    if (device.is_cuda()) device_ = device;
  }
  void add(const torch::Tensor& values) {
    if (!values.is_cuda()) {
      finite_ = finite_ && torch::isfinite(values).all().item<bool>();
      values.mul_(factor_);
    } else if (values.scalar_type() == torch::kFloat32 || values.scalar_type() == torch::kFloat16) {
      together_[values.scalar_type()].push_back(values);
    } else {
      alone_.push_back(values);
    }
  }
  /// [1], float32: 0 if all was finite.
  torch::Tensor run() {
    const auto options = torch::TensorOptions().dtype(torch::kFloat32).device(device_);
    torch::Tensor found = torch::full({1}, finite_ ? 0.0F : 1.0F, options);
    for (auto& [type, values] : together_) {
      at::_amp_foreach_non_finite_check_and_unscale_(values, found, torch::full({1}, factor_, options));
    }
    for (const torch::Tensor& values : alone_) {
      found = torch::maximum(found, torch::isfinite(values).logical_not().any().to(torch::kFloat32));
      values.mul_(factor_);
    }
    return found;
  }

 private:
  const double factor_;
  torch::Device device_ = torch::kCPU;
  bool finite_ = true;
  std::map<torch::ScalarType, std::vector<torch::Tensor>> together_;
  std::vector<torch::Tensor> alone_;
};

}  // namespace

int libtorch::averaging_optimizers() noexcept { return LiveOptimizers::instance().averaging(); }

DistributedOptimizer::DistributedOptimizer(Optimizer& optimizer, const NamedParameters& parameters,
                                           DistributedOptimizerOptions options)
    : optimizer_(optimizer),
      options_(std::move(options)),
      skip_depth_(std::make_shared<std::atomic<int>>(0)) {
  check_options(options_);
  auto named = name_parameters(optimizer, parameters, options_);
  const bool averaging = options_.op == ReduceOp::kAverage;
  LiveOptimizers& live = LiveOptimizers::instance();
  live.add(optimizer, averaging);
  try {
    reducer_ = std::make_shared<GradientReducer>(live.next_scope(options_.process_set.id()),
                                                 std::move(named), reduction_of(options_),
                                                 options_.backward_passes_per_step);
    reducer_->install_hooks();
  } catch (...) {
    if (reducer_) reducer_->remove_hooks();
    live.remove(optimizer, averaging);
    throw;
  }
}

DistributedOptimizer::~DistributedOptimizer() {
  reducer_->remove_hooks();
  LiveOptimizers::instance().remove(optimizer_, options_.op == ReduceOp::kAverage);
}

torch::Tensor DistributedOptimizer::step(Optimizer::LossClosure closure) {
  const bool skip = skip_depth_->load() > 0;
  torch::Tensor loss;
  if (skip && reducer_->in_flight()) {
    throw UsageError(
        "DistributedOptimizer::step() under skip_synchronize(): gradients are still being reduced; "
        "call synchronize() "
        "after backward() and before step()");
  }
  if (closure && !skip) {
    loss = optimizer_.step([&] { return reduced_loss(closure); });
  } else {
    if (!skip) reducer_->synchronize();
    loss = optimizer_.step(std::move(closure));
  }
  end_step();
  return loss;
}

/// One evaluation of the closure with what all ranks must agree on reduced: LBFGS decides by the
/// loss how often it evaluates.
torch::Tensor DistributedOptimizer::reduced_loss(const Optimizer::LossClosure& closure) {
  reducer_->begin_cycle();
  const torch::Tensor loss = closure();
  reducer_->synchronize();
  if (!loss.defined()) return loss;
  return allreduce(loss.detach(),
                   {.name = reducer_->scope() + ".loss",
                    .op = options_.op == ReduceOp::kSum ? ReduceOp::kSum : ReduceOp::kAverage,
                    .process_set = options_.process_set});
}

void DistributedOptimizer::end_step() {
  reducer_->begin_cycle();
  reducer_->install_hooks();
}

bool DistributedOptimizer::unscale_gradients(double factor) {
  const torch::NoGradGuard no_grad;
  Unscaler unscaler(factor);
  std::set<const c10::TensorImpl*> seen;
  for (auto& group : optimizer_.param_groups()) {
    for (torch::Tensor& parameter : group.params()) {
      torch::Tensor& gradient = parameter.mutable_grad();
      unscaler.uses(parameter.device());
      if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      // Entries of one place add up, and may overflow.
      if (gradient.is_sparse()) gradient = gradient.coalesce();
      unscaler.add(gradient.is_sparse() ? gradient._values() : gradient.detach());
    }
  }
  const torch::Tensor bad = allreduce(unscaler.run(), {.name = reducer_->scope() + ".found_inf",
                                                       .op = ReduceOp::kMax,
                                                       .process_set = options_.process_set});
  return bad.item<float>() == 0;  // on a GPU the one time that the host waits, as in PyTorch
}

void DistributedOptimizer::zero_grad(bool set_to_none) {
  reducer_->discard();
  optimizer_.zero_grad(set_to_none);
  reducer_->install_hooks();
}

void DistributedOptimizer::synchronize() { reducer_->synchronize(); }

SkipSynchronize DistributedOptimizer::skip_synchronize() { return SkipSynchronize(skip_depth_); }

NoSync DistributedOptimizer::no_sync() { return NoSync(reducer_->no_sync_depth()); }

void DistributedOptimizer::set_backward_passes_per_step(int passes) {
  if (passes < 1) {
    throw UsageError(
        "DistributedOptimizer::set_backward_passes_per_step: expected at least 1, got " +
        std::to_string(passes));
  }
  reducer_->set_passes_per_step(passes);
}

}  // namespace hvd
