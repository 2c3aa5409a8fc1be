#pragma once

#include <c10/util/Synchronized.h>
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
#include "hvd/torch/gradient_hook.h"
#include "hvd/torch/parameters.h"
#include "hvd/types.h"

namespace hvd {

namespace libtorch {
class GradientReducer;
class GroupMirror;
class ReducedParameter;
struct GradientReduction;
}  // namespace libtorch

/// The ranks' parameters are not the same any more (or not yet), so that training would go on with
/// as many models as ranks. Raised on every rank of the optimizer's set; the runtime goes on.
class DivergedError : public Error {
 public:
  using Error::Error;
};

/// Gradients of some ranks contain inf or nan (see
/// DistributedOptimizerOptions::error_if_nonfinite). Raised on every rank of the optimizer's set,
/// whose parameters are then unchanged; the runtime goes on.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

struct DistributedOptimizerOptions {
  /// kAverage, kSum or kAdasum.
  ReduceOp op = ReduceOp::kAverage;
  /// Sends float32 and float64 gradients as 16 bits; `.grad` keeps its dtype. float32 is cast on
  /// its way into the runtime's buffer, which needs no copy per tensor (see
  /// hvd::Allreduce::compression).
  Compression compression = Compression::kNone;
  /// Backward passes whose gradients add up before they are reduced.
  int backward_passes_per_step = 1;
  /// f: gradients are multiplied by 1/f before and by f/size after the sum, to keep it in range.
  /// kAverage only.
  double gradient_predivide_factor = 1;
  /// Parameters, by name, whose gradients are reduced together. Those not named are reduced one by
  /// one, fused as they come.
  std::vector<std::vector<std::string>> groups = {};
  /// Turns sparse gradients into dense ones before they are reduced. Without it they stay sparse
  /// (see sparse_allreduce(); average and sum only).
  bool sparse_as_dense = false;
  /// From the second step on, gradients are reduced in buckets. On the CPU `.grad` tensors then lie
  /// side by side in buffers that are reduced where they are: nothing is copied back, and nothing
  /// is copied in when gradients are zeroed rather than dropped (`zero_grad(false)`). A `.grad`
  /// that the program keeps from one step is overwritten in the next. On a GPU they stay where
  /// autograd has put them, and one launch packs a bucket. Results do not depend on it, but for
  /// roundings on a GPU. Members of groups, sparse gradients and compressed float64 ones travel
  /// beside the buckets; with Adasum there are none.
  bool gradient_as_bucket_view = true;
  /// Size of a bucket in bytes, the same on every rank. A gradient that is larger has a bucket of
  /// its own. Large buckets take fewer operations; with small ones the first is reduced earlier,
  /// and less is left to reduce when backward has ended. 0: an eighth of all gradients on the CPU,
  /// at most 8 MiB; a quarter on a GPU, from 1 to 25 MiB, and at most 1 MiB in the last bucket.
  std::int64_t bucket_bytes = 0;
  ProcessSet process_set = {};
  /// kAdasum only: of what the optimizer changes in the parameters, as Horovod has it, not of
  /// gradients. Every rank updates by its own gradients, which are not reduced; step() then adds
  /// the Adasum of all ranks' changes to what the parameters were before. So momentum and Adam's
  /// averages are each rank's own.
  bool adasum_delta = false;
  /// Reduces gradients in place of hvd: for a compression of your own. Sparse gradients are made
  /// dense. What it returns are the gradients; `op` is what becomes of a closure's loss. Not with
  /// Adasum, compression or gradient_predivide_factor.
  GradientHook gradient_hook = {};
  /// The ranks compare their parameters before the first update (bit for bit) and every so many
  /// reductions of gradients (up to roundings): step() throws DivergedError if they are not the
  /// same. 0: never. Not set: HVD_CHECK_EVERY, else 100.
  std::optional<int> check_every = std::nullopt;
  /// For a search: every rank looks for inf and nan in its own gradients before they are reduced,
  /// and step() throws NonFiniteError that names the ranks and parameters. Costs a pass over the
  /// gradients and a small operation in each step. Not with a GradScaler, which overflows on
  /// purpose.
  bool error_if_nonfinite = false;
};

/// While it lives, step() does not reduce gradients. See OptimizerWrapper::skip_synchronize().
/// Move-only.
class [[nodiscard]] SkipSynchronize {
 public:
  SkipSynchronize(SkipSynchronize&&) noexcept = default;
  SkipSynchronize& operator=(SkipSynchronize&&) = delete;

