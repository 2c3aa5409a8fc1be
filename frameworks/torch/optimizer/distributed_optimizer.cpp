#include "hvd/torch/distributed_optimizer.h"

#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/operations.h"
#include "optimizer/departed_optimizers.h"
#include "optimizer/gradient_reducer.h"
#include "optimizer/group_mirror.h"
#include "optimizer/live_optimizers.h"
#include "optimizer/optimizer_options.h"
#include "optimizer/parameter_addition.h"
#include "optimizer/parameter_names.h"
#include "optimizer/unscaler.h"

namespace hvd {
namespace {

using libtorch::GradientReducer;
using libtorch::LiveOptimizers;
using libtorch::locked;
using libtorch::numbered;
using libtorch::ReducedParameter;
using torch::optim::Optimizer;

constexpr const char* kWho = "DistributedOptimizer";

}  // namespace

DistributedOptimizer::DistributedOptimizer(Optimizer& optimizer, const torch::nn::Module& module,
                                           DistributedOptimizerOptions options)
    : DistributedOptimizer(WithNames(), optimizer, libtorch::named_parameters_of(module, kWho),
                           std::move(options)) {}

DistributedOptimizer::DistributedOptimizer(Optimizer& optimizer,
                                           DistributedOptimizerOptions options)
    : DistributedOptimizer(WithNames(), optimizer, numbered(optimizer, NamedParameters()),
                           std::move(options)) {
  numbered_ = true;
}

DistributedOptimizer::DistributedOptimizer(WithNames, Optimizer& optimizer,
                                           const NamedParameters& parameters,
                                           DistributedOptimizerOptions options)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), optimizer.defaults().clone()),
      optimizer_(optimizer),
      named_(parameters),
      options_(std::move(options)),
      skip_depth_(std::make_shared<std::atomic<int>>(0)) {
  if (dynamic_cast<const DistributedOptimizer*>(&optimizer) != nullptr) {
    throw UsageError(
        "DistributedOptimizer: expected an optimizer that is not wrapped, got a "
        "DistributedOptimizer; every gradient would be reduced twice");
  }
  libtorch::check_options(options_, kWho);
  std::vector<ReducedParameter> named =
      libtorch::name_parameters(optimizer, parameters, options_.groups, kWho);
  groups_ = std::make_unique<libtorch::GroupMirror>(optimizer, *this);
  const bool averaging = options_.op == ReduceOp::kAverage;
  LiveOptimizers& live = LiveOptimizers::instance();
  live.add(optimizer, named, averaging, kWho);
  try {
    reducer_ = std::make_shared<libtorch::SharedReducer>(std::make_unique<GradientReducer>(
        std::move(named), libtorch::reduction_of(options_, live.next_scope(options_.process_set)),
        options_.backward_passes_per_step));
    if (options_.adasum_delta) {
      local_gradients_ =
          libtorch::counted_scope(locked(*reducer_, &GradientReducer::no_sync_depth));
    }
    locked(*reducer_, &GradientReducer::compare_also, named_);
    locked(*reducer_, &GradientReducer::install_hooks, reducer_);
    locked(*reducer_, &GradientReducer::open_device_queue);
  } catch (...) {
    if (reducer_) locked(*reducer_, &GradientReducer::remove_hooks);
    live.remove(optimizer, averaging);
    throw;
  }
}

DistributedOptimizer::~DistributedOptimizer() {
  warn_of_early_end();
  locked(*reducer_, &GradientReducer::remove_hooks);
  LiveOptimizers::instance().remove(optimizer_, options_.op == ReduceOp::kAverage);
}

void DistributedOptimizer::warn_of_early_end() const {
  const bool in_job = is_initialized() && options_.process_set.included();
  if (!in_job || options_.process_set.size() == 1 || std::uncaught_exceptions() > 0) return;
  if (!locked(*reducer_, &GradientReducer::has_reduced)) {
    TORCH_WARN(
        "a DistributedOptimizer is destroyed that has never reduced a gradient; if the wrapped "
        "optimizer goes on to step(), each rank trains a model of its own: keep the "
        "DistributedOptimizer for as long as the model is trained");
    return;
  }
  if (locked(*reducer_, &GradientReducer::in_flight)) {
    TORCH_WARN(
        "a DistributedOptimizer is destroyed between backward() and step(), while gradients are "
        "being reduced, whose results are lost; expected step() or zero_grad() before its end");
  }
  locked(*reducer_, [](const GradientReducer& reducer) {
    libtorch::watch_departed(reducer.parameters(), kWho);
  });
}

