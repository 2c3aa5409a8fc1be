#include "hvd/torch/sharded_optimizer.h"

#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <set>
#include <span>
#include <string>
#include <typeinfo>
#include <utility>

#include "base/text.h"
#include "hvd/elastic.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/operations.h"
#include "operations/agreement.h"
#include "operations/membership.h"
#include "optimizer/live_optimizers.h"
#include "optimizer/optimizer_wrapper.h"
#include "optimizer/parameter_groups.h"
#include "optimizer/unscaler.h"
#include "reducer/gradient_reducer.h"
#include "sharded/element_state.h"
#include "sharded/parameter_shards.h"
#include "sharded/shard_plan.h"
#include "tensors/script_module.h"

namespace hvd {
namespace {

using libtorch::GradientReducer;
using libtorch::LiveOptimizers;
using libtorch::locked;
using libtorch::ParameterShards;
using libtorch::ReducedParameter;
using torch::optim::Optimizer;
using Shards = std::vector<ParameterShards::Shard>;

constexpr const char* kSharded = "ShardedOptimizer";

DistributedOptimizerOptions all_options(ShardedOptimizerOptions options) {
  return {.op = options.op,
          .compression = options.compression,
          .backward_passes_per_step = options.backward_passes_per_step,
          .gradient_predivide_factor = options.gradient_predivide_factor,
          .groups = std::move(options.groups),
          .sparse_as_dense = options.sparse_as_dense,
          .bucket_bytes = options.bucket_bytes,
          .process_set = std::move(options.process_set),
          .gradient_hook = std::move(options.gradient_hook),
          .check_every = options.check_every,
          .error_if_nonfinite = options.error_if_nonfinite};
}

void refuse_unshardable(const Optimizer& optimizer) {
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw UsageError(
        "ShardedOptimizer: LBFGS looks at all parameters in each step, so that no rank can update "
        "a part of them; expected another optimizer, or DistributedOptimizer");
  }
  std::set<const c10::TensorImpl*> seen;
  std::optional<torch::Device> device;
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
        throw UsageError("ShardedOptimizer: a parameter of shape " +
                         shape_to_string(parameter.sizes().vec()) +
                         " occurs twice in the optimizer; expected each parameter once");
      }
      if (device.value_or(parameter.device()) != parameter.device()) {
        throw UsageError("ShardedOptimizer: expected all parameters on one device, got some on " +
                         device->str() + " and some on " + parameter.device().str() +
                         "; use an optimizer and a ShardedOptimizer for each device");
      }
      device = parameter.device();
    }
  }
  if (seen.empty())
    throw UsageError("ShardedOptimizer: the optimizer has no parameters; expected at least one");
}

/// The optimizer's type, its parameters and the options of its groups.
std::vector<libtorch::Fact> facts_of(const Optimizer& optimizer,
                                     std::span<const ReducedParameter> parameters) {
  std::vector<libtorch::Fact> facts;
  const auto add = [&](std::string value) { facts.emplace_back("", std::move(value)); };
  add(text(c10::demangle(typeid(optimizer).name()), " with ", parameters.size(), " parameters"));
  const std::vector<std::string> options = libtorch::group_lines(optimizer);
  std::size_t next = 0;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const std::size_t end = next + optimizer.param_groups()[g].params().size();
    for (; next < std::min(end, parameters.size()); ++next) {
      const torch::Tensor& tensor = parameters[next].tensor();
      add(text("'", parameters[next].name(), "' ", shape_to_string(tensor.sizes().vec()), ' ',
               c10::toString(tensor.scalar_type()), " on ",
               c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true),
               parameters[next].active() ? "" : " (frozen)", " in parameter group ", g));
    }
    add(options[g]);
  }
  return facts;
}

