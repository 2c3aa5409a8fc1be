#include "optimizer/optimizer_wrapper.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "hvd/elastic.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/options.h"
#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/operations.h"
#include "operations/agreement.h"
#include "optimizer/live_optimizers.h"
#include "optimizer/parameter_groups.h"
#include "reducer/gradient_reducer.h"
#include "tensors/script_module.h"

namespace hvd {
namespace libtorch {
namespace {

int check_every(const DistributedOptimizerOptions& options) {
  constexpr int kDefault = 100;
  return options.check_every ? *options.check_every : requested_check_interval().value_or(kDefault);
}

}  // namespace

void check_options(const DistributedOptimizerOptions& options, const std::string& who) {
  if (options.op != ReduceOp::kAverage && options.op != ReduceOp::kSum &&
      options.op != ReduceOp::kAdasum) {
    throw UsageError(who + ": op: expected average, sum or adasum, got " +
                     std::string(to_string(options.op)));
  }
  if (options.backward_passes_per_step < 1) {
    throw UsageError(who + ": backward_passes_per_step: expected at least 1, got " +
                     std::to_string(options.backward_passes_per_step));
  }
  if (!(options.gradient_predivide_factor > 0)) {
    throw UsageError(who + ": gradient_predivide_factor: expected a positive number, got " +
                     std::to_string(options.gradient_predivide_factor));
  }
  if (options.gradient_predivide_factor != 1 && options.op != ReduceOp::kAverage) {
    throw UsageError(
        who + ": gradient_predivide_factor splits the division of an average, but op is " +
        std::string(to_string(options.op)) + "; use ReduceOp::kAverage or leave the factor at 1");
  }
  if (options.adasum_delta && options.op != ReduceOp::kAdasum) {
    throw UsageError(who + ": adasum_delta: expected op to be adasum, got " +
                     std::string(to_string(options.op)));
  }
  const bool hvd_reduces = options.op == ReduceOp::kAdasum ||
                           options.compression != Compression::kNone ||
                           options.gradient_predivide_factor != 1;
  if (options.gradient_hook && hvd_reduces) {
    throw UsageError(who +
                     ": gradient_hook reduces gradients itself; expected op to be average or sum, "
                     "no compression and a gradient_predivide_factor of 1");
  }
  if (options.bucket_bytes < 0) {
    throw UsageError(who +
                     ": bucket_bytes: expected a number of bytes, or 0 for the default, got " +
                     std::to_string(options.bucket_bytes));
  }
  if (options.check_every.value_or(0) < 0) {
    throw UsageError(who + ": check_every: expected a number of reductions, or 0 for never, got " +
                     std::to_string(*options.check_every));
  }
  libtorch::require_member(who, options.process_set);
}

std::shared_ptr<const void> counted_scope(std::shared_ptr<std::atomic<int>> depth) {
  ++*depth;
  return {depth.get(), [depth](const void*) { --*depth; }};
}

GradientReduction reduction_of(const DistributedOptimizerOptions& options, std::string scope) {
  return {.scope = std::move(scope),
          .op = options.op,
          .prescale = 1 / options.gradient_predivide_factor,
          .postscale = options.gradient_predivide_factor,
          .compression = options.compression,
          .process_set = options.process_set,
          .divide_by_size = options.divide_by_size,
          .sparse = options.sparse_as_dense || options.gradient_hook
                        ? SparseGradients::kMakeDense
                        : SparseGradients::kReduceSparse,
          .bucket_views = options.gradient_as_bucket_view,
          .bucket_bytes = options.bucket_bytes,
          .check_every = check_every(options),
          .error_if_nonfinite = options.error_if_nonfinite,
          .reduces_changes = options.adasum_delta,
          .hook = options.gradient_hook};
}

std::map<std::string, int> groups_by_name(const std::vector<std::vector<std::string>>& groups,
                                          const std::string& who) {
  std::map<std::string, int> by_name;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const std::string& name : groups[g]) {
      if (!by_name.emplace(name, static_cast<int>(g)).second) {
        throw UsageError(who + ": groups: parameter '" + name +
                         "' occurs twice; expected each name in at most one group");
      }
    }
  }
  return by_name;
}