torch::Tensor DistributedOptimizer::step(Optimizer::LossClosure closure) {
  refuse_new_parameters();
  groups_->reconcile();
  const torch::Tensor loss =
      options_.adasum_delta ? step_and_combine(closure) : reduce_and_step(closure);
  end_step();
  groups_->reconcile();  // an optimizer may change its own options
  return loss;
}

torch::Tensor DistributedOptimizer::reduce_and_step(const Optimizer::LossClosure& closure) {
  const bool skip = skip_depth_->load() > 0;
  torch::Tensor loss;
  const auto refuse_in_flight = [this](const char* when) {
    if (!locked(*reducer_, &GradientReducer::in_flight)) return;
    throw UsageError(std::string("DistributedOptimizer::step() under skip_synchronize(): gradients "
                                 "are still being reduced") +
                     when + "; call synchronize() after backward() and before step()");
  };
  if (skip) refuse_in_flight("");
  if (!closure) {
    if (!skip) locked(*reducer_, &GradientReducer::synchronize);
    loss = optimizer_.step();
  } else if (!skip) {
    loss = optimizer_.step([&] { return reduced_loss(closure); });
  } else {
    loss = optimizer_.step([&] {
      torch::Tensor own = closure();
      refuse_in_flight(
          " when the closure returns (it may call synchronize() itself, or leave out "
          "skip_synchronize())");
      return own;
    });
  }
  return loss;
}

/// What the optimizer changes travels as gradients do, so that all that the reducer notices of
/// ranks that differ it notices here, too.
torch::Tensor DistributedOptimizer::step_and_combine(const Optimizer::LossClosure& closure) {
  struct Trained {
    torch::Tensor parameter, before, gradient;
  };
  std::vector<Trained> all;
  for (const torch::Tensor& parameter : all_parameters())
    all.push_back({parameter, parameter.detach().clone(), {}});
  const auto go_back = [&] {
    for (const Trained& trained : all) trained.parameter.detach().copy_(trained.before);
  };
  const auto give_back_gradients = [&] {
    for (Trained& trained : all) trained.parameter.mutable_grad() = trained.gradient;
  };
  torch::Tensor loss;
  try {
    loss = closure ? optimizer_.step(closure) : optimizer_.step();
  } catch (...) {
    go_back();
    throw;
  }
  const torch::NoGradGuard no_grad;
  for (Trained& trained : all) {
    torch::Tensor& gradient = trained.parameter.mutable_grad();
    trained.gradient = gradient;
    if (gradient.defined()) gradient = trained.parameter.detach() - trained.before;
  }
  go_back();  // to what the ranks compare
  try {
    locked(*reducer_, &GradientReducer::synchronize);
  } catch (...) {
    give_back_gradients();
    throw;
  }
  for (const Trained& trained : all) {
    const torch::Tensor& change = trained.parameter.grad();
    if (change.defined()) trained.parameter.detach().add_(change);
  }
  give_back_gradients();
  return loss;
}

/// Those that the optimizer was given since would be updated with this rank's own gradients.
void DistributedOptimizer::refuse_new_parameters() const {
  const auto known = locked(*reducer_, &GradientReducer::known);
  for (std::size_t g = 0; g < optimizer_.param_groups().size(); ++g) {
    const auto& params = optimizer_.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (known->contains(params[i].unsafeGetTensorImpl())) continue;
      std::string name = "without a name";
      for (const auto& item : named_) {
        if (item.value().is_same(params[i])) name = "'" + item.key() + "'";
      }
      throw UsageError("DistributedOptimizer: parameter " + std::to_string(i) +
                       " of parameter group " + std::to_string(g) + ", " + name + ", shape " +
                       shape_to_string(params[i].sizes().vec()) +
                       ", was added to the optimizer after the DistributedOptimizer was "
                       "constructed (add_param_group()), so its gradients are not reduced; "
                       "add it before, or destroy the DistributedOptimizer and construct it anew, "
                       "with names for all parameters");
    }
  }
}