 private:
  friend class OptimizerWrapper;
  explicit SkipSynchronize(std::shared_ptr<const void> scope) : scope_(std::move(scope)) {}

  std::shared_ptr<const void> scope_;
};

/// While it lives, backward passes accumulate without communication. See
/// OptimizerWrapper::no_sync(). Move-only.
class [[nodiscard]] NoSync {
 public:
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&&) = delete;

 private:
  friend class OptimizerWrapper;
  explicit NoSync(std::shared_ptr<const void> scope) : scope_(std::move(scope)) {}

  std::shared_ptr<const void> scope_;
};

/// What DistributedOptimizer and ShardedOptimizer have in common: a torch::optim::Optimizer with
/// the parameter groups and defaults of the optimizer that it wraps, and the gradients on their
/// way. No class for programs to derive from.
///
/// What takes an optimizer (learning-rate schedulers, torch::save() and torch::load(), a program's
/// own functions) takes the wrapper or the wrapped one, and an option that is written to one is the
/// other's from the next step() on, or call of inner() or param_groups(). As LibTorch's functions
/// are not virtual but for step(), save() and load(), through torch::optim::Optimizer&
/// add_param_group() is an error at step(), state() is empty, and zero_grad(false) does not discard
/// passes that were counted. See decision 30.
class OptimizerWrapper : public torch::optim::Optimizer {
 public:
  OptimizerWrapper(const OptimizerWrapper&) = delete;
  OptimizerWrapper& operator=(const OptimizerWrapper&) = delete;
  ~OptimizerWrapper() override;

  /// Waits for gradients still being reduced, drops what has accumulated, and clears `.grad` as the
  /// optimizer does.
  void zero_grad(bool set_to_none = true);

  /// Adds a group to the wrapped optimizer, and reduces its gradients from now on: between step()
  /// and the next backward(). Collective; every rank adds the same. Parameters that were not
  /// trained before must be equal on all ranks (broadcast_parameters()). Gradients travel one by
  /// one in the next step, as in the first one.
  /// @param names of parameters that the constructor was not told of; without them they are
  /// numbered if it has numbered the others
  /// @throws UsageError on the rank where the optimizer does not take the group or has a parameter
  /// of it, one has no name or belongs to another wrapper, or gradients are being reduced;
  /// MismatchError on the others then, and on all when they add different parameters. Nothing has
  /// changed.
  void add_param_group(const torch::optim::OptimizerParamGroup& group,
                       const NamedParameters& names = NamedParameters());

  /// While the guard lives, step() does not synchronize: `synchronize(); clip(); { auto skip =
  /// skip_synchronize(); step(); }`. step() then throws UsageError if gradients are still being
  /// reduced.
  SkipSynchronize skip_synchronize();

  /// While the guard lives, backward passes accumulate locally and do not count as passes. step()
  /// still reduces.
  NoSync no_sync();

  /// @throws UsageError below 1.
  void set_backward_passes_per_step(int passes);

  torch::optim::Optimizer& inner() noexcept;

  /// Those of the wrapped optimizer, as copies that are the same from call to call.
  std::vector<torch::optim::OptimizerParamGroup>& param_groups() noexcept;
  const std::vector<torch::optim::OptimizerParamGroup>& param_groups() const noexcept;
  /// That of the wrapped optimizer.
  auto& state() noexcept { return optimizer_.state(); }
  const auto& state() const noexcept { return std::as_const(optimizer_).state(); }

