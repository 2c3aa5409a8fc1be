#include "hvd/torch/distributed_optimizer.h"

#include <torch/nn/utils/clip_grad.h>

#include <utility>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "optimizer/live_optimizers.h"
#include "optimizer/optimizer_wrapper.h"
#include "optimizer/parameter_groups.h"
#include "optimizer/unscaler.h"
#include "reducer/gradient_reducer.h"
#include "tensors/script_module.h"

namespace hvd {
namespace {

using libtorch::GradientReducer;
using libtorch::LiveOptimizers;
using libtorch::locked;
using libtorch::ReducedParameter;
using torch::optim::Optimizer;

constexpr const char* kClass = "DistributedOptimizer";

}  // namespace

DistributedOptimizer::DistributedOptimizer(Optimizer& optimizer, const torch::nn::Module& module,
                                           DistributedOptimizerOptions options)
    : DistributedOptimizer(WithNames(), optimizer, libtorch::named_parameters_of(module, kClass),
                           std::move(options), /*numbered=*/false, module.named_buffers()) {}

DistributedOptimizer::DistributedOptimizer(Optimizer& optimizer, const torch::jit::Module& module,
                                           DistributedOptimizerOptions options)
    : DistributedOptimizer(WithNames(), optimizer, libtorch::named_parameters_of(module, kClass),
                           std::move(options), /*numbered=*/false,
                           libtorch::script_buffers(module, kClass)) {}

DistributedOptimizer::DistributedOptimizer(Optimizer& optimizer,
                                           DistributedOptimizerOptions options)
    : DistributedOptimizer(WithNames(), optimizer, libtorch::numbered(optimizer, NamedParameters()),
                           std::move(options), /*numbered=*/true) {}

DistributedOptimizer::DistributedOptimizer(WithNames, Optimizer& optimizer,
                                           const NamedParameters& parameters,
                                           DistributedOptimizerOptions options, bool numbered,
                                           const NamedParameters& buffers)
    : OptimizerWrapper(kClass, optimizer, parameters, numbered, std::move(options)) {
  refuse_wrapper();
  libtorch::check_options(options_, kClass);
  std::vector<ReducedParameter> named =
      libtorch::name_parameters(optimizer, parameters, options_.groups, kClass);
  enroll(named);
  const std::string scope = LiveOptimizers::instance().next_scope(options_.process_set);
  libtorch::GradientReduction how = libtorch::reduction_of(options_, scope);
  how.statistics = libtorch::batch_norm_statistics(buffers);
  start_reducing(std::move(named), std::move(how));
  if (options_.adasum_delta)
    local_gradients_ = libtorch::counted_scope(locked(*reducer_, &GradientReducer::no_sync_depth));
}

DistributedOptimizer::~DistributedOptimizer() = default;

torch::Tensor DistributedOptimizer::step(Optimizer::LossClosure closure) {
  refuse_new_parameters();
  groups_->reconcile();
  LiveOptimizers::instance().count_update();
  const torch::Tensor loss =
      options_.adasum_delta ? step_and_combine(closure) : reduce_and_step(closure);
  end_step();
  groups_->reconcile();  // an optimizer may change its own options
  return loss;
}

torch::Tensor DistributedOptimizer::reduce_and_step(const Optimizer::LossClosure& closure) {
  const bool skip = skips_synchronize();
  if (skip) refuse_in_flight("");
  if (!closure) {
    if (!skip) gradients_->synchronize();
    return optimizer_.step();
  }
  return optimizer_.step(
      [&] { return skip ? loss_without_synchronizing(closure) : reduced_loss(closure); });
}

/// Reduces the parameters' changes as if they were gradients, so that the reducer's checks apply
/// here too.
torch::Tensor DistributedOptimizer::step_and_combine(const Optimizer::LossClosure& closure) {
  struct Trained {
    torch::Tensor parameter, before, gradient;
  };
  std::vector<Trained> all;
  for (const torch::Tensor& parameter : all_parameters())
    all.push_back({parameter, parameter.detach().clone(), {}});
  const auto restore = [&] {
    for (const Trained& trained : all) trained.parameter.detach().copy_(trained.before);
  };
  const auto give_back_gradients = [&] {
    for (Trained& trained : all) trained.parameter.mutable_grad() = trained.gradient;
  };
  torch::Tensor loss;
  try {
    loss = closure ? optimizer_.step(closure) : optimizer_.step();
  } catch (...) {
    restore();
    throw;
  }
  const torch::NoGradGuard no_grad;
  for (Trained& trained : all) {
    torch::Tensor& gradient = trained.parameter.mutable_grad();
    trained.gradient = gradient;
    if (gradient.defined()) gradient = trained.parameter.detach() - trained.before;
  }
  restore();  // the ranks compare the parameters as they were before the step
  try {
    gradients_->synchronize();
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

torch::Tensor DistributedOptimizer::unscale_gradients(double factor) {
  return libtorch::unscale_gradients(optimizer_, factor);
}

void DistributedOptimizer::synchronize() {
  if (!options_.adasum_delta) gradients_->synchronize();
}

double DistributedOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  synchronize();
  return torch::nn::utils::clip_grad_norm_(all_parameters(), max_norm, norm_type);
}

void DistributedOptimizer::clip_grad_value_(double clip_value) {
  synchronize();
  torch::nn::utils::clip_grad_value_(all_parameters(), clip_value);
}

void DistributedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  groups_->reconcile();
  optimizer_.save(archive);
}

/// Overwrites options that the program has set on the wrapper, as load() does in the wrapped
/// optimizer.
void DistributedOptimizer::load(torch::serialize::InputArchive& archive) {
  groups_->try_to_reconcile();
  optimizer_.load(archive);
  groups_->copy_wrapped_groups();
}

}  // namespace hvd
