#include "hvd/torch/prepared.h"

#include <utility>

#include "accelerator/core.h"
#include "hvd/error.h"

namespace hvd {

namespace libtorch {

std::shared_ptr<RunningLoaders::Loop> RunningLoaders::begin(
    const std::shared_ptr<RunningLoaders>& loaders) {
  std::shared_ptr<Loop> loop(new Loop(), [loaders](const Loop* ended) {
    std::erase(loaders->loops_, ended);
    delete ended;
  });
  loaders->loops_.push_back(loop.get());
  return loop;
}

const BatchPlace* RunningLoaders::place() const noexcept {
  return loops_.empty() || !loops_.back()->has_batch ? nullptr : &loops_.back()->place;
}

}  // namespace libtorch

AcceleratedOptimizer::AcceleratedOptimizer(libtorch::AcceleratorCore& core,
                                           torch::optim::Optimizer& inner, Wrapper wrapper)
    : core_(core), inner_(inner), wrapper_(std::move(wrapper)) {}

AcceleratedOptimizer::~AcceleratedOptimizer() = default;

OptimizerWrapper& AcceleratedOptimizer::wrapper() noexcept {
  return std::visit([](const auto& wrapper) -> OptimizerWrapper& { return *wrapper; }, wrapper_);
}

torch::Tensor AcceleratedOptimizer::step(const torch::optim::Optimizer::LossClosure& closure) {
  if (!core_.sync) return {};
  if (!core_.half()) return wrapper().step(closure);
  if (closure) {
    throw UsageError(
        "AcceleratedOptimizer::step: a closure cannot be evaluated with a loss scale "
        "(Precision::kFP16); expected step() without a closure, or another precision");
  }
  const bool stepped =
      std::visit([this](const auto& wrapper) { return core_.scaler.step(*wrapper); }, wrapper_);
  core_.scale_is_due = true;
  unscaled_ = false;
  skipped_ = !stepped;
  return {};
}

void AcceleratedOptimizer::zero_grad(bool set_to_none) {
  if (!core_.sync) return;
  unscaled_ = false;
  wrapper().zero_grad(set_to_none);
}

void AcceleratedOptimizer::unscale_gradients() {
  if (!core_.sync || unscaled_) return;
  const bool half = core_.half();
  std::visit(
      [&](const auto& wrapper) { half ? core_.scaler.unscale_(*wrapper) : wrapper->synchronize(); },
      wrapper_);
  if (!half) return;
  unscaled_ = true;
  core_.scale_is_due = true;
}

double AcceleratedOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  if (!core_.sync) return 0;
  unscale_gradients();
  return std::visit(
      [&](const auto& wrapper) { return wrapper->clip_grad_norm_(max_norm, norm_type); }, wrapper_);
}

void AcceleratedOptimizer::clip_grad_value_(double clip_value) {
  if (!core_.sync) return;
  unscale_gradients();
  std::visit([&](const auto& wrapper) { wrapper->clip_grad_value_(clip_value); }, wrapper_);
}

bool AcceleratedScheduler::due() const {
  if (!core_.options.step_scheduler_with_optimizer) return true;
  if (!core_.sync) return false;
  for (const AcceleratedOptimizer* const optimizer : optimizers_)
    if (optimizer->step_was_skipped()) return false;
  return true;
}

void AcceleratedScheduler::step() {
  auto* const* const scheduler = std::get_if<torch::optim::LRScheduler*>(&inner_);
  if (scheduler == nullptr) {
    throw UsageError(
        "AcceleratedScheduler::step: a ReduceLROnPlateauScheduler needs the metric; expected "
        "step(metric), with the same metric on every rank");
  }
  if (due()) (*scheduler)->step();
}

void AcceleratedScheduler::step(double metric) {
  auto* const* const scheduler = std::get_if<torch::optim::ReduceLROnPlateauScheduler*>(&inner_);
  if (scheduler == nullptr) {
    throw UsageError(
        "AcceleratedScheduler::step: only a ReduceLROnPlateauScheduler takes a metric; expected "
        "step() without an argument");
  }
  if (due()) (*scheduler)->step(static_cast<float>(metric));
}

}  // namespace hvd
