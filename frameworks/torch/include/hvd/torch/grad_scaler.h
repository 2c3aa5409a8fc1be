#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <optional>

#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/sharded_optimizer.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace hvd {

/// @addtogroup train
/// @{

/// Options with the names and defaults of torch.amp.GradScaler.
struct GradScalerOptions {
  double init_scale = 65536.0;
  /// The scale is multiplied by this after `growth_interval` steps in a row without inf or nan.
  double growth_factor = 2.0;
  /// The scale is multiplied by this after a step with inf or nan.
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  /// False: losses and gradients stay unchanged, and every step is taken.
  bool enabled = true;
  /// The ranks that take or skip a step of a plain optimizer together.
  ProcessSet process_set = {};
};

/// Dynamic loss scaling for half precision, as in PyTorch, but for all ranks together: if a rank's
/// gradients contain inf or nan, every rank of the optimizer's process set skips the step, so that
/// scales stay equal.
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);  // only to clip or inspect gradients
///     scaler.step(optimizer);
///     scaler.update();
///
/// Several optimizers of one process set may share a scaler. Every rank of the set makes the same
/// calls. Not thread-safe. Refers to an optimizer from its unscale_() or step() until update().
class GradScaler {
 public:
  /// @throws UsageError for a scale that is not positive, a growth factor of 1 or less, a backoff
  /// factor outside (0, 1), or an interval below 1.
  explicit GradScaler(GradScalerOptions options = {});

  /// Returns the loss times the scale. Differentiable, local. A float16 scalar becomes float32,
  /// which can represent the product.
  torch::Tensor scale(const torch::Tensor& loss);
  /// Waits for the reduced gradients, divides them by the scale and searches them for inf and nan.
  /// Collective. @throws UsageError if it is called twice, or after step(), without update() in
  /// between, or if the optimizer's process set differs from that of the others; otherwise as
  /// DistributedOptimizer::synchronize().
  void unscale_(DistributedOptimizer& optimizer);
  void unscale_(ShardedOptimizer& optimizer);
  /// The same for an optimizer whose gradients the program has reduced itself. The ranks of
  /// GradScalerOptions::process_set agree on whether all gradients were finite. A wrapper of hvd
  /// that is passed by this type is treated as a wrapper.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Calls unscale_(), unless the program has done so, and then the optimizer's step() if all
  /// gradients of all ranks were finite. Gradients are reduced once. Collective. @return whether it
  /// has stepped @throws UsageError if it is called twice without update() in between; otherwise as
  /// DistributedOptimizer::step().
  bool step(DistributedOptimizer& optimizer);
  bool step(ShardedOptimizer& optimizer);
  /// The same for an optimizer whose gradients the program has reduced; see unscale_().
  bool step(torch::optim::Optimizer& optimizer);
  /// Adjusts the scale. Local. @throws UsageError if no optimizer was unscaled or stepped since the
  /// last update().
  void update();
  /// Sets the scale to a value, the same on every rank. May be called at any time; has no effect if
  /// the scaler is disabled. @throws UsageError for a scale that is not positive.
  void update(double new_scale);
  /// The scale; 1 if the scaler is disabled.
  double get_scale() const;
  double get_growth_factor() const noexcept { return options_.growth_factor; }
  double get_backoff_factor() const noexcept { return options_.backoff_factor; }
  std::int64_t get_growth_interval() const noexcept { return options_.growth_interval; }
  /// Every rank passes the same value, here and below. @throws UsageError for a value that the
  /// constructor refuses, after which the scaler is unchanged.
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(std::int64_t interval);
  bool is_enabled() const noexcept { return options_.enabled; }

  /// Saves scale, factors and progress. They are the same on every rank, so one archive serves all.
  void save(torch::serialize::OutputArchive& archive) const;
  /// @throws UsageError for values that the constructor would refuse.
  void load(torch::serialize::InputArchive& archive);

 private:
  struct OptimizerState {
    bool stepped = false;
    bool finite = true;
  };

  struct Unscaled {
    torch::Tensor found;  ///< not 0 if this rank has found inf or nan
    std::uint64_t gradients = 0;
  };

  template <class Optimizer>
  void unscale(Optimizer& optimizer);
  template <class Optimizer>
  bool step_if_finite(Optimizer& optimizer);

  void set_options(const GradScalerOptions& options);
  void follow_generation();

  GradScalerOptions options_;
  double scale_;
  std::int64_t growth_tracker_ = 0;
  std::optional<int> process_set_;
  std::uint64_t generation_ = 0;  ///< of an elastic job, in which the maps were filled
  // Both maps have the optimizer's address as the key.
  std::map<const void*, OptimizerState> optimizers_;  ///< since the last update()
  std::map<const void*, Unscaled> unscaled_;          ///< before the ranks have agreed
};

/// @}

}  // namespace hvd
