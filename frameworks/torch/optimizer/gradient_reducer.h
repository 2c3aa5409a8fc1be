#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/ordered_dict.h>
#include <torch/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "hvd/collectives.h"
#include "optimizer/gradient_bucket.h"
#include "optimizer/gradient_transfer.h"
#include "optimizer/parameter_check.h"
#include "tensors/device_order.h"

namespace hvd::libtorch {

/// The hooks of one DistributedOptimizer and what has become of each gradient.
///
/// A parameter's way through a step ("cycle"):
///
///   idle --last counted pass--> ready --its unit is complete--> submitted --synchronize()--> idle
///
/// A unit is a parameter alone or a group that the user asked for; its members are submitted
/// together. synchronize() submits whatever was not, with zeros for what has no gradient, so that
/// every rank submits the same set.
///
/// Sparse gradients travel otherwise than dense ones, and a rank without a gradient cannot tell
/// which the others have. So in the first synchronize() ranks settle each parameter's layout,
/// before zeros and sparse gradients are submitted; and again as long as one is open, if any is
/// sparse, or a rank was absent (see join()).
///
/// In the first cycle nothing is sent before all ranks have found in synchronize() that they have
/// the same parameters: what one rank alone sent would wait for the others. Gradients travel one by
/// one, and the ranks learn in which order they became ready (that of the set's first rank). From
/// then on, if how.bucket_views and nothing speaks against it (see may_use_buckets()), a unit is a
/// bucket, for all parameters that can be in one (see fits_bucket()): `.grad` is a view into memory
/// that is reduced as one tensor. When the set of active parameters changes, learning begins again.
///
/// On a GPU all of this is about what is queued: a gradient is ready when its accumulation is in
/// the current stream of the hook, and synchronize() makes the current stream of its caller wait,
/// not the caller.
///
/// Thread-safe: hooks run on autograd's threads. Held by shared_ptr; hooks hold weak ones.
class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  struct Parameter {
    std::string name;  ///< as the user calls it
    torch::Tensor tensor;
    int group = -1;  ///< index of the user's group, or -1
  };

  /// `scope` goes before every name that ranks agree on.
  GradientReducer(std::string scope, std::vector<Parameter> parameters, GradientReduction how,
                  int passes_per_step);

  /// Compares these, too, before the first update: frozen parameters, which the optimizer may not
  /// have. @pre no cycle has ended
  void compare_also(const torch::OrderedDict<std::string, torch::Tensor>& parameters);
  /// Whether a cycle has ended.
  bool has_reduced() const { return check_.cycles() > 0; }
  /// Hooks parameters that require grad and have no (live) hook. Call again after requires_grad or
  /// a dtype may have changed.
  void install_hooks();
  void remove_hooks() noexcept;

  /// Ends the cycle: every `.grad` is final. Does nothing if no gradient came in since the last
  /// one. @throws the first error, when nothing is in flight any more.
  void synchronize();
  /// The next synchronize() reduces even if no gradient comes in on this rank.
  void begin_cycle();
  /// Ends the cycle without using its results, and forgets counted passes.
  void discard();

  bool in_flight() const;
  bool has(const torch::Tensor& parameter) const {
    return known_.contains(parameter.unsafeGetTensorImpl());
  }
  /// Another number when gradients may be others.
  std::uint64_t gradients_version() const;
  void set_passes_per_step(int passes);
  const std::string& scope() const noexcept { return scope_; }
  /// Above zero: backward passes do not count. Outlives this object in the guards that the user
  /// holds.
  std::shared_ptr<std::atomic<int>> no_sync_depth() const noexcept { return no_sync_depth_; }

 private:
  enum class Phase { kIdle, kReady, kSubmitted };
  // Its pointer type differs between LibTorch versions.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(torch::Tensor()));

  struct Slot {
    std::string name;   ///< as the user calls it
    std::string label;  ///< as ranks agree on it
    GradientTransfer transfer;
    int group = -1;  ///< the user's
    std::size_t unit = 0;
    Phase phase = Phase::kIdle;
    int passes = 0;
    // Tensors refer to their accumulator weakly: unless somebody holds it, it goes, and the hooks
    // with it.
    Accumulator accumulator = {};
    torch::autograd::FunctionPreHook* pre_hook = nullptr;
    std::uintptr_t post_hook = 0;