/// Compares the optimizers of all ranks. Collective, except in a worker of an elastic job that has
/// no rank yet. @param complaint why this rank cannot take part; empty if it can
void compare(const Optimizer& optimizer, std::span<const ReducedParameter> parameters,
             const ProcessSet& process_set, const std::string& scope,
             const std::string& complaint) {
  if (process_set.id() == 0 && libtorch::waits_for_rank()) {
    if (complaint.empty()) return;
    throw UsageError(complaint);
  }
  libtorch::agree(
      {.name = scope + ".shards",
       .title = text(kSharded, " (", scope, ")"),
       .process_set = process_set,
       .failed = "cannot take part",
       .expected = "expected the same model and the same optimizer on every rank"},
      complaint,
      complaint.empty() ? facts_of(optimizer, parameters) : std::vector<libtorch::Fact>());
}

/// Whether the parameter's elements can be distributed, given the layout of its gradients.
bool is_divisible(const ReducedParameter& parameter) {
  const torch::Tensor& tensor = parameter.tensor();
  return libtorch::is_supported(tensor.scalar_type()) && tensor.is_non_overlapping_and_dense() &&
         parameter.agreed_layout().value_or(0) == 0;
}

/// After a change of strides a rank would have other elements of the gradient than of the
/// parameter.
void refuse_other_strides(const GradientReducer& reducer) {
  for (const ReducedParameter& parameter : reducer.parameters()) {
    if (!parameter.view().defined() || !parameter.has_gradient() ||
        parameter.view().strides() == libtorch::strides_for(parameter.tensor()))
      continue;
    throw UsageError("ShardedOptimizer: the strides (memory format) of parameter '" +
                     parameter.name() +
                     "' have changed since backward(), so that this rank does not have the part of "
                     "its gradient that it updates; expected such changes between step() and "
                     "backward(); call zero_grad(), and backward() again");
  }
}

