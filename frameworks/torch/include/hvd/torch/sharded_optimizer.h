#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/process_set.h"
#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/gradient_hook.h"
#include "hvd/torch/parameters.h"
#include "hvd/types.h"

namespace hvd {

namespace libtorch {
class ObjectWriter;
class ParameterShards;
class ShardedOptimizerItem;
}  // namespace libtorch

/// As DistributedOptimizerOptions.
struct ShardedOptimizerOptions {
  /// kAverage or kSum.
  ReduceOp op = ReduceOp::kAverage;
  /// Gradients that are compressed are reduced on every rank, not scattered: as many bytes.
  Compression compression = Compression::kNone;
  int backward_passes_per_step = 1;
  double gradient_predivide_factor = 1;
  bool sparse_as_dense = false;
  ProcessSet process_set = {};
  /// Also how often the ranks compare the options of the parameter groups, which they have bit for
  /// bit: each rank updates a part of the parameters, so that these stay equal when options differ.
  std::optional<int> check_every = std::nullopt;
  std::vector<std::vector<std::string>> groups = {};
  /// Every rank gets all of what it returns, of which it uses its own part.
  GradientHook gradient_hook = {};
  std::int64_t bucket_bytes = 0;
  bool error_if_nonfinite = false;
};

/// A DistributedOptimizer whose ranks share the optimizer's state out among themselves (ZeRO, stage
/// 1): each updates a part of the parameters, and so keeps state for that part only, and gets the
/// other parts from the other ranks. Training is the same as with a DistributedOptimizer, up to
/// roundings.
///
/// LibTorch's SGD, Adam, AdamW, Adagrad and RMSprop update each element by itself; of these every
/// rank updates an equal share of the elements, and gradients are scattered: a rank gets the
/// reduced gradients of its own elements only. Any other optimizer (one derived from those, too)
/// updates whole parameters, which are shared out by their size; its step() must not look at
/// parameters of other ranks. LBFGS does, and is refused.
///
/// Refers to `optimizer`, which must outlive it and keeps its groups and options. Schedulers work
/// on this object or on `optimizer`; see OptimizerWrapper. The state is in here, and is lost with
/// this object; `optimizer` has none between steps. So a checkpoint takes this object
/// (TrainingState::optimizer()), and so do torch::save(), torch::load() and
/// broadcast_optimizer_state(). State that is loaded into `optimizer`, on every rank alike, is
/// shared out in the next step().
///
/// step() takes the gradients, also a step that a GradScaler skips: afterwards `.grad` is
/// undefined, as after zero_grad(). Between synchronize() and step() it is reduced only where this
/// rank updates, and backward() throws UsageError, also under no_sync(). A parameter may get other
/// memory, or other strides (a memory format), between step() and backward(), on every rank alike.
///
/// Not with join(): a rank that has no more data still has its part to update. One thread at a
/// time, but for the hooks of gradients.
class ShardedOptimizer : public OptimizerWrapper {
 public:
  /// Collective. @throws UsageError on the rank where the optimizer is LBFGS, its parameters are on
  /// several devices, one occurs twice or has no name or belongs to another wrapper, or an option
  /// is out of range, MismatchError on the others then, and on all for the first difference between
  /// ranks in the optimizer's type, its groups and options, and its parameters. Nothing has
  /// changed.
  template <class Parameters = NamedParameters>
    requires std::convertible_to<const Parameters&, NamedParameters>
  ShardedOptimizer(torch::optim::Optimizer& optimizer, const Parameters& parameters,
                   ShardedOptimizerOptions options = {})
      : ShardedOptimizer(WithNames(), optimizer, parameters, std::move(options)) {}
  /// With the names that parameters have in the module.
  ShardedOptimizer(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                   ShardedOptimizerOptions options = {})
      : ShardedOptimizer(WithNames(), optimizer, module.named_parameters(), std::move(options)) {}
  /// The same for what TORCH_MODULE makes.
  template <class Impl>
  ShardedOptimizer(torch::optim::Optimizer& optimizer, const torch::nn::ModuleHolder<Impl>& module,
                   ShardedOptimizerOptions options = {})
      : ShardedOptimizer(optimizer, static_cast<const torch::nn::Module&>(*module),
                         std::move(options)) {}
  /// The same for a shared pointer to a module. @throws UsageError for a null pointer
  template <std::derived_from<torch::nn::Module> Module>
  ShardedOptimizer(torch::optim::Optimizer& optimizer, const std::shared_ptr<Module>& module,
                   ShardedOptimizerOptions options = {})
      : ShardedOptimizer(optimizer, libtorch::module_in(module, "ShardedOptimizer"),
                         std::move(options)) {}
  /// Numbers the parameters: "param0", "param1", ... through all groups.
  explicit ShardedOptimizer(torch::optim::Optimizer& optimizer,
                            ShardedOptimizerOptions options = {});
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;
  ~ShardedOptimizer() override;

  /// synchronize(), unless it was called since the last backward or skip_synchronize() is alive,
  /// then the update of this rank's part while the parts before it travel. Collective. With a
  /// closure: evaluates it, once, and returns the loss, reduced as the gradients are.
  /// @throws as DistributedOptimizer::step(), nothing has changed then, and DivergedError when the
  /// ranks have different options in a parameter group; UsageError on every rank but one that has
  /// called join().
  torch::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override;
  /// Returns when this rank's part of the gradients is final. Throws as step() does.
  void synchronize();
  /// synchronize(), then as torch::nn::utils::clip_grad_norm_(): the norm is that of all gradients,
  /// and the same on every rank. Collective. @return the norm before
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  /// synchronize(), then as torch::nn::utils::clip_grad_value_().
  void clip_grad_value_(double clip_value);

  /// The whole state, groups and options, as the wrapped optimizer saves them: what it saves, any
  /// optimizer of its type loads. Collective, and every rank has room for all of it meanwhile: with
  /// torch::save(), call it on every rank, with a file of its own or none.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// The same on every rank, which keeps its part from the next step() on. Not collective.
  void load(torch::serialize::InputArchive& archive) override;

  /// What this rank keeps for its part, in bytes.
  std::size_t state_bytes() const;

 private:
  friend class GradScaler;
  friend class libtorch::ShardedOptimizerItem;

  struct WithNames {};
  ShardedOptimizer(WithNames, torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                   ShardedOptimizerOptions options, bool numbered = false);

  void refuse_group(const torch::optim::OptimizerParamGroup& group) const override;
  void group_added() override;
  void refuse_other_parameters() const;
  /// Shares out what is to be updated, if that is not as it was.
  void lay_out();
  /// Gradients are final: shares out.
  void follow_gradients();
  /// What step() does besides the update.
  void end_step();
  /// Multiplies this rank's part of final gradients. @return for all_finite()
  torch::Tensor unscale_gradients(double factor);
  /// Appends this rank's part of the state, to be saved.
  void encode_part(libtorch::ObjectWriter& writer) const;
  /// The optimizer has been given another state, all of it, on every rank.
  void share_out_anew();

  std::unique_ptr<libtorch::ParameterShards> shards_;
};

}  // namespace hvd
