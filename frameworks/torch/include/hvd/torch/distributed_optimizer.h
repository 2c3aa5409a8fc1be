#pragma once

#include <c10/util/Synchronized.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <atomic>
#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "hvd/process_set.h"
#include "hvd/torch/gradient_synchronizer.h"
#include "hvd/torch/parameters.h"
#include "hvd/types.h"

namespace hvd {

namespace libtorch {
class GradientReducer;
class GroupMirror;
class ReducedParameter;
struct GradientReduction;
}  // namespace libtorch

/// @addtogroup train
/// @{

/// While this guard exists, step() does not reduce gradients. See
/// OptimizerWrapper::skip_synchronize(). Move-only.
class [[nodiscard]] SkipSynchronize {
 public:
  SkipSynchronize(SkipSynchronize&&) noexcept = default;
  SkipSynchronize& operator=(SkipSynchronize&&) = delete;

 private:
  friend class OptimizerWrapper;
  explicit SkipSynchronize(std::shared_ptr<const void> scope) : scope_(std::move(scope)) {}

  std::shared_ptr<const void> scope_;
};

/// The common base of DistributedOptimizer and ShardedOptimizer: a torch::optim::Optimizer with the
/// parameter groups and defaults of the optimizer that it wraps. Programs do not derive from it.
///
/// Functions that take an optimizer (learning-rate schedulers, torch::save() and torch::load(), a
/// program's own) accept the wrapper or the wrapped optimizer. An option that is written in one is
/// copied to the other by the next step(), inner() or param_groups(). In torch::optim::Optimizer
/// only step(), save() and load() are virtual. If the wrapper is used through a reference to that
/// class, then after add_param_group() the next step() throws, state() is empty, and
/// zero_grad(false) does not discard the backward passes that were counted. See decision 30.
class OptimizerWrapper : public torch::optim::Optimizer {
 public:
  OptimizerWrapper(const OptimizerWrapper&) = delete;
  OptimizerWrapper& operator=(const OptimizerWrapper&) = delete;
  ~OptimizerWrapper() override;

  /// Waits for gradients that are still being reduced, drops the accumulated ones, and clears
  /// `.grad` as the optimizer does.
  void zero_grad(bool set_to_none = true);

  /// Adds a group to the wrapped optimizer, and reduces its gradients from now on. Call it between
  /// step() and the next backward(). Collective; every rank adds the same group. Parameters that
  /// were not trained before must be equal on all ranks (broadcast_parameters()). In the next step
  /// gradients are reduced one by one, as in the first step.
  /// @param names names of the group's parameters that the constructor was not given; unnamed
  /// parameters are numbered if the constructor has numbered the others
  /// @throws UsageError on the rank where the optimizer refuses the group or already has one of its
  /// parameters, where a parameter has no name or belongs to another wrapper, or where gradients
  /// are being reduced. The other ranks then throw MismatchError. All ranks throw it if they add
  /// different parameters. After an error the optimizer is unchanged.
  void add_param_group(const torch::optim::OptimizerParamGroup& group,
                       const NamedParameters& names = NamedParameters());

  /// While the guard exists, step() does not synchronize: `synchronize(); clip(); { auto skip =
  /// skip_synchronize(); step(); }`. step() throws UsageError if gradients are still being reduced.
  SkipSynchronize skip_synchronize();

  /// While the guard exists, backward passes accumulate locally and do not count as passes. step()
  /// still reduces.
  NoSync no_sync();

  /// @throws UsageError if `passes` is less than 1.
  void set_backward_passes_per_step(int passes);

  /// Sets the number of samples in the batch of the next backward pass. The reduced gradients are
  /// then the mean over the samples of all passes and ranks in the step, not the mean over the
  /// ranks, so that ranks may have batches of different sizes:
  ///
  ///     optimizer.set_weight(batch.data.size(0));
  ///     torch::nll_loss(model->forward(batch.data), batch.target).backward();
  ///     optimizer.step();
  ///
  /// Each loss is a mean over its batch, and is not divided by the number of passes. Call it before
  /// each backward pass on every rank. It counts once, even if several backward passes follow. A
  /// pass of weight 0 has no effect on the mean, even if its gradients are nan. A rank that calls
  /// step() without a backward pass counts as 0 samples, if the step before had weights. Local;
  /// costs no message in steady steps, and no time if the ranks have equal weights. Under no_sync()
  /// `.grad` is a sum in units of the weight of the last pass. A closure's reduced loss is the mean
  /// over samples too.
  ///
  /// Errors of the step that follows: UsageError from backward() if an earlier pass of the step had
  /// no weight; from step() if the weight was set after backward(), and on every rank if all
  /// weights are 0. MismatchError on every rank, with the ranks, if some have set a weight and
  /// others have not.
  /// @throws UsageError for a negative number, for more than 2^40, and if op is not kAverage
  void set_weight(std::int64_t samples);

  /// The wrapped optimizer.
  torch::optim::Optimizer& inner() noexcept;