/// Returns the shards. For an elementwise optimizer a bucket is one shard, which is divided among
/// the ranks in the same way as its gradients. Every other parameter is a shard by itself.
Shards shards_of(const GradientReducer& reducer, bool elementwise, int ranks) {
  const std::vector<ReducedParameter>& parameters = reducer.parameters();
  std::vector<std::size_t> bytes;
  for (const ReducedParameter& parameter : parameters) bytes.push_back(parameter.tensor().nbytes());
  const std::vector<int> owners = libtorch::assign_owners(bytes, ranks);
  Shards shards;
  for (const libtorch::GradientUnit& unit : reducer.units().all()) {
    if (unit.bucket && elementwise) {
      const auto first = unit.bucket->first();
      shards.push_back({.plan = {.members = unit.members,
                                 .first = {first.begin(), first.end()},
                                 .elements = unit.bucket->elements()},
                        .memory = unit.bucket->flat()});
      continue;
    }
    for (const std::size_t p : unit.members) {
      const bool cut = elementwise && is_divisible(parameters[p]);
      shards.push_back({.plan = {.members = {p},
                                 .first = {0},
                                 .elements = parameters[p].tensor().numel(),
                                 .owner = cut ? -1 : owners[p]},
                        .frozen = !parameters[p].active()});
    }
  }
  return shards;
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(Optimizer& optimizer, ShardedOptimizerOptions options)
    : ShardedOptimizer(WithNames(), optimizer, libtorch::numbered(optimizer, NamedParameters()),
                       std::move(options), /*numbered=*/true) {}

ShardedOptimizer::ShardedOptimizer(Optimizer& optimizer, const torch::nn::Module& module,
                                   ShardedOptimizerOptions options)
    : ShardedOptimizer(WithNames(), optimizer, module.named_parameters(), std::move(options),
                       /*numbered=*/false, module.named_buffers()) {}

ShardedOptimizer::ShardedOptimizer(Optimizer& optimizer, const torch::jit::Module& module,
                                   ShardedOptimizerOptions options)
    : ShardedOptimizer(WithNames(), optimizer, libtorch::script_parameters(module, kSharded),
                       std::move(options), /*numbered=*/false,
                       libtorch::script_buffers(module, kSharded)) {}

ShardedOptimizer::ShardedOptimizer(WithNames, Optimizer& optimizer,
                                   const NamedParameters& parameters,
                                   ShardedOptimizerOptions options, bool numbered,
                                   const NamedParameters& buffers)
    : OptimizerWrapper(kSharded, optimizer, parameters, numbered, all_options(options)),
      replicas_(options.replicas) {
  libtorch::require_member(kSharded, options_.process_set);
  const std::string scope = LiveOptimizers::instance().next_scope(options_.process_set);
  std::vector<ReducedParameter> named;
  std::string complaint;
  try {
    libtorch::check_options(options_, kSharded);
    if (options_.op == ReduceOp::kAdasum)
      throw UsageError("ShardedOptimizer: op: expected average or sum, got adasum");
    if (replicas_ < 0 || replicas_ > 1)
      throw UsageError(text(kSharded, ": replicas: expected 0 or 1, got ", replicas_));
    refuse_wrapper();
    refuse_unshardable(optimizer);
    named = libtorch::name_parameters(optimizer, parameters, options_.groups, kSharded);
    enroll(named);
  } catch (const std::exception& error) {
    complaint = error.what();
  }
  compare(optimizer, named, options_.process_set, scope, complaint);
  std::vector<torch::Tensor> tensors;
  for (const ReducedParameter& parameter : named) tensors.push_back(parameter.tensor());
  shards_ =
      std::make_unique<ParameterShards>(optimizer, std::move(tensors), scope, options_.process_set);
  libtorch::GradientReduction how = libtorch::reduction_of(options_, scope);
  how.wrapper = kSharded;
  how.statistics = libtorch::batch_norm_statistics(buffers);
  how.sharded = libtorch::is_elementwise(optimizer);
  how.options = [&optimizer] { return libtorch::group_lines(optimizer); };
  start_reducing(std::move(named), std::move(how));
  LiveOptimizers::instance().set_sharded(optimizer);
  generations_ = elastic::at_each_generation([this] { begin_generation(); });
}

/// Called after the reducer was replaced for the ranks of this generation.
void ShardedOptimizer::begin_generation() {
  if (options_.process_set.id() != 0) return;  // its operations fail
  if (!tracked_ && shards_->distributed()) {
    throw UsageError(
        "ShardedOptimizer: the ranks have changed, and with them the state is lost, because the "
        "optimizer is not tracked; expected elastic::TorchState::track(), or a ShardedOptimizer "
        "that is constructed in the function of run()");
  }
  const std::string scope = locked(*reducer_, &GradientReducer::scope);
  shards_->begin_generation(scope);
  locked(*reducer_, [&](const GradientReducer& reducer) {
    compare(optimizer_, reducer.parameters(), options_.process_set, scope, "");
  });
}

ShardedOptimizer::~ShardedOptimizer() = default;

/// Refuses parameters that were added to the optimizer later, which are in no rank's part.
void ShardedOptimizer::refuse_other_parameters() const {
  const std::vector<torch::Tensor>& known = shards_->parameters();
  std::size_t next = 0;
  bool same = true;
  for (const auto& group : optimizer_.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      same = same && next < known.size() && parameter.is_same(known[next]);
      ++next;
    }
  }
  if (same && next == known.size()) return;
  throw UsageError(
      "ShardedOptimizer: the optimizer's parameters are not those that it had when the "
      "ShardedOptimizer was constructed (add_param_group()); add them before, or construct the "
      "ShardedOptimizer anew");
}

void ShardedOptimizer::synchronize() {
  locked(*reducer_, &GradientReducer::synchronize);
  follow_gradients();
}

void ShardedOptimizer::follow_gradients() {
  if (shards_->strides_changed()) locked(*reducer_, refuse_other_strides);
  lay_out();
}

void ShardedOptimizer::lay_out() {
  const auto version =
      locked(*reducer_, [](const GradientReducer& reducer) { return reducer.units().version(); });
  shards_->lay_out(version, [this] {
    return locked(*reducer_, shards_of, libtorch::is_elementwise(optimizer_),
                  options_.process_set.size());
  });
}

