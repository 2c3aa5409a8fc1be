#pragma once

#include <c10/util/Synchronized.h>
#include <torch/ordered_dict.h>
#include <torch/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hvd/collectives.h"
#include "reducer/gradient_exchange.h"
#include "reducer/gradient_hooks.h"
#include "reducer/gradient_readiness.h"
#include "reducer/gradient_units.h"
#include "reducer/gradient_weights.h"
#include "reducer/parameter_check.h"
#include "reducer/rank_agreement.h"
#include "reducer/reduced_parameter.h"
#include "reducer/single_rank_passes.h"

namespace hvd::libtorch {

class GradientReducer;
using SharedReducer = c10::Synchronized<std::unique_ptr<GradientReducer>>;

/// Reduces the gradients of one optimizer wrapper, by calling its parts in the right order. See
/// docs/architecture.md, "From a gradient to a step".
///
/// A cycle is a step: it begins with the first gradient that is ready, and ends in
/// synchronize() or is discarded. synchronize() submits the remaining gradients, with zeros for
/// parameters without a gradient, so that every rank submits the same set.
///
/// Sparse gradients need other operations than dense ones, and a rank without a gradient has no
/// information about the others' layout. In the first synchronize() the ranks therefore agree on
/// each parameter's layout, before zeros and sparse gradients are submitted. They do so again as
/// long as a layout is unknown and some gradient is sparse, or a rank was absent (see join()).
///
/// In the first cycle no gradient is sent before synchronize() has found that all ranks have the
/// same parameters: an operation that only one rank has would wait for the other ranks. Gradients
/// are then reduced one by one, and the ranks receive the order in which they became ready on the
/// set's first rank. From then on `.grad` is a view into a bucket where possible (see
/// GradientUnits).
///
/// A backward pass may add to gradients that have been reduced. An average stays the same when it
/// is averaged once more. A sum does not, so it is set aside and added to the next sum. A scattered
/// gradient is a mixture of reduced elements and this rank's own, so adding to it is an error.
///
/// Weighted gradients are sent in units of a reference weight. One factor then turns their average
/// over the ranks into the mean over the samples (see GradientWeights). Until the ranks have agreed
/// on the reference, no gradient is sent before synchronize(), which exchanges the weights first.
///
/// On a GPU a gradient is ready when its accumulation is queued in the current stream of the hook.
/// synchronize() does not block its caller, but makes the caller's current stream wait.
///
/// Not thread-safe. Hooks run on autograd's threads, so every access goes through the lock of a
/// SharedReducer.
class GradientReducer {
 public:
  /// The parameters' identities.
  struct Identities {
    std::vector<const c10::TensorImpl*> ordered = {};
    std::unordered_set<const c10::TensorImpl*> all = {};

    bool contains(const c10::TensorImpl* tensor) const { return all.contains(tensor); }
    /// The same, in less time if the tensor has this number.
    bool contains(const c10::TensorImpl* tensor, std::size_t number) const {
      return (number < ordered.size() && ordered[number] == tensor) || contains(tensor);
    }
  };

  GradientReducer(std::vector<ReducedParameter> parameters, GradientReduction how,
                  int passes_per_step);

  /// Replaces `former` between cycles. Only the parameters differ, of which there may be more.
  GradientReducer(std::vector<ReducedParameter> parameters, const GradientReducer& former);

  /// Replaces `former` in a new generation of an elastic job, without its agreements and buckets.
  GradientReducer(const GradientReducer& former, std::string scope);

  /// Adds the frozen parameters among these to the comparison before the first update, even if the
  /// optimizer does not have them. @pre no cycle has ended (checked by
  /// ParameterCheck::add_frozen())
  void compare_frozen(const torch::OrderedDict<std::string, torch::Tensor>& parameters);
  /// Whether a cycle has ended.
  bool has_reduced() const { return check_.cycles() > 0; }
  /// On a GPU: begins a small operation. The first operation of a process set creates its
  /// communicator, which takes up to seconds, and the runtime's buffers, so that both exist when
  /// the first gradients are ready. Does not wait.
  void open_device_queue();
  /// If the set has one rank and the options do not change its gradients: dense gradients are final
  /// as backward leaves them, nothing is submitted, and writes to them are not detected. The hooks
  /// only count passes, which must have no weights. @param self as for install_hooks()
  void skip_reduction(const std::weak_ptr<SharedReducer>& self);
  /// Hooks parameters that require grad and have no (live) hook. Call again after requires_grad or
  /// a dtype may have changed. @param self this object, which hooks lock; they do nothing after it
  /// was destroyed
  void install_hooks(const std::weak_ptr<SharedReducer>& self);
  void remove_hooks() noexcept;
  /// Whether all ranks of the job reduce the gradients.
  bool of_all_ranks() const noexcept { return how_.process_set.id() == 0; }
  const ProcessSet& process_set() const noexcept { return how_.process_set; }
  /// Removes all gradients, because their step will be repeated.
  void drop_gradients();