    bool active() const { return transfer.parameter().requires_grad(); }
  };
  struct Unit {
    std::string group;  ///< its name; empty for a parameter alone
    std::vector<std::size_t> slots;
    bool submitted = false;
    std::size_t ready = 0;  ///< as many of the first slots are known to be ready, in this cycle
    std::shared_ptr<GradientBucket> bucket = {};
    StreamChain stream = {};  ///< GPU: gradients may come from several streams
  };

  void before_accumulate(std::size_t index);
  void after_accumulate(std::size_t index, const torch::autograd::variable_list& gradients);
  void hook(std::size_t index);
  void unhook(Slot&) noexcept;

  // The caller holds mutex_.
  void refuse_create_graph(const Slot&) const;
  void refuse_capture(const Slot&) const;
  void refuse_written();
  void hand_over(Slot&, const torch::autograd::variable_list& gradients);
  void add_units_without_bucket();
  bool wants_buckets() const;
  bool may_use_buckets() const;
  bool buckets_fit() const;
  bool fits_bucket(const Slot&) const;
  /// The same, but that its layout may not be known yet.
  bool might_fit_bucket(const Slot&) const;
  void learn_buckets(std::vector<std::size_t> submitted);
  std::shared_ptr<GradientBucket> make_bucket(const std::vector<std::size_t>& members,
                                              std::size_t number) const;
  bool on_all_ranks(bool own, const std::string& name) const;
  std::vector<std::size_t> agree_on_order(const std::vector<std::size_t>& submitted);
  void use_buckets(const std::vector<std::size_t>& order);
  void forget_buckets();
  void follow_streams(Unit&);
  void place_in_bucket(const Unit&);
  void add_submissions(std::size_t unit, std::vector<Submission>& submissions);
  bool unit_ready(Unit&) const;
  void check_stays_in_place(std::size_t slot) const;
  bool waits_for_layout(const Slot&) const;
  void submit_units(std::span<const std::size_t> units, bool with_flags, Progress progress);
  void submit_one(const Submission&, Progress progress);
  void note_submitted(std::size_t unit);
  void submit_rest();
  bool layouts_in_doubt() const;
  void agree_on_layouts();
  void compare_parameters();
  void throw_first_difference() const;
  void compare_checksums();
  void warn_of_dropped();
  std::vector<std::size_t> order_of_arrival() const;
  bool all_ready_after(std::size_t unit) const;
  bool in_cycle() const;
  bool was_reset() const;
  void wait_all() const;
  void abandon();
  void reset();

  const std::string scope_;
  const GradientReduction how_;
  const std::shared_ptr<std::atomic<int>> no_sync_depth_ = std::make_shared<std::atomic<int>>(0);

  std::unordered_set<const c10::TensorImpl*> known_;  ///< parameters

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  int passes_per_step_;
  std::vector<Slot> slots_;
  std::vector<torch::Tensor> parameters_;  ///< of the slots
  /// What ParameterCheck looks at: of the slots, then what else the model has.
  std::vector<torch::Tensor> checked_;
  std::vector<std::string> checked_names_;
  std::vector<Unit> units_;
  std::vector<Operation> operations_;
  std::vector<std::size_t> submitted_;  ///< slots, in order of submission
  std::vector<std::size_t>
      arrivals_;  ///< slots, as their gradients were handed over; while there are no buckets
  std::optional<std::size_t> first_ready_;        ///< of this cycle
  bool same_parameters_ = false;                  ///< known of all ranks
  int dropped_in_a_row_ = 0;                      ///< cycles
  std::vector<std::size_t> provisional_layouts_;  ///< agreed on for this cycle only
  enum class Buckets { kUnknown, kUsed, kRefused };
  Buckets buckets_ = Buckets::kUnknown;
  UsedFlags flags_;
  ParameterCheck check_;
  bool flags_submitted_ = false;
  bool synchronized_ = false;
  std::uint64_t gradients_version_ = 0;
};

}  // namespace hvd::libtorch