 protected:
  /// @param who the class's name, which begins messages  @param numbered the names are numbers
  OptimizerWrapper(const char* who, torch::optim::Optimizer& optimizer,
                   const NamedParameters& parameters, bool numbered,
                   DistributedOptimizerOptions options);

  /// @throws UsageError when the optimizer is a wrapper itself
  void refuse_wrapper() const;
  /// Takes its place among the wrappers of the process, with the groups of the wrapped optimizer.
  /// @throws UsageError when it or one of its parameters is wrapped already
  void enroll(std::span<const libtorch::ReducedParameter> parameters);
  /// Hooks the parameters.
  void start_reducing(std::vector<libtorch::ReducedParameter> parameters,
                      libtorch::GradientReduction how);
  void refuse_new_parameters() const;
  /// Under skip_synchronize(). @param when behind "gradients are still being reduced"
  void refuse_in_flight(const char* when) const;
  /// One evaluation of the closure under skip_synchronize().
  torch::Tensor loss_without_synchronizing(const LossClosure& closure) const;
  bool skips_synchronize() const { return skip_depth_->load() > 0; }
  std::vector<torch::Tensor> all_parameters() const;
  /// One evaluation of the closure, with the gradients and the loss reduced.
  torch::Tensor reduced_loss(const torch::optim::Optimizer::LossClosure& closure);
  /// What step() does besides the optimizer's own step.
  void end_cycle();
  /// False when a gradient of any rank was inf or nan. Collective.
  bool all_finite(const torch::Tensor& unscaled) const;
  /// Changes whenever the gradients change.
  std::uint64_t gradients_version() const;

  torch::optim::Optimizer& optimizer_;
  std::unique_ptr<libtorch::GroupMirror> groups_;
  const DistributedOptimizerOptions options_;
  std::shared_ptr<c10::Synchronized<std::unique_ptr<libtorch::GradientReducer>>> reducer_;

 private:
  /// More reasons against a group. @throws UsageError
  virtual void refuse_group(const torch::optim::OptimizerParamGroup& group) const;
  /// The optimizer has another group, whose gradients are reduced from now on.
  virtual void group_added();

  void refuse_known(const torch::optim::OptimizerParamGroup& group) const;
  /// The names of all parameters that there will be: the known ones, `names`, and numbers.
  NamedParameters names_with(const NamedParameters& names) const;
  void replace_reducer(std::vector<libtorch::ReducedParameter> parameters);

  const char* const who_;
  NamedParameters named_;
  const bool numbered_;
  bool enrolled_ = false;
  std::uint64_t earlier_versions_ = 0;  ///< of gradients, by reducers that there were
  std::shared_ptr<std::atomic<int>> skip_depth_;
};