NamedParameters named_parameters_of(const torch::nn::Module& module, const std::string& who) {
  NamedParameters named = module.named_parameters();
  if (named.is_empty()) {
    throw UsageError(who + ": the module " + module.name() +
                     " has no parameters; expected the one that the optimizer trains");
  }
  return named;
}

NamedParameters named_parameters_of(const torch::jit::Module& module, const std::string& who) {
  NamedParameters named = script_parameters(module, who);
  if (named.is_empty()) {
    throw UsageError(who + ": the module " + script_name(module) +
                     " has no parameters; expected the one that the optimizer trains, which was "
                     "not frozen");
  }
  return named;
}

std::vector<std::pair<std::string, torch::Tensor>> batch_norm_statistics(
    const NamedParameters& buffers) {
  std::vector<std::pair<std::string, torch::Tensor>> statistics;
  for (const auto& buffer : buffers) {
    const bool wanted =
        buffer.key().ends_with("running_mean") || buffer.key().ends_with("running_var");
    if (wanted && buffer.value().defined() && buffer.value().is_floating_point())
      statistics.emplace_back(buffer.key(), buffer.value());
  }
  return statistics;
}

NamedParameters numbered(const torch::optim::Optimizer& optimizer, NamedParameters known) {
  std::set<const c10::TensorImpl*> named, seen;
  for (const auto& item : known) named.insert(item.value().unsafeGetTensorImpl());
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      const auto* const identity = parameter.unsafeGetTensorImpl();
      if (!seen.insert(identity).second || named.contains(identity)) continue;
      known.insert("param" + std::to_string(seen.size() - 1), parameter);
    }
  }
  return known;
}

std::vector<ReducedParameter> name_parameters(const torch::optim::Optimizer& optimizer,
                                              const NamedParameters& named,
                                              const std::vector<std::vector<std::string>>& groups,
                                              const std::string& who) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : named) {
    if (item.key().empty())
      throw UsageError(who + ": a parameter has an empty name; expected a name for each");
    // Tied parameters have several names; the first one counts.
    if (item.value().defined()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  std::map<std::string, int> group_of = groups_by_name(groups, who);
  std::vector<ReducedParameter> parameters;
  std::set<const c10::TensorImpl*> seen;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& params = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!seen.insert(params[i].unsafeGetTensorImpl()).second) continue;
      const auto name = names.find(params[i].unsafeGetTensorImpl());
      if (name == names.end()) {
        throw UsageError(who + ": parameter " + std::to_string(i) + " of parameter group " +
                         std::to_string(g) + ", shape " + shape_to_string(params[i].sizes().vec()) +
                         ", has no name; pass the named_parameters() of every module that the "
                         "optimizer updates");
      }
      const auto group = group_of.extract(name->second);
      parameters.emplace_back(name->second, params[i], group ? group.mapped() : -1);
    }
  }
  if (!group_of.empty()) {
    throw UsageError(who + ": groups: '" + group_of.begin()->first +
                     "' is not the name of a parameter of this optimizer (a tied parameter goes by "
                     "its first name)");
  }
  return parameters;
}

}  // namespace libtorch

using libtorch::GradientReducer;
using libtorch::LiveOptimizers;
using libtorch::locked;
using libtorch::numbered;
using libtorch::ReducedParameter;
using torch::optim::Optimizer;

OptimizerWrapper::OptimizerWrapper(const char* who, Optimizer& optimizer,
                                   const NamedParameters& parameters, bool numbered,
                                   DistributedOptimizerOptions options)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), optimizer.defaults().clone()),
      optimizer_(optimizer),
      options_(std::move(options)),
      who_(who),
      named_(parameters),
      numbered_(numbered),
      skip_depth_(std::make_shared<std::atomic<int>>(0)) {}

OptimizerWrapper::~OptimizerWrapper() {
  if (gradients_) warn_of_early_end();
  gradients_.reset();
  if (enrolled_) LiveOptimizers::instance().remove(optimizer_, options_.op == ReduceOp::kAverage);
}