NamedParameters DistributedOptimizer::names_with(const NamedParameters& names) const {
  NamedParameters all = named_;
  for (const auto& item : names) {
    if (const torch::Tensor* const known = all.find(item.key())) {
      if (known->is_same(item.value())) continue;
      throw UsageError("DistributedOptimizer::add_param_group: the name '" + item.key() +
                       "' is taken by another parameter; expected names of their own");
    }
    all.insert(item.key(), item.value());
  }
  return numbered_ ? numbered(optimizer_, std::move(all)) : all;
}

/// LibTorch takes a parameter twice, and updates it twice.
void DistributedOptimizer::refuse_known(const torch::optim::OptimizerParamGroup& group) const {
  const auto known = locked(*reducer_, &GradientReducer::known);
  std::set<const c10::TensorImpl*> seen;
  for (std::size_t i = 0; i < group.params().size(); ++i) {
    const torch::Tensor& parameter = group.params()[i];
    const std::string which =
        "DistributedOptimizer::add_param_group: parameter " + std::to_string(i) + " of the group";
    if (!parameter.defined()) throw UsageError(which + " is undefined; expected a tensor");
    const auto* const identity = parameter.unsafeGetTensorImpl();
    if (known->contains(identity) || !seen.insert(identity).second) {
      throw UsageError(which + ", shape " + shape_to_string(parameter.sizes().vec()) +
                       ", is in more than one parameter group, or twice in this one; expected "
                       "each parameter once");
    }
  }
}

void DistributedOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group,
                                           const NamedParameters& names) {
  auto& groups = optimizer_.param_groups();
  const std::size_t before = groups.size();
  NamedParameters named;
  std::vector<ReducedParameter> all, added;
  std::string complaint;
  try {
    refuse_new_parameters();
    if (locked(*reducer_, &GradientReducer::in_flight)) {
      throw UsageError(
          "DistributedOptimizer::add_param_group: gradients are being reduced; call it after "
          "step() and before the next backward()");
    }
    refuse_known(group);
    groups_->reconcile();
    optimizer_.add_param_group(group);
    named = names_with(names);
    all = libtorch::name_parameters(optimizer_, named, options_.groups, kWho);
    LiveOptimizers::instance().extend(optimizer_, all, kWho);
  } catch (const c10::Error& error) {
    complaint =
        std::string("DistributedOptimizer::add_param_group: ") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    complaint = error.what();
  }
  const auto known = locked(*reducer_, &GradientReducer::known);
  std::copy_if(all.begin(), all.end(), std::back_inserter(added), [&](const auto& parameter) {
    return !known->contains(parameter.tensor().unsafeGetTensorImpl());
  });
  try {
    libtorch::agree_on_addition(locked(*reducer_, &GradientReducer::scope), options_.process_set,
                                complaint, added);
  } catch (...) {
    while (groups.size() > before) groups.pop_back();
    LiveOptimizers::instance().shrink(optimizer_, all_parameters());
    throw;
  }
  named_ = std::move(named);
  groups_->take_over();
  replace_reducer(std::move(all));
}

/// Another SharedReducer too, so that hooks of the former one that LibTorch keeps do nothing.
void DistributedOptimizer::replace_reducer(std::vector<ReducedParameter> parameters) {
  locked(*reducer_, &GradientReducer::remove_hooks);
  earlier_versions_ += locked(*reducer_, &GradientReducer::gradients_version) + 1;
  reducer_ = std::make_shared<libtorch::SharedReducer>(
      locked(*reducer_, [&](const GradientReducer& former) {
        return std::make_unique<GradientReducer>(std::move(parameters), former);
      }));
  if (!locked(*reducer_, &GradientReducer::has_reduced))
    locked(*reducer_, &GradientReducer::compare_also, named_);
  locked(*reducer_, &GradientReducer::install_hooks, reducer_);
}