torch::Tensor ShardedOptimizer::step(Optimizer::LossClosure closure) {
  refuse_new_parameters();
  refuse_other_parameters();
  groups_->reconcile();
  const bool skip = skips_synchronize();
  if (skip) refuse_in_flight("");
  torch::Tensor loss;
  if (closure) loss = skip ? loss_without_synchronizing(closure) : reduced_loss(closure);
  if (!skip) locked(*reducer_, &GradientReducer::synchronize);
  follow_gradients();
  shards_->step();
  end_step();
  groups_->reconcile();  // an optimizer may change its own options
  return loss;
}

/// Also runs for a step that a GradScaler skips: otherwise the next backward() would add to its
/// gradients.
void ShardedOptimizer::end_step() {
  // Buckets now contain parameters, not gradients.
  for (const torch::Tensor& parameter : shards_->parameters())
    parameter.mutable_grad() = torch::Tensor();
  end_cycle();
}

double ShardedOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  synchronize();
  const torch::NoGradGuard no_grad;
  const bool largest = std::isinf(norm_type);
  const torch::Device device = shards_->parameters().front().device();
  const torch::ScalarType type = device.is_cpu() ? torch::kFloat64 : torch::kFloat32;
  torch::Tensor own = torch::zeros({1}, torch::TensorOptions(type).device(device));
  const std::vector<torch::Tensor> gradients = shards_->gradients();
  for (const torch::Tensor& gradient : gradients) {
    const torch::Tensor norm =
        torch::linalg_vector_norm(gradient, norm_type, std::nullopt, /*keepdim=*/false, type);
    own = largest ? torch::maximum(own, norm) : own + norm.pow(norm_type);
  }
  const torch::Tensor all =
      allreduce(own, {.name = locked(*reducer_, &GradientReducer::scope) + ".norm",
                      .op = largest ? ReduceOp::kMax : ReduceOp::kSum,
                      .process_set = options_.process_set});
  const double sum = all.item<double>();
  const double norm = largest ? sum : std::pow(sum, 1 / norm_type);
  const double factor = max_norm / (norm + 1e-6);  // as in LibTorch
  if (!(factor >= 1)) {
    for (const torch::Tensor& gradient : gradients) gradient.mul_(factor);
  }
  return norm;
}

void ShardedOptimizer::clip_grad_value_(double clip_value) {
  synchronize();
  const torch::NoGradGuard no_grad;
  for (const torch::Tensor& gradient : shards_->gradients())
    gradient.clamp_(-clip_value, clip_value);
}

torch::Tensor ShardedOptimizer::unscale_gradients(double factor) {
  const torch::NoGradGuard no_grad;
  libtorch::Unscaler unscaler(factor);
  unscaler.uses(shards_->parameters().front().device());
  for (const torch::Tensor& gradient : shards_->gradients()) unscaler.add(gradient);
  return unscaler.run();
}

void ShardedOptimizer::encode_part(libtorch::ObjectWriter& writer) const {
  shards_->encode(writer);
}

void ShardedOptimizer::redistribute() {
  shards_->forget_state();
  lay_out();
}

/// Refuses parameters on another device, like the constructor: they cannot be gathered with the
/// rest.
void ShardedOptimizer::refuse_group(const torch::optim::OptimizerParamGroup& group) const {
  const torch::Device device = shards_->parameters().front().device();
  for (const torch::Tensor& parameter : group.params()) {
    if (parameter.device() == device) continue;
    throw UsageError("ShardedOptimizer::add_param_group: expected parameters on " + device.str() +
                     ", as the optimizer's others, got some on " + parameter.device().str() +
                     "; use an optimizer and a ShardedOptimizer for each device");
  }
}

void ShardedOptimizer::group_added() { shards_->add_parameters(); }

void ShardedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  groups_->reconcile();
  shards_->with_whole_state([&] { optimizer_.save(archive); });
}

/// Overwrites options that the program has set on the wrapper, as load() does in the wrapped
/// optimizer.
void ShardedOptimizer::load(torch::serialize::InputArchive& archive) {
  groups_->try_to_reconcile();
  optimizer_.load(archive);
  shards_->forget_state();
  groups_->copy_wrapped_groups();
}

std::size_t ShardedOptimizer::state_bytes() const { return shards_->state_bytes(); }

}  // namespace hvd
