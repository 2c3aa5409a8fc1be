#include "hvd/torch/grad_scaler.h"

#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "hvd/elastic.h"
#include "hvd/error.h"
#include "hvd/torch/operations.h"
#include "optimizer/unscaler.h"

namespace hvd {
namespace {

constexpr const char* kArchiveKey = "hvd_grad_scaler";

void check_options(const GradScalerOptions& options) {
  const auto fail = [](const char* option, const char* expected, double got) {
    throw UsageError(std::string("GradScaler: ") + option + ": expected " + expected + ", got " +
                     std::to_string(got));
  };
  if (!(options.init_scale > 0) || !std::isfinite(options.init_scale)) {
    fail("init_scale", "a positive number", options.init_scale);
  }
  if (!(options.growth_factor > 1)) fail("growth_factor", "more than 1", options.growth_factor);
  if (!(options.backoff_factor > 0 && options.backoff_factor < 1)) {
    fail("backoff_factor", "a number between 0 and 1", options.backoff_factor);
  }
  if (options.growth_interval < 1) {
    fail("growth_interval", "at least 1", static_cast<double>(options.growth_interval));
  }
}

/// Wraps an optimizer whose gradients the program reduces itself. Has the part of
/// DistributedOptimizer's interface that the scaler uses.
class PlainOptimizer {
 public:
  PlainOptimizer(torch::optim::Optimizer& optimizer, const ProcessSet& process_set)
      : options_{process_set}, optimizer_(optimizer) {}

  const void* key() const noexcept { return &optimizer_; }
  void synchronize() const noexcept {}
  void end_step() const noexcept {}
  void step() { optimizer_.step(); }
  torch::Tensor unscale_gradients(double factor) {
    return libtorch::unscale_gradients(optimizer_, factor);
  }
  bool all_finite(const torch::Tensor& unscaled) const {
    const torch::Tensor bad = allreduce(unscaled, {.name = "grad_scaler.found_inf",
                                                   .op = ReduceOp::kMax,
                                                   .process_set = options_.process_set});
    return bad.item<float>() == 0;
  }
  /// Changes when a gradient is written or replaced.
  std::uint64_t gradients_version() const {
    std::uint64_t version = 0;
    for (const auto& group : optimizer_.param_groups()) {
      for (const torch::Tensor& parameter : group.params()) {
        const torch::Tensor& gradient = parameter.grad();
        const auto address = reinterpret_cast<std::uintptr_t>(gradient.unsafeGetTensorImpl());
        const std::uint64_t written = gradient.defined() ? gradient._version() : 0;
        version = version * 0x9E3779B97F4A7C15U + address + written;
      }
    }
    return version;
  }

  /// Has the same name as the options of the wrappers.
  const struct {
    ProcessSet process_set;
  } options_;

 private:
  torch::optim::Optimizer& optimizer_;
};

template <class Optimizer>
const void* key_of(const Optimizer& optimizer) noexcept {
  return &optimizer;
}
const void* key_of(const PlainOptimizer& optimizer) noexcept { return optimizer.key(); }

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(options), scale_(options.init_scale) {
  check_options(options_);
}

torch::Tensor GradScaler::scale(const torch::Tensor& loss) {
  if (!loss.defined())
    throw UsageError("GradScaler::scale: the loss is undefined; expected a tensor");
  if (!options_.enabled) return loss;
  // Multiplying by a zero-dimensional tensor, not by a number, makes a float16 scalar float32.
  return loss * torch::full({}, scale_, loss.options().dtype(torch::kFloat32).requires_grad(false));
}

void GradScaler::unscale_(DistributedOptimizer& optimizer) { unscale(optimizer); }
void GradScaler::unscale_(ShardedOptimizer& optimizer) { unscale(optimizer); }
bool GradScaler::step(DistributedOptimizer& optimizer) { return step_if_finite(optimizer); }
bool GradScaler::step(ShardedOptimizer& optimizer) { return step_if_finite(optimizer); }

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer))
    return unscale(*distributed);
  if (auto* const sharded = dynamic_cast<ShardedOptimizer*>(&optimizer)) return unscale(*sharded);
  PlainOptimizer plain(optimizer, options_.process_set);
  unscale(plain);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer))
    return step_if_finite(*distributed);
  if (auto* const sharded = dynamic_cast<ShardedOptimizer*>(&optimizer))
    return step_if_finite(*sharded);
  PlainOptimizer plain(optimizer, options_.process_set);
  return step_if_finite(plain);
}

/// Forgets the steps of a former generation, which are repeated.
void GradScaler::follow_generation() {
  if (std::exchange(generation_, elastic::generation()) == elastic::generation()) return;
  optimizers_.clear();
  unscaled_.clear();
}