  /// Copies of the wrapped optimizer's groups. Every call returns the same objects.
  std::vector<torch::optim::OptimizerParamGroup>& param_groups() noexcept;
  const std::vector<torch::optim::OptimizerParamGroup>& param_groups() const noexcept;
  /// The state of the wrapped optimizer.
  auto& state() noexcept { return optimizer_.state(); }
  const auto& state() const noexcept { return std::as_const(optimizer_).state(); }

 protected:
  /// @param who name of the class, which begins messages @param numbered whether the names are
  /// numbers
  OptimizerWrapper(const char* who, torch::optim::Optimizer& optimizer,
                   const NamedParameters& parameters, bool numbered,
                   DistributedOptimizerOptions options);

  /// @throws UsageError if the optimizer is a wrapper itself
  void refuse_wrapper() const;
  /// Registers this wrapper in the process, and copies the groups of the wrapped optimizer.
  /// @throws UsageError if the optimizer or one of its parameters is wrapped already
  void enroll(std::span<const libtorch::ReducedParameter> parameters);
  /// Creates the reducer, and hooks the parameters.
  void start_reducing(std::vector<libtorch::ReducedParameter> parameters,
                      libtorch::GradientReduction how);
  void refuse_new_parameters() const;
  /// Throws UsageError if gradients are being reduced at a step() under skip_synchronize(). @param
  /// when follows "gradients are still being reduced" in the message
  void refuse_in_flight(const char* when) const;
  /// Evaluates the closure under skip_synchronize().
  torch::Tensor loss_without_synchronizing(const LossClosure& closure) const;
  bool skips_synchronize() const { return skip_depth_->load() > 0; }
  std::vector<torch::Tensor> all_parameters() const;
  /// Evaluates the closure, and reduces the gradients and the loss.
  torch::Tensor reduced_loss(const torch::optim::Optimizer::LossClosure& closure);
  /// Ends the cycle after the optimizer's own step.
  void end_cycle();
  /// Whether no rank has found inf or nan. Collective. @param unscaled from unscale_gradients()
  bool all_finite(const torch::Tensor& unscaled) const;
  /// Changes whenever the gradients change.
  std::uint64_t gradients_version() const;

  torch::optim::Optimizer& optimizer_;
  std::unique_ptr<libtorch::GroupMirror> groups_;
  const DistributedOptimizerOptions options_;
  std::unique_ptr<GradientSynchronizer> gradients_;
  std::shared_ptr<c10::Synchronized<std::unique_ptr<libtorch::GradientReducer>>>
      reducer_;  ///< of gradients_

 private:
  friend class Accelerator;

  /// Around a backward pass of Accelerator::backward().
  void begin_pass(std::optional<std::int64_t> samples);
  void end_pass();
  /// Further checks of a group that is to be added. @throws UsageError
  virtual void refuse_group(const torch::optim::OptimizerParamGroup& group) const;
  /// Called after a group was added.
  virtual void group_added();

  void refuse_known(const torch::optim::OptimizerParamGroup& group) const;
  /// The known names, `names`, and numbers for the rest.
  NamedParameters names_with(const NamedParameters& names) const;
  void replace_reducer(std::vector<libtorch::ReducedParameter> parameters);
  void warn_of_early_end() const;

