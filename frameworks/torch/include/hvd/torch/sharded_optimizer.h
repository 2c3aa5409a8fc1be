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

namespace elastic {
class TorchState;
}

namespace libtorch {
class ElasticShards;
class ObjectWriter;
class ParameterShards;
class ShardedOptimizerItem;
}  // namespace libtorch

/// @addtogroup train
/// @{

/// Options of a ShardedOptimizer. They mean the same as in DistributedOptimizerOptions, unless
/// noted otherwise.
struct ShardedOptimizerOptions {
  /// kAverage or kSum.
  ReduceOp op = ReduceOp::kAverage;
  /// Compressed gradients are reduced on every rank instead of scattered, which moves as many
  /// bytes.
  Compression compression = Compression::kNone;
  int backward_passes_per_step = 1;
  double gradient_predivide_factor = 1;
  bool sparse_as_dense = false;
  ProcessSet process_set = {};
  /// The ranks also compare the options of the parameter groups, bit for bit. Each rank updates a
  /// part of the parameters, so parameters stay equal even if the options differ.
  std::optional<int> check_every = std::nullopt;
  std::vector<std::vector<std::string>> groups = {};
  /// Each rank uses its own part of the gradients that the hook returns.
  GradientHook gradient_hook = {};
  /// A bucket is also the unit whose elements are distributed over the ranks.
  std::int64_t bucket_bytes = 0;
  bool error_if_nonfinite = false;
  /// In an elastic job, the number of other ranks that keep a copy of this rank's part of the state
  /// at each commit: 1, on another host where there is one, or 0. Without a copy the death of a
  /// rank loses the state, and the job continues with RunOptions::load.
  int replicas = 1;
};

/// A DistributedOptimizer whose state is distributed over the ranks (ZeRO, stage 1): each rank
/// updates a part of the parameters, keeps the state of that part only, and receives the other
/// parts from the other ranks. Training is the same as with a DistributedOptimizer, up to
/// roundings.
///
/// LibTorch's SGD, Adam, AdamW, Adagrad and RMSprop update each element independently. With them
/// every rank updates an equal share of the elements, and gradients are scattered: a rank gets the
/// reduced gradients of its own elements only. Any other optimizer (including a class derived from
/// those) updates whole parameters, which are distributed by size; its step() must not read the
/// parameters of other ranks. LBFGS reads them, and is refused.
///
/// Refers to `optimizer`, which must outlive it and keeps its groups and options. Schedulers work
/// on this object or on `optimizer`; see OptimizerWrapper. This object owns the state; `optimizer`
/// has no state between steps. Pass this object to checkpoints (TrainingState::optimizer()),
/// torch::save(), torch::load() and broadcast_optimizer_state(). If the same state is loaded into
/// `optimizer` on every rank, the next step() distributes it.
///
/// After step() `.grad` is undefined, as after zero_grad(), even if a GradScaler skips the step.
/// Between synchronize() and step() gradients are reduced only where this rank updates, and
/// backward() throws UsageError, also under no_sync(). Between step() and backward() a parameter
/// may be given other memory or other strides (a memory format), the same on every rank.
///
/// In an elastic job the wrapper may be constructed before elastic::run(), over all ranks, and is
/// tracked by an elastic::TorchState: the state is then redistributed when the ranks change.
///
/// Does not support join(): a rank without data still has its part to update. The destructor warns
/// like that of DistributedOptimizer. One thread at a time, apart from the hooks of gradients.
class ShardedOptimizer : public OptimizerWrapper {
 public:
  /// Collective. In a worker of an elastic job that has no rank yet it is local, and the ranks
  /// compare their arguments when each generation begins. @throws UsageError on the rank where the
  /// optimizer is LBFGS, its parameters are on several devices, a parameter occurs twice, has no
  /// name or belongs to another wrapper, or an option is out of range. The other ranks then throw
  /// MismatchError. All ranks throw it for the first difference in the optimizer's type, its groups
  /// and options, and its parameters. After an error the optimizer is unchanged.
  template <class Parameters = NamedParameters>
    requires std::convertible_to<const Parameters&, NamedParameters>
  ShardedOptimizer(torch::optim::Optimizer& optimizer, const Parameters& parameters,
                   ShardedOptimizerOptions options = {})
      : ShardedOptimizer(WithNames(), optimizer, parameters, std::move(options)) {}
  /// Takes the names of the parameters from the module. The ranks also compare the module's
  /// BatchNorm statistics; see DistributedOptimizerOptions::check_every.
  ShardedOptimizer(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                   ShardedOptimizerOptions options = {});
  /// The same for a module that Python has exported (torch::jit::load()).
  ShardedOptimizer(torch::optim::Optimizer& optimizer, const torch::jit::Module& module,
                   ShardedOptimizerOptions options = {});
  /// The same for a module holder (TORCH_MODULE).
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

  /// Calls synchronize(), unless it was called since the last backward or a skip_synchronize()
  /// guard exists. Then updates this rank's part piece by piece, while finished pieces are sent.
  /// Collective. A closure is evaluated once; returns its loss, reduced like the gradients.
  /// @throws as DistributedOptimizer::step(), after which the parameters are unchanged;
  /// DivergedError if the ranks have different options in a parameter group; UsageError if a rank
  /// has called join().
  torch::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override;
  /// Returns when this rank's part of the gradients is final. Throws as step().
  void synchronize();
  /// Calls synchronize(), then clips as torch::nn::utils::clip_grad_norm_() by the norm of all
  /// gradients, which is the same on every rank. Collective. @return the norm before clipping
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  /// Calls synchronize(), then clips as torch::nn::utils::clip_grad_value_().
  void clip_grad_value_(double clip_value);

  /// Saves the whole state, groups and options as the wrapped optimizer does: any optimizer of its
  /// type can load it. Collective: with torch::save(), call it on every rank, each with a file of
  /// its own. During the call every rank needs memory for the whole state.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Loads the whole state, the same on every rank. From the next step() on, each rank keeps only
  /// its part. Local.
  void load(torch::serialize::InputArchive& archive) override;

  /// Size of this rank's part of the state, in bytes.
  std::size_t state_bytes() const;

 private:
  friend class GradScaler;
  friend class elastic::TorchState;
  friend class libtorch::ElasticShards;
  friend class libtorch::ShardedOptimizerItem;

  struct WithNames {};
  ShardedOptimizer(WithNames, torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                   ShardedOptimizerOptions options, bool numbered = false,
                   const NamedParameters& buffers = NamedParameters());

  void refuse_group(const torch::optim::OptimizerParamGroup& group) const override;
  void group_added() override;
  void refuse_other_parameters() const;
  /// Distributes the parameters over the ranks again if the division of the gradients has changed.
  void lay_out();
  /// Called when gradients are final: calls lay_out(), after a check of the parameters' strides.
  void follow_gradients();
  /// Ends the cycle after an update, or after a step that a GradScaler skips.
  void end_step();
  /// Multiplies this rank's part of final gradients. @return an argument of all_finite()
  torch::Tensor unscale_gradients(double factor);
  /// Appends this rank's part of the state to a checkpoint.
  void encode_part(libtorch::ObjectWriter& writer) const;
  /// Called after the whole state was loaded on every rank: each rank keeps its part.
  void redistribute();
  /// Called in each generation of an elastic job: resets the distribution.
  void begin_generation();

  const int replicas_;
  bool tracked_ = false;  ///< by an elastic::TorchState
  std::unique_ptr<libtorch::ParameterShards> shards_;
  std::shared_ptr<const void> generations_;
};

/// @}

}  // namespace hvd