std::vector<torch::Tensor> DistributedOptimizer::all_parameters() const {
  std::vector<torch::Tensor> all;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& group : optimizer_.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) all.push_back(parameter);
    }
  }
  return all;
}

/// One evaluation of the closure with what all ranks must agree on reduced: LBFGS decides by the
/// loss how often it evaluates.
torch::Tensor DistributedOptimizer::reduced_loss(const Optimizer::LossClosure& closure) {
  locked(*reducer_, &GradientReducer::begin_cycle);
  const torch::Tensor loss = closure();
  locked(*reducer_, &GradientReducer::synchronize);
  if (!loss.defined()) return loss;
  return allreduce(loss.detach(),
                   {.name = locked(*reducer_, &GradientReducer::scope) + ".loss",
                    .op = options_.op == ReduceOp::kSum ? ReduceOp::kSum : ReduceOp::kAverage,
                    .process_set = options_.process_set});
}

void DistributedOptimizer::end_step() {
  locked(*reducer_, &GradientReducer::begin_cycle);
  locked(*reducer_, &GradientReducer::install_hooks, reducer_);
}

torch::Tensor DistributedOptimizer::unscale_gradients(double factor) {
  const torch::NoGradGuard no_grad;
  libtorch::Unscaler unscaler(factor);
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
  return unscaler.run();
}

bool DistributedOptimizer::all_finite(const torch::Tensor& unscaled) const {
  const torch::Tensor bad =
      allreduce(unscaled, {.name = locked(*reducer_, &GradientReducer::scope) + ".found_inf",
                           .op = ReduceOp::kMax,
                           .process_set = options_.process_set});
  return bad.item<float>() == 0;  // on a GPU the one time that the host waits, as in PyTorch
}

std::uint64_t DistributedOptimizer::gradients_version() const {
  return earlier_versions_ + locked(*reducer_, &GradientReducer::gradients_version);
}

void DistributedOptimizer::zero_grad(bool set_to_none) {
  refuse_new_parameters();
  locked(*reducer_, &GradientReducer::discard);
  optimizer_.zero_grad(set_to_none);
  locked(*reducer_, &GradientReducer::install_hooks, reducer_);
}

void DistributedOptimizer::synchronize() {
  if (!options_.adasum_delta) locked(*reducer_, &GradientReducer::synchronize);
}

double DistributedOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  synchronize();
  return torch::nn::utils::clip_grad_norm_(all_parameters(), max_norm, norm_type);
}

void DistributedOptimizer::clip_grad_value_(double clip_value) {
  synchronize();
  torch::nn::utils::clip_grad_value_(all_parameters(), clip_value);
}

Optimizer& DistributedOptimizer::inner() noexcept {
  groups_->try_to_reconcile();
  return optimizer_;
}

void DistributedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  groups_->reconcile();
  optimizer_.save(archive);
}

/// What was written here before is overwritten, as in the wrapped one.
void DistributedOptimizer::load(torch::serialize::InputArchive& archive) {
  groups_->try_to_reconcile();
  optimizer_.load(archive);
  groups_->take_over();
}

std::vector<torch::optim::OptimizerParamGroup>& DistributedOptimizer::param_groups() noexcept {
  groups_->try_to_reconcile();
  return Optimizer::param_groups();
}

const std::vector<torch::optim::OptimizerParamGroup>& DistributedOptimizer::param_groups()
    const noexcept {
  groups_->try_to_reconcile();
  return Optimizer::param_groups();
}

SkipSynchronize DistributedOptimizer::skip_synchronize() {
  return SkipSynchronize(libtorch::counted_scope(skip_depth_));
}

NoSync DistributedOptimizer::no_sync() {
  return NoSync(libtorch::counted_scope(locked(*reducer_, &GradientReducer::no_sync_depth)));
}

void DistributedOptimizer::set_backward_passes_per_step(int passes) {
  if (passes < 1) {
    throw UsageError(
        "DistributedOptimizer::set_backward_passes_per_step: expected at least 1, got " +
        std::to_string(passes));
  }
  locked(*reducer_, &GradientReducer::set_passes_per_step, passes);
}

}  // namespace hvd
