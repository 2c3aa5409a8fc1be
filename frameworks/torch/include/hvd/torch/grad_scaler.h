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

/// As torch.amp.GradScaler's.
struct GradScalerOptions {
  double init_scale = 65536.0;
  /// What the scale is multiplied by after `growth_interval` steps in a row without inf or nan.
  double growth_factor = 2.0;
  /// What the scale is multiplied by after a step with inf or nan.
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  /// False: losses and gradients stay as they are, and every step is taken.
  bool enabled = true;
  /// Of a plain optimizer: the ranks that take or skip a step together.
  ProcessSet process_set = {};
};

/// Dynamic loss scaling for half precision, PyTorch's with a vote: a rank whose gradients have an
/// inf or nan makes every rank of the optimizer's process set skip the step, so scales stay equal.
///
///   scaler.scale(loss).backward();
///   scaler.unscale_(optimizer);  // only to clip or inspect gradients
///   scaler.step(optimizer);
///   scaler.update();
///
/// Several optimizers may share one if they have the same process set. Every rank of it makes the
/// same calls. Not thread-safe. Keeps a reference to an optimizer from its unscale_() or step() to
/// update().
class GradScaler {
 public:
  /// @throws UsageError for a scale that is not positive, a growth factor of 1 or less, a backoff
  /// factor outside (0, 1), or an interval below 1.
  explicit GradScaler(GradScalerOptions options = {});

  /// The loss times the scale. Differentiable, local. A float16 scalar becomes float32, which holds
  /// the product.
  torch::Tensor scale(const torch::Tensor& loss);
  /// Waits for the reduced gradients, divides them by the scale and looks for inf and nan.
  /// Collective. @throws UsageError when called twice, or after step(), without update() between
  /// them, or when the optimizer's process set is not that of the others; otherwise as
  /// DistributedOptimizer::synchronize().
  void unscale_(DistributedOptimizer& optimizer);
  void unscale_(ShardedOptimizer& optimizer);
  /// An optimizer whose gradients the program reduces, before this is called. The ranks of
  /// GradScalerOptions::process_set agree on whether all were finite. A wrapper of hvd is
  /// taken as such.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// unscale_(), unless it was called, then the optimizer's step if all gradients of all ranks were
  /// finite. Nothing is reduced twice. Returns whether it stepped. Collective. @throws UsageError
  /// when called twice without update() between; otherwise as DistributedOptimizer::step().
  bool step(DistributedOptimizer& optimizer);
  bool step(ShardedOptimizer& optimizer);
  /// With gradients that the program has reduced: see unscale_().
  bool step(torch::optim::Optimizer& optimizer);
  /// Adjusts the scale. Local. @throws UsageError when nothing was unscaled or stepped since the
  /// last one.
  void update();
  /// Sets the scale instead, which nothing has to come before. Every rank passes the same. Does
  /// nothing when disabled. @throws UsageError for a scale that is not positive.
  void update(double new_scale);
  /// 1 when disabled.
  double get_scale() const;
  double get_growth_factor() const noexcept { return options_.growth_factor; }
  double get_backoff_factor() const noexcept { return options_.backoff_factor; }
  std::int64_t get_growth_interval() const noexcept { return options_.growth_interval; }
  /// Every rank passes the same, here and below. @throws UsageError for what the constructor
  /// refuses; nothing has changed then.
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(std::int64_t interval);
  bool is_enabled() const noexcept { return options_.enabled; }

  /// Scale, factors and progress. The same on every rank, so one rank's archive serves all.
  void save(torch::serialize::OutputArchive& archive) const;
  /// @throws UsageError for values that the constructor would refuse.
  void load(torch::serialize::InputArchive& archive);

 private:
  struct OptimizerState {
    bool stepped = false;
    bool finite = true;
  };

  struct Unscaled {
    torch::Tensor found;  ///< whether there was an inf or nan on this rank
    std::uint64_t gradients = 0;
  };

  template <class Optimizer>
  void unscale(Optimizer& optimizer);
  template <class Optimizer>
  bool take_step(Optimizer& optimizer);

  void set_options(const GradScalerOptions& options);

  GradScalerOptions options_;
  double scale_;
  std::int64_t growth_tracker_ = 0;
  std::optional<int> process_set_;
  // By the address of an optimizer.
  std::map<const void*, OptimizerState> optimizers_;  ///< since the last update()
  std::map<const void*, Unscaled> unscaled_;          ///< before the ranks have agreed
};

}  // namespace hvd