template <class Optimizer>
void GradScaler::unscale(Optimizer& optimizer) {
  if (!options_.enabled) return;
  follow_generation();
  const auto known = optimizers_.find(key_of(optimizer));
  if (known != optimizers_.end()) {
    throw UsageError(known->second.stepped
                         ? "GradScaler::unscale_() after step(); expected update() before it"
                         : "GradScaler::unscale_() was called on this optimizer already; expected "
                           "update() between two calls");
  }
  const int process_set = optimizer.options_.process_set.id();
  if (process_set_.value_or(process_set) != process_set) {
    throw UsageError("GradScaler: expected an optimizer of process set " +
                     std::to_string(*process_set_) + ", as before, got one of set " +
                     std::to_string(process_set) +
                     "; ranks would scale differently: use one scaler for each process set");
  }
  optimizer.synchronize();
  // If all_finite() failed in an earlier call, the gradients are already divided.
  Unscaled& unscaled = unscaled_[key_of(optimizer)];
  if (!unscaled.found.defined() || unscaled.gradients != optimizer.gradients_version()) {
    unscaled = {.found = optimizer.unscale_gradients(1 / scale_),
                .gradients = optimizer.gradients_version()};
  }
  const bool finite = optimizer.all_finite(unscaled.found);
  unscaled_.erase(key_of(optimizer));
  process_set_ = process_set;
  optimizers_[key_of(optimizer)] = {.stepped = false, .finite = finite};
}

template <class Optimizer>
bool GradScaler::step_if_finite(Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  follow_generation();
  const auto known = optimizers_.find(key_of(optimizer));
  if (known != optimizers_.end() && known->second.stepped) {
    throw UsageError(
        "GradScaler::step() was called on this optimizer already; expected update() between two "
        "calls");
  }
  if (known == optimizers_.end()) unscale(optimizer);
  OptimizerState& state = optimizers_.at(key_of(optimizer));
  state.finite ? static_cast<void>(optimizer.step()) : optimizer.end_step();
  state.stepped = true;
  return state.finite;
}

void GradScaler::set_options(const GradScalerOptions& options) {
  check_options(options);
  options_ = options;
}

void GradScaler::set_growth_factor(double factor) {
  GradScalerOptions changed = options_;
  changed.growth_factor = factor;
  set_options(changed);
}

void GradScaler::set_backoff_factor(double factor) {
  GradScalerOptions changed = options_;
  changed.backoff_factor = factor;
  set_options(changed);
}

void GradScaler::set_growth_interval(std::int64_t interval) {
  GradScalerOptions changed = options_;
  changed.growth_interval = interval;
  set_options(changed);
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  if (!(new_scale > 0) || !std::isfinite(new_scale)) {
    throw UsageError("GradScaler::update: new_scale: expected a positive number, got " +
                     std::to_string(new_scale));
  }
  scale_ = new_scale;
  optimizers_.clear();
}

void GradScaler::update() {
  if (!options_.enabled) return;
  if (optimizers_.empty()) {
    throw UsageError(
        "GradScaler::update(): no gradients were checked since the last one; expected step() or "
        "unscale_() before it");
  }
  const bool finite = std::all_of(optimizers_.begin(), optimizers_.end(),
                                  [](const auto& item) { return item.second.finite; });
  optimizers_.clear();
  if (!finite) {
    scale_ *= options_.backoff_factor;
    growth_tracker_ = 0;
  } else if (++growth_tracker_ >= options_.growth_interval) {
    // The scale must be finite in float32, because losses are scaled in that type.
    const double grown = scale_ * options_.growth_factor;
    if (std::isfinite(static_cast<float>(grown))) scale_ = grown;
    growth_tracker_ = 0;
  }
}

double GradScaler::get_scale() const { return options_.enabled ? scale_ : 1.0; }

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  const std::vector<double> values{scale_, options_.growth_factor, options_.backoff_factor,
                                   static_cast<double>(options_.growth_interval),
                                   static_cast<double>(growth_tracker_)};
  archive.write(kArchiveKey, torch::tensor(values, torch::kFloat64), /*is_buffer=*/true);
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  torch::Tensor values;
  archive.read(kArchiveKey, values, /*is_buffer=*/true);
  if (values.numel() != 5) {
    throw UsageError("GradScaler::load: expected 5 values, got " + std::to_string(values.numel()));
  }
  const auto value = [&](int i) { return values[i].item<double>(); };
  const GradScalerOptions loaded{.init_scale = value(0),
                                 .growth_factor = value(1),
                                 .backoff_factor = value(2),
                                 .growth_interval = static_cast<std::int64_t>(value(3)),
                                 .enabled = options_.enabled,
                                 .process_set = options_.process_set};
  check_options(loaded);
  options_ = loaded;
  scale_ = loaded.init_scale;
  growth_tracker_ = static_cast<std::int64_t>(value(4));
}

}  // namespace hvd