/// Adds gradient averaging to an optimizer: a hook on each parameter hands its gradient over as
/// soon as backward has produced it, while backward goes on with earlier layers; step() waits for
/// all of them, then steps.
///
/// Refers to `optimizer`, which must outlive it. Every rank of the set constructs its
/// DistributedOptimizers in the same order and with equal arguments. A parameter that got no
/// gradient on this rank contributes zeros at step(); one that got none on any rank keeps its
/// undefined `.grad`, as in a single process. Frozen parameters (requires_grad false) take no part
/// as long as they are frozen on every rank. A parameter that occurs twice is reduced once. Passes
/// add up (as LibTorch accumulates) and are not divided by their number.
///
/// Between backward() and step() or synchronize() do not touch `.grad`: it is being reduced in
/// place. Whoever does so (clip_grad_norm_(), the step() of the wrapped optimizer, an assignment of
/// another tensor) gets a UsageError, at once or from step(), in most cases. What backward() has
/// left under no_sync() is the program's until step() or synchronize() reduces what is then there;
/// after that gradients are final, and step() uses what has become of them. A backward() that
/// follows without zero_grad() adds to what has been reduced, as in a single process. With another
/// op than kAverage, and with a gradient_hook, `.grad` then holds what was added alone until it has
/// been reduced. In the first step
/// nothing is sent before step(), where the ranks find out whether they have the same parameters.
/// One thread at a time, but for the hooks, which run on whatever thread backward uses. The
/// destructor removes the hooks; it never communicates. It warns when no gradient was ever reduced
/// and when gradients are being reduced, and backward passes warn that go on without it.
class DistributedOptimizer : public OptimizerWrapper {
 public:
  /// @throws UsageError when a parameter of `optimizer` is not in `parameters` (more may be in it),
  /// when a group names an unknown parameter or one twice, when an option is out of range, when
  /// `optimizer` is wrapped already or a parameter belongs to another DistributedOptimizer, or when
  /// this rank is not in the process set; NotInitializedError before init().
  ///
  /// A template only so that braces, {.op = ...}, mean the options of the constructor without
  /// names.
  template <class Parameters = NamedParameters>
    requires std::convertible_to<const Parameters&, NamedParameters>
  DistributedOptimizer(torch::optim::Optimizer& optimizer, const Parameters& parameters,
                       DistributedOptimizerOptions options = {})
      : DistributedOptimizer(WithNames(), optimizer, parameters, std::move(options)) {}
  /// With the names that parameters have in the module, of which `optimizer` need not have all.
  /// Frozen parameters of the module are compared between ranks, too, before the first update;
  /// those that another optimizer trains are not: each rank may have its own (experts). What the
  /// module gets later is not known.
  DistributedOptimizer(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                       DistributedOptimizerOptions options = {});
  /// The same for what TORCH_MODULE makes.
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
  /// Numbers the parameters: "param0", "param1", ... through all groups. What the optimizer does
  /// not have (frozen layers) is not compared between ranks.
  explicit DistributedOptimizer(torch::optim::Optimizer& optimizer,
                                DistributedOptimizerOptions options = {});
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;
  ~DistributedOptimizer() override;

  /// synchronize(), unless it was called since the last backward or skip_synchronize() is alive,
  /// then the optimizer's own step. With a closure, the gradients are reduced each time it was
  /// evaluated, and the loss it returns too (as the gradients are), so that every rank's optimizer
  /// takes the same decisions; that loss is returned. Under skip_synchronize() a closure calls
  /// synchronize() itself, after backward().
  /// Warns, once, when no rank has a gradient of any parameter: the model has been replaced since
  /// the construction, or zero_grad() was called after backward().
  /// @throws MismatchError, DivergedError, NonFiniteError, StalledError, PeerLostError,
  /// ShutdownError: the parameters are then unchanged. UsageError for gradients that were written
  /// to while they were reduced, for parameters that `optimizer` was given since behind its back,
  /// and for an option that was written both here and in `optimizer`, to different values.
  torch::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override;

  /// Returns when every gradient is final: clip or inspect them after this. Throws as step() does.
  void synchronize();

  /// synchronize(), then torch::nn::utils::clip_grad_norm_() over all parameters of the optimizer.
  /// Gradients are the same on every rank then, and so are norms. After GradScaler::unscale_(), if
  /// there is a scaler. @return the norm before
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  /// The same with torch::nn::utils::clip_grad_value_().
  void clip_grad_value_(double clip_value);

  /// Of the wrapped optimizer. @throws as its own
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  friend class GradScaler;

  struct WithNames {};
  DistributedOptimizer(WithNames, torch::optim::Optimizer& optimizer,
                       const NamedParameters& parameters, DistributedOptimizerOptions options,
                       bool numbered = false);

  torch::Tensor reduce_and_step(const torch::optim::Optimizer::LossClosure& closure);
  torch::Tensor step_and_combine(const torch::optim::Optimizer::LossClosure& closure);
  void end_step() { end_cycle(); }
  /// Multiplies final gradients. @return for all_finite()
  torch::Tensor unscale_gradients(double factor);
  void warn_of_early_end() const;

  std::shared_ptr<const void>
      local_gradients_;  ///< with adasum_delta: a no_sync() for all its life
};

}  // namespace hvd