  /// Ends the cycle: every `.grad` is final. Returns at once if no gradient has arrived since the
  /// last cycle. @throws the first error, when no operation is in flight any more.
  void synchronize();
  /// The next synchronize() reduces even if no gradient arrives on this rank.
  void begin_cycle();
  /// Ends the cycle without using its results, and forgets counted passes.
  void discard();

  bool in_flight() const;
  /// Whether every gradient is final, and synchronize() would return at once.
  bool reduced() const {
    return readiness_.reduced() && !(single_rank_passes_ && single_rank_passes_->reached());
  }
  /// Valid between cycles, until the next one.
  const GradientUnits& units() const noexcept { return units_; }
  const std::vector<ReducedParameter>& parameters() const noexcept { return parameters_; }
  /// The parameters of the constructor.
  std::shared_ptr<const Identities> known() const noexcept { return known_; }
  /// Changes whenever gradients may have changed.
  std::uint64_t gradients_version() const;
  void set_passes_per_step(int passes);
  /// @throws UsageError for a weight that is out of range, and unless the gradients are averaged
  void set_weight(std::int64_t samples);
  /// Around a backward pass that may not reach this optimizer; see GradientWeights::begin_pass().
  void begin_pass(std::optional<std::int64_t> samples);
  void end_pass() { weights_.end_pass(); }
  const GradientWeights& weights() const noexcept { return weights_; }
  /// Sets the reference of the weights for the reducer of the next generation, so that gradients
  /// are rounded as if the ranks had not changed. All ranks set the same value, or leave it unset.
  void restore_reference(std::optional<double> reference) { restored_reference_ = reference; }
  const std::string& scope() const noexcept { return how_.scope; }
  /// Backward passes do not count while it is above zero. The user's guards may outlive this
  /// object.
  std::shared_ptr<std::atomic<int>> no_sync_depth() const noexcept { return no_sync_depth_; }

 private:
  GradientReducer(std::vector<ReducedParameter> parameters, GradientReduction how,
                  int passes_per_step, std::shared_ptr<std::atomic<int>> no_sync_depth);

  GradientHooks::Next before_accumulate(std::size_t index,
                                        const torch::autograd::variable_list& gradients);
  bool finish_alone();
  void refuse_weight() const;
  void weigh_gradients();
  void after_accumulate(std::size_t index, const torch::autograd::variable_list& gradients);
  void refuse_create_graph(const ReducedParameter& parameter) const;
  void refuse_capture(const ReducedParameter& parameter) const;
  void prefetch_next(std::size_t unit) const noexcept;
  /// @param placed take() has copied the gradient into its bucket
  void finish_pass(std::size_t index, const torch::autograd::variable_list& gradients, bool placed);
  void follow_parameters();
  void prepare_gradient(std::size_t index, const torch::autograd::variable_list& gradients,
                        bool placed);
  void submit_rest();
  bool was_reset() const;
  void refuse_scattered(const ReducedParameter& parameter) const;
  bool keeps_results() const;
  void keep_results();
  void abandon();
  void explain_dropped() const;
  void warn_of_dropped();
  void warn_without_gradients(bool any_gradient);
  void raise_if_nonfinite();
  void end_cycle();

  const GradientReduction how_;
  const std::shared_ptr<std::atomic<int>> no_sync_depth_;
  const std::shared_ptr<const Identities> known_;

  std::vector<ReducedParameter> parameters_;
  GradientHooks hooks_;
  GradientReadiness readiness_;
  RankAgreement agreement_;
  GradientUnits units_;
  GradientWeights weights_;
  ParameterCheck check_;
  FiniteCheck finite_;
  GradientExchange exchange_;
  /// Not null: see skip_reduction().
  std::shared_ptr<SingleRankPasses> single_rank_passes_;
  std::optional<std::size_t>
      first_with_gradient_;  ///< first parameter of this cycle that had a gradient
  bool reached_ = false;     ///< a backward pass has run since the last cycle, even under no_sync()
  bool scattered_ = false;   ///< gradients are reduced only where this rank updates
  std::optional<double> restored_reference_;  ///< see restore_reference()
  int dropped_in_a_row_ = 0;                  ///< number of cycles
  bool warned_without_gradients_ = false;
  Operation opening_;  ///< see open_device_queue()
};

/// Calls a member of the reducer, or a function with the reducer, under the lock. @return a copy of
/// the result
template <class Call, class... Arguments>
auto locked(SharedReducer& shared, Call&& call, Arguments&&... arguments) {
  return shared.withLock([&](const std::unique_ptr<GradientReducer>& reducer) {
    return std::invoke(call, *reducer, std::forward<Arguments>(arguments)...);
  });
}

}  // namespace hvd::libtorch