/// Does not warn if no gradient was reduced, because the program may only evaluate its model.
/// Watches the backward passes that follow.
void OptimizerWrapper::warn_of_early_end() const {
  const bool in_job = elastic::has_rank() && options_.process_set.included();
  if (!in_job || options_.process_set.size() == 1 || std::uncaught_exceptions() > 0) return;
  if (locked(*reducer_, &GradientReducer::in_flight)) {
    TORCH_WARN(
        "a ", who_,
        " is destroyed between backward() and step(), while gradients are "
        "being reduced, whose results are lost; expected step() or zero_grad() before its end");
  }
  locked(*reducer_, [this](const GradientReducer& reducer) {
    libtorch::watch_departed(reducer.parameters(), who_);
  });
}

void OptimizerWrapper::refuse_wrapper() const {
  const auto* const other = dynamic_cast<const OptimizerWrapper*>(&optimizer_);
  if (other == nullptr) return;
  throw UsageError(std::string(who_) + ": expected an optimizer that is not wrapped, got a " +
                   other->who_ + "; every gradient would be reduced twice");
}

void OptimizerWrapper::enroll(std::span<const ReducedParameter> parameters) {
  groups_ = std::make_unique<libtorch::GroupMirror>(optimizer_, *this, who_);
  LiveOptimizers::instance().add(optimizer_, parameters, options_.op == ReduceOp::kAverage, who_);
  enrolled_ = true;
  // The wrapped optimizer may have been restored from a commit.
  generations_ = elastic::at_each_generation([this] { groups_->copy_wrapped_groups(); });
}

void OptimizerWrapper::start_reducing(std::vector<ReducedParameter> parameters,
                                      libtorch::GradientReduction how) {
  gradients_.reset(new GradientSynchronizer(std::move(parameters), std::move(how),
                                            options_.backward_passes_per_step, named_));
  reducer_ = gradients_->reducer_;
  LiveOptimizers::instance().set_wrapper(optimizer_, this, reducer_);
}

void OptimizerWrapper::refuse_in_flight(const char* when) const {
  if (!locked(*reducer_, &GradientReducer::in_flight)) return;
  throw UsageError(std::string(who_) +
                   "::step() under skip_synchronize(): gradients are still being reduced" + when +
                   "; call synchronize() after backward() and before step()");
}

torch::Tensor OptimizerWrapper::loss_without_synchronizing(const LossClosure& closure) const {
  const torch::AutoGradMode enable(true);
  torch::Tensor own = closure();
  refuse_in_flight(
      " when the closure returns (it may call synchronize() itself, or leave out "
      "skip_synchronize())");
  return own;
}

/// Refuses parameters that were added to the optimizer later: it would update them with this rank's
/// own gradients.
void OptimizerWrapper::refuse_new_parameters() const {
  const auto known = locked(*reducer_, &GradientReducer::known);
  std::size_t number = 0;
  for (std::size_t g = 0; g < optimizer_.param_groups().size(); ++g) {
    const auto& params = optimizer_.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (known->contains(params[i].unsafeGetTensorImpl(), number++)) continue;
      std::string name = "without a name";
      for (const auto& item : named_) {
        if (item.value().is_same(params[i])) name = "'" + item.key() + "'";
      }
      throw UsageError(std::string(who_) + ": parameter " + std::to_string(i) +
                       " of parameter group " + std::to_string(g) + ", " + name + ", shape " +
                       shape_to_string(params[i].sizes().vec()) +
                       ", was added to the optimizer after the " + who_ +
                       " was constructed (add_param_group()), so its gradients are not reduced; "
                       "add it before, or destroy the " +
                       who_ +
                       " and construct it anew, "
                       "with names for all parameters");
    }
  }
}

NamedParameters OptimizerWrapper::names_with(const NamedParameters& names) const {
  NamedParameters all = named_;
  for (const auto& item : names) {
    if (const torch::Tensor* const known = all.find(item.key())) {
      if (known->is_same(item.value())) continue;
      throw UsageError(std::string(who_) + "::add_param_group: the name '" + item.key() +
                       "' is taken by another parameter; expected names that are not in use");
    }
    all.insert(item.key(), item.value());
  }
  return numbered_ ? numbered(optimizer_, std::move(all)) : all;
}

