#include "hvd/torch/grad_scaler.h"

#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "hvd/error.h"

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

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(options), scale_(options.init_scale) {
  check_options(options_);
}

torch::Tensor GradScaler::scale(const torch::Tensor& loss) {
  if (!loss.defined())
    throw UsageError("GradScaler::scale: the loss is undefined; expected a tensor");
  if (!options_.enabled) return loss;
  // A tensor without dimensions, not a number: it makes a float16 scalar float32.
  return loss * torch::full({}, scale_, loss.options().dtype(torch::kFloat32).requires_grad(false));
}

void GradScaler::unscale_(DistributedOptimizer& optimizer) { unscale(optimizer); }
void GradScaler::unscale_(ShardedOptimizer& optimizer) { unscale(optimizer); }
bool GradScaler::step(DistributedOptimizer& optimizer) { return take_step(optimizer); }
bool GradScaler::step(ShardedOptimizer& optimizer) { return take_step(optimizer); }

template <class Optimizer>
void GradScaler::unscale(Optimizer& optimizer) {
  if (!options_.enabled) return;
  const auto known = optimizers_.find(&optimizer);
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
  // What was divided before the ranks could not agree is not divided again.
  Unscaled& unscaled = unscaled_[&optimizer];
  if (!unscaled.found.defined() || unscaled.gradients != optimizer.gradients_version()) {
    unscaled = {.found = optimizer.unscale_gradients(1 / scale_),
                .gradients = optimizer.gradients_version()};
  }
  const bool finite = optimizer.all_finite(unscaled.found);
  unscaled_.erase(&optimizer);
  process_set_ = process_set;
  optimizers_[&optimizer] = {.stepped = false, .finite = finite};
}

template <class Optimizer>
bool GradScaler::take_step(Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  const auto known = optimizers_.find(&optimizer);
  if (known != optimizers_.end() && known->second.stepped) {
    throw UsageError(
        "GradScaler::step() was called on this optimizer already; expected update() between two "
        "calls");
  }
  if (known == optimizers_.end()) unscale(optimizer);
  OptimizerState& state = optimizers_.at(&optimizer);
  state.finite ? static_cast<void>(optimizer.step()) : optimizer.end_step();
  state.stepped = true;
  return state.finite;
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
    // Losses are scaled in float32.
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
                                 .enabled = options_.enabled};
  check_options(loaded);
  options_ = loaded;
  scale_ = loaded.init_scale;
  growth_tracker_ = static_cast<std::int64_t>(value(4));
}

}  // namespace hvd