  const char* const who_;
  NamedParameters named_;
  const bool numbered_;
  bool enrolled_ = false;
  std::shared_ptr<const void> generations_;
  std::uint64_t earlier_versions_ = 0;  ///< versions of gradients, counted by former reducers
  std::shared_ptr<std::atomic<int>> skip_depth_;
};

/// Adds gradient averaging to an optimizer. A hook on each parameter submits its gradient as soon
/// as backward has produced it, while backward continues with earlier layers; step() waits for all
/// gradients, then steps.
///
/// Refers to `optimizer`, which must outlive it. Every rank of the set constructs its
/// DistributedOptimizers in the same order and with equal arguments. A parameter without a gradient
/// on this rank contributes zeros at step(). If no rank has a gradient of it, `.grad` stays
/// undefined, as in a single process. Frozen parameters (requires_grad false) take no part as long
/// as they are frozen on every rank. A parameter that occurs twice is reduced once. The gradients
/// of several passes are summed, as in LibTorch, and not divided by the number of passes.
///
/// Do not touch `.grad` between backward() and step() or synchronize(): it is being reduced in
/// place. In most cases LibTorch's clip_grad_norm_(), a step() of the wrapped optimizer or an
/// assignment of another tensor leads to a UsageError, at once or from step(). After a backward()
/// under no_sync() the program may change `.grad`; step() or synchronize() reduces its value at
/// that time. After synchronize() gradients are final, and step() uses them with all changes that
/// the program makes. A backward() that follows without zero_grad() adds to the reduced gradients,
/// as in a single process. With an op other than kAverage, and with a gradient_hook, `.grad` then
/// holds only the new part until it has been reduced. In the first step gradients are not sent
/// before step(), in which the ranks compare their parameters.
///
/// In an elastic job the wrapper may be constructed before elastic::run(), and survives changes of
/// the ranks if it reduces over all of them: gradients of an interrupted step are dropped, and the
/// step after a change proceeds like the first one.
///
/// One thread at a time, apart from the hooks, which run on the threads of backward(). The
/// destructor removes the hooks, and does not communicate. It warns if gradients are being reduced.
/// Later backward passes without the wrapper warn too.
class DistributedOptimizer : public OptimizerWrapper {
 public:
  /// Local. @param parameters the names of the optimizer's parameters; further names are allowed
  /// @throws UsageError if a parameter of `optimizer` has no name, a group names an unknown
  /// parameter or one twice, an option is out of range, `optimizer` is wrapped already, a parameter
  /// belongs to another wrapper, or this rank is not in the process set; NotInitializedError before
  /// init().
  ///
  /// This is a template so that a braced argument, {.op = ...}, selects the constructor without
  /// names.
  template <class Parameters = NamedParameters>
    requires std::convertible_to<const Parameters&, NamedParameters>
  DistributedOptimizer(torch::optim::Optimizer& optimizer, const Parameters& parameters,
                       DistributedOptimizerOptions options = {})
      : DistributedOptimizer(WithNames(), optimizer, parameters, std::move(options)) {}
  /// Takes the names of the parameters from the module, which may have more parameters than
  /// `optimizer`. The ranks also compare the module's frozen parameters, before the first update,
  /// and its BatchNorm statistics (see check_every). Parameters that another optimizer trains are
  /// not compared, since each rank may have its own (experts). Parameters that are added to the
  /// module later are not included.
  DistributedOptimizer(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                       DistributedOptimizerOptions options = {});
  /// The same for a module that Python has exported (torch::jit::load()); `optimizer` has its
  /// parameters(). @throws UsageError also for a default-constructed module
  DistributedOptimizer(torch::optim::Optimizer& optimizer, const torch::jit::Module& module,
                       DistributedOptimizerOptions options = {});
  /// The same for a module holder (TORCH_MODULE).
  template <class Impl>
  DistributedOptimizer(torch::optim::Optimizer& optimizer,
                       const torch::nn::ModuleHolder<Impl>& module,
                       DistributedOptimizerOptions options = {})
      : DistributedOptimizer(optimizer, static_cast<const torch::nn::Module&>(*module),
                             std::move(options)) {}
  /// The same for a shared pointer to a module. @throws UsageError for a null pointer
  template <std::derived_from<torch::nn::Module> Module>
  DistributedOptimizer(torch::optim::Optimizer& optimizer, const std::shared_ptr<Module>& module,
                       DistributedOptimizerOptions options = {})
      : DistributedOptimizer(optimizer, libtorch::module_in(module, "DistributedOptimizer"),
                             std::move(options)) {}
  /// Numbers the parameters: "param0", "param1", ... through all groups. Parameters that the
  /// optimizer does not have (frozen layers) are not compared between ranks.
  explicit DistributedOptimizer(torch::optim::Optimizer& optimizer,
                                DistributedOptimizerOptions options = {});
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;
  ~DistributedOptimizer() override;

  /// Calls synchronize(), unless it was called since the last backward or a skip_synchronize()
  /// guard exists, and then the optimizer's own step. With a closure, the gradients and the
  /// returned loss are reduced after each evaluation, so that the optimizers of all ranks make the
  /// same decisions; returns the reduced loss. Under skip_synchronize() a closure calls
  /// synchronize() itself, after backward(). Warns once if no rank has a gradient of any parameter:
  /// probably the model was replaced after the construction, or zero_grad() was called after
  /// backward().
  /// @throws MismatchError, DivergedError, NonFiniteError, StalledError, PeerLostError or
  /// ShutdownError, after which the parameters are unchanged. UsageError for gradients that were
  /// written to while they were reduced, for parameters that were added to `optimizer` directly,
  /// and for an option that was set to different values in the wrapper and in `optimizer`.
  torch::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override;

  /// Returns when every gradient is final. Clip or inspect gradients after this. Throws as step().
  void synchronize();

  /// Calls synchronize(), then torch::nn::utils::clip_grad_norm_() for all parameters of the
  /// optimizer. All ranks have the same gradients then, and so the same norm. With a GradScaler,
  /// call its unscale_() before. @return the norm before clipping
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  /// The same with torch::nn::utils::clip_grad_value_().
  void clip_grad_value_(double clip_value);

  /// Saves or loads the wrapped optimizer. @throws as the wrapped one
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  friend class GradScaler;

  struct WithNames {};
  DistributedOptimizer(WithNames, torch::optim::Optimizer& optimizer,
                       const NamedParameters& parameters, DistributedOptimizerOptions options,
                       bool numbered = false, const NamedParameters& buffers = NamedParameters());

  torch::Tensor reduce_and_step(const torch::optim::Optimizer::LossClosure& closure);
  torch::Tensor step_and_combine(const torch::optim::Optimizer::LossClosure& closure);
  void end_step() { end_cycle(); }
  /// Multiplies final gradients. @return an argument of all_finite()
  torch::Tensor unscale_gradients(double factor);
  std::shared_ptr<const void>
      local_gradients_;  ///< with adasum_delta: a no_sync() guard for this object's lifetime
};

/// @}

}  // namespace hvd