/// Refuses a parameter that is already in a group: LibTorch would accept it, and update it twice.
void OptimizerWrapper::refuse_known(const torch::optim::OptimizerParamGroup& group) const {
  const auto known = locked(*reducer_, &GradientReducer::known);
  std::set<const c10::TensorImpl*> seen;
  for (std::size_t i = 0; i < group.params().size(); ++i) {
    const torch::Tensor& parameter = group.params()[i];
    const std::string which =
        std::string(who_) + "::add_param_group: parameter " + std::to_string(i) + " of the group";
    if (!parameter.defined()) throw UsageError(which + " is undefined; expected a tensor");
    const auto* const identity = parameter.unsafeGetTensorImpl();
    if (known->contains(identity) || !seen.insert(identity).second) {
      throw UsageError(which + ", shape " + shape_to_string(parameter.sizes().vec()) +
                       ", is in more than one parameter group, or twice in this one; expected "
                       "each parameter once");
    }
  }
}

void OptimizerWrapper::add_param_group(const torch::optim::OptimizerParamGroup& group,
                                       const NamedParameters& names) {
  auto& groups = optimizer_.param_groups();
  const std::size_t before = groups.size();
  NamedParameters named;
  std::vector<ReducedParameter> all;
  std::vector<libtorch::Fact> added;
  std::string complaint;
  try {
    refuse_new_parameters();
    if (locked(*reducer_, &GradientReducer::in_flight)) {
      throw UsageError(std::string(who_) +
                       "::add_param_group: gradients are being reduced; call it after step() and "
                       "before the next backward()");
    }
    refuse_known(group);
    refuse_group(group);
    groups_->reconcile();
    optimizer_.add_param_group(group);
    named = names_with(names);
    all = libtorch::name_parameters(optimizer_, named, options_.groups, who_);
    LiveOptimizers::instance().extend(optimizer_, all, who_);
  } catch (const c10::Error& error) {
    complaint = std::string(who_) + "::add_param_group: " + error.what_without_backtrace();
  } catch (const std::exception& error) {
    complaint = error.what();
  }
  const auto known = locked(*reducer_, &GradientReducer::known);
  for (const ReducedParameter& parameter : all) {
    const torch::Tensor& tensor = parameter.tensor();
    if (known->contains(tensor.unsafeGetTensorImpl())) continue;
    added.emplace_back(
        "", text("'", parameter.name(), "' ", shape_to_string(tensor.sizes().vec()), ' ',
                 c10::toString(tensor.scalar_type()), parameter.active() ? "" : " (frozen)"));
  }
  try {
    const std::string scope = locked(*reducer_, &GradientReducer::scope);
    libtorch::agree({.name = scope + ".add_param_group",
                     .title = text(who_, " (", scope, "): add_param_group"),
                     .process_set = options_.process_set,
                     .failed = "cannot add its group",
                     .verb = "adds",
                     .expected = "expected the same parameters on every rank"},
                    complaint, added);
  } catch (...) {
    while (groups.size() > before) groups.pop_back();
    LiveOptimizers::instance().shrink(optimizer_, all_parameters());
    throw;
  }
  named_ = std::move(named);
  groups_->copy_wrapped_groups();
  replace_reducer(std::move(all));
  group_added();
}

void OptimizerWrapper::refuse_group(const torch::optim::OptimizerParamGroup& /*group*/) const {}

void OptimizerWrapper::group_added() {}

void OptimizerWrapper::replace_reducer(std::vector<ReducedParameter> parameters) {
  earlier_versions_ += locked(*reducer_, &GradientReducer::gradients_version) + 1;
  gradients_.reset(new GradientSynchronizer(std::move(parameters), *gradients_, named_));
  reducer_ = gradients_->reducer_;
  LiveOptimizers::instance().set_wrapper(optimizer_, this, reducer_);
}

std::vector<torch::Tensor> OptimizerWrapper::all_parameters() const {
  std::vector<torch::Tensor> all;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& group : optimizer_.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) all.push_back(parameter);
    }
  }
  return all;
}

/// Also reduces the loss, which LBFGS uses to decide how often to evaluate the closure.
torch::Tensor OptimizerWrapper::reduced_loss(const Optimizer::LossClosure& closure) {
  locked(*reducer_, &GradientReducer::begin_cycle);
  torch::Tensor loss;
  {
    const torch::AutoGradMode enable(true);
    loss = closure();
  }
  locked(*reducer_, &GradientReducer::synchronize);
  if (!loss.defined()) return loss;
  const double share =
      locked(*reducer_, [](const GradientReducer& reducer) { return reducer.weights().share(); });
  torch::Tensor own = loss.detach();
  if (share != 1) own = share == 0 ? torch::zeros_like(own) : own * share;
  return allreduce(own, {.name = locked(*reducer_, &GradientReducer::scope) + ".loss",
                         .op = options_.op == ReduceOp::kSum ? ReduceOp::kSum : ReduceOp::kAverage,
                         .process_set = options_.process_set});
}

void OptimizerWrapper::end_cycle() { gradients_->end_step(); }

bool OptimizerWrapper::all_finite(const torch::Tensor& unscaled) const {
  const torch::Tensor bad =
      allreduce(unscaled, {.name = locked(*reducer_, &GradientReducer::scope) + ".found_inf",
                           .op = ReduceOp::kMax,
                           .process_set = options_.process_set});
  return bad.item<float>() == 0;  // on a GPU the host waits here, and only here, as in PyTorch
}

std::uint64_t OptimizerWrapper::gradients_version() const {
  return earlier_versions_ + locked(*reducer_, &GradientReducer::gradients_version);
}

namespace {

/// Optimizer::zero_grad() detaches each gradient first, which has no effect on a gradient without a
/// graph and takes longer than all else.
void drop_gradients_without_graph(Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      torch::Tensor& gradient = parameter.mutable_grad();
      if (gradient.defined() && !gradient.requires_grad()) gradient.reset();
    }
  }
}

}  // namespace

void OptimizerWrapper::zero_grad(bool set_to_none) {
  refuse_new_parameters();
  locked(*reducer_, &GradientReducer::discard);
  if (set_to_none) drop_gradients_without_graph(optimizer_);
  optimizer_.zero_grad(set_to_none);
  locked(*reducer_, &GradientReducer::install_hooks, reducer_);
}

Optimizer& OptimizerWrapper::inner() noexcept {
  groups_->try_to_reconcile();
  return optimizer_;
}

std::vector<torch::optim::OptimizerParamGroup>& OptimizerWrapper::param_groups() noexcept {
  groups_->try_to_reconcile();
  return Optimizer::param_groups();
}

const std::vector<torch::optim::OptimizerParamGroup>& OptimizerWrapper::param_groups()
    const noexcept {
  groups_->try_to_reconcile();
  return Optimizer::param_groups();
}

SkipSynchronize OptimizerWrapper::skip_synchronize() {
  return SkipSynchronize(libtorch::counted_scope(skip_depth_));
}

NoSync OptimizerWrapper::no_sync() { return gradients_->no_sync(); }

void OptimizerWrapper::set_weight(std::int64_t samples) {
  locked(*reducer_, &GradientReducer::set_weight, samples);
}

void OptimizerWrapper::begin_pass(std::optional<std::int64_t> samples) {
  locked(*reducer_, &GradientReducer::begin_pass, samples);
}

void OptimizerWrapper::end_pass() { locked(*reducer_, &GradientReducer::end_pass); }

void OptimizerWrapper::set_backward_passes_per_step(int passes) {
  if (passes < 1) {
    throw UsageError(std::string(who_) +
                     "::set_backward_passes_per_step: expected at least 1, got " +
                     std::to_string(passes));
  }
  locked(*reducer_, &GradientReducer::set_passes_per_step, passes);
}

}  // namespace hvd
