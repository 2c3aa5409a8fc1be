#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/process_set.h"
#include "hvd/torch/gradient_hook.h"
#include "hvd/types.h"
#include "operations/sparse.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {

/// Treatment of sparse gradients.
enum class SparseGradients { kRefuse, kMakeDense, kReduceSparse };

/// How the gradients of one optimizer are reduced.
struct GradientReduction {
  const char* wrapper =
      "DistributedOptimizer";  ///< name of the user's class, which begins messages
  std::string scope = {};      ///< prefix of every name that ranks agree on
  ReduceOp op = ReduceOp::kAverage;
  double prescale = 1;
  double postscale = 1;
  Compression compression = Compression::kNone;
  ProcessSet process_set = {};
  bool divide_by_size = false;  ///< see DistributedOptimizerOptions
  SparseGradients sparse = SparseGradients::kRefuse;
  bool bucket_views = false;
  std::int64_t bucket_bytes = 0;    ///< size of buckets; 0: the default
  int check_every = 0;              ///< see ParameterCheck
  bool error_if_nonfinite = false;  ///< see FiniteCheck
  /// Buffers with BatchNorm statistics, by name. A difference between ranks causes a warning.
  std::vector<std::pair<std::string, torch::Tensor>> statistics = {};
  /// Each rank updates a part of the parameters, so uncompressed buckets in the host's memory are
  /// scattered; see decision 29.
  bool sharded = false;
  /// Returns lines that must be the same on all ranks. Compared as often as the parameters, bit for
  /// bit. May be empty.
  std::function<std::vector<std::string>()> options = {};
  /// Reduces the changes that each rank's optimizer has made, instead of gradients.
  bool reduces_changes = false;
  /// Reduces units of gradients instead of the runtime.
  GradientHook hook = {};
};

/// The operation of a submission.
ReduceOp op_of(const GradientReduction& how);

/// Smaller gradients, in bytes, are fused: the copy into a common buffer costs less than another
/// call of the backend.
inline constexpr std::size_t kMinUnfusedBytes = std::size_t{128} << 10;
/// Tensors from this size on, in bytes, are not fused within one host.
inline constexpr std::size_t kLargeOnOneHost = std::size_t{256} << 10;

/// An allreduce in place. The core compresses real numbers if `how` requests it. The caller
/// sets keep_alive.
Submission reduction_in_place(std::string name, const GradientReduction& how, TensorView memory);
/// A reducescatter in place: this rank's rows stay where they are. Not compressed.
Submission scatter_in_place(std::string name, const GradientReduction& how, TensorView memory);
/// An allreduce in place of a contiguous tensor, which the submission keeps alive.
Submission reduction_in_place(std::string name, const GradientReduction& how,
                              const torch::Tensor& tensor);

/// Strides of a gradient in a bucket: those of the parameter, or contiguous ones if those have
/// gaps.
std::vector<std::int64_t> strides_for(const torch::Tensor& parameter);

/// Number of sparse dimensions of a parameter's gradients, 0 for dense ones; nullopt: unknown.
using SparseDims = std::optional<std::int64_t>;

/// A parameter whose gradient is reduced: call prepare(), submit its operations, and call
/// complete() when they are done. Not thread-safe.
class ReducedParameter {
 public:
  /// @param name the user's  @param group index of the user's group, or -1
  ReducedParameter(std::string name, torch::Tensor parameter, int group = -1)
      : parameter_(std::move(parameter)),
        result_(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()),
        group_(group),
        name_(std::move(name)) {}

  /// Sets the prefix of the label, and of messages. Call it before an operation is submitted.
  void set_scope(const GradientReduction& how);
  const std::string& name() const noexcept { return name_; }
  /// Name of the class that reduces the gradient, for messages.
  const char* wrapper() const noexcept { return wrapper_; }
  /// The name of operations, on which the ranks agree.
  const std::string& label() const noexcept { return label_; }
  int group() const noexcept { return group_; }
  const torch::Tensor& tensor() const noexcept { return parameter_; }
  /// Whether the parameter may get a gradient.
  bool active() const { return parameter_.requires_grad(); }
  bool has_gradient() const { return gradient().defined(); }
  /// Layout of the `.grad` that was sent, or else of the current one.
  SparseDims own_layout() const;
  /// The layout on all ranks, to which gradients are converted. nullopt counts as dense.
  SparseDims agreed_layout() const noexcept { return agreed_; }
  void agree(SparseDims layout) { agreed_ = layout; }

  /// Records that a backward pass has reached the parameter. It need not have a gradient then: a
  /// function may return an undefined one.
  void record_pass() { had_gradient_ = has_gradient(); }
  /// Whether the gradient of the last pass in this cycle was reset.
  bool was_reset() const { return had_gradient_ && !has_gradient(); }
  bool had_gradient() const noexcept { return had_gradient_; }

  /// Whether `.grad` is the result of a reduction that the program has not reset or replaced.
  bool holds_result() const;
  /// The same, if the program has not written to it either.
  bool holds_untouched_result() const;
  /// Call it before a weighted pass adds to `.grad`. `.grad` is then a sum in units of the weight
  /// of the last pass that has reached it. @param weight more than 0
  void begin_weighted_pass(double weight);
  /// Call it before place(), prepare() or gather(), or after place() if the reference was not
  /// known: the gradient is sent in units of `reference`. @param weight of this rank's last pass,
  /// for a gradient that the program has assigned itself
  void weigh(double weight, double reference);
  /// Multiplies the result, in complete(). Not for a parameter with a view.
  void set_result_factor(double factor) noexcept { result_factor_ = factor; }
  /// The dense tensor that is reduced, if it has the parameter's dtype; otherwise undefined.
  torch::Tensor dense_wire() const;
  /// Sets a result aside, so that the next reduction does not count it once for each rank. `.grad`
  /// is then zeros, and complete() adds the result to the next one. @pre holds_result()
  void keep_result();
  /// Call it when the program has reset its gradients.
  void forget_result();

  /// Detects writes of the program to `.grad` from here to release(). This object must not move
  /// meanwhile. @throws UsageError for a gradient with a graph of its own.
  void guard();
  /// @return whether the program has written to the guarded `.grad`, or replaced it
  bool release() noexcept;
  /// Finds out whether `.grad` shares its memory with tensors other than `known`, the gradients
  /// that autograd still holds; none: no backward pass has made it ready, and another parameter may
  /// have the same tensor. If it does, prepare() sends a copy.
  void detect_sharing(at::TensorList known);
  /// The addresses of the elements of a dense `.grad` that has no view and shares its memory with
  /// another tensor; otherwise empty. Call it after prepare() or gather().
  std::span<const std::byte> shared_memory() const;
  /// Gives `.grad` memory of its own, whose contents complete() sets. @pre it shares memory
  void separate() {
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(!shared_memory().empty());
    parameter_.mutable_grad() = torch::empty_like(parameter_.grad());
  }

  /// An in-place reduction of the current `.grad`, or of zeros if the parameter has no gradient.
  /// The several submissions of a sparse gradient must be in one group.
  /// @throws UsageError for a gradient that cannot be sent.
  std::vector<Submission> prepare(const GradientReduction& how);
  /// Sets the gradient's place in a bucket, which is reduced as a whole. Undefined: no place.
  void set_view(torch::Tensor view);
  const torch::Tensor& view() const noexcept { return view_; }
  /// Begins to load the tensors that take() and guard() touch.
  void prefetch() const noexcept;
  /// Begins to load what those tensors refer to, the memory of the view for writing. Call it some
  /// time after prefetch().
  void prefetch_memory() const noexcept;
  /// Copies a `.grad` that is not in flight into the view, which becomes `.grad`. A `.grad` of
  /// another dtype, layout or shape is left unchanged. @pre there is a view
  void move_to_view();
  /// Copies the gradient of a pass into the view, which becomes `.grad`, instead of place().
  /// Autograd would make a separate tensor. A weighted gradient is scaled by a later weigh().
  /// @return false, without an effect, unless `.grad` is undefined and the gradient is small
  bool take(const torch::Tensor& gradient);
  /// Instead of prepare(): copies the current `.grad`, or zeros, into the view, which becomes
  /// `.grad`.
  /// @throws UsageError for a gradient that cannot be sent. @pre there is a view
  void place(const GradientReduction& how);
  /// Instead of prepare(): returns the current `.grad`, to be reduced in place with others; a copy
  /// if its strides are not those of the parameter, and zeros if the parameter has no gradient.
  /// @return a tensor without gaps, with the strides of strides_for()
  /// @throws UsageError for a gradient that cannot be sent. @pre there is no view
  const torch::Tensor& gather(const GradientReduction& how);

  /// Makes the reduced values the parameter's gradient. @param used whether some rank has had a
  /// gradient. If no rank has, or the gradient was reset after it was sent, `.grad` stays as it is.
  /// @pre gradients are not recorded (NoGradGuard)
  void complete(bool used);
  /// Instead of complete(), after a reduction whose result is dropped: a gradient that was reduced
  /// in place holds the result nevertheless.
  void remember_dropped_result();
  /// Releases the memory that was reduced.
  void drop();
  /// Ends the cycle, with or without a result. @pre gradients are not recorded (NoGradGuard)
  void end_cycle();

 private:
  /// `.grad`. Tensor::grad() also checks for tensors that keep no gradient.
  const torch::Tensor& gradient() const { return parameter_.unsafeGetTensorImpl()->grad(); }
  void check_gradient(const GradientReduction& how);
  /// With the strides that autograd gives a gradient.
  torch::Tensor empty_gradient() const;
  /// `.grad`, unless the program has replaced it. @pre guard()
  const torch::Tensor& expected() const {
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(guarded_.defined());
    return converted_.defined() ? converted_ : guarded_;
  }
  bool copied_into_view(const torch::Tensor& gradient) const;
  void choose_layout(const GradientReduction& how);
  void choose_sent(const GradientReduction& how);
  bool has_parameter_strides(const torch::Tensor& gradient) const;
  void complete_view(bool used);
  void complete_wire(bool used);
  double sent_factor() const { return unit_ && reference_ > 0 ? *unit_ / reference_ : 1; }
  void record_scaled_gradient();
  void scale_view();
  void remember_result();
  void add_kept();
  // Both send sent_.
  Submission prepare_dense(const GradientReduction& how);
  std::vector<Submission> prepare_sparse(const GradientReduction& how);

  // A steady step touches only the first members, which lie in two lines of the cache.
  torch::Tensor parameter_;
  torch::Tensor view_;
  std::byte* view_memory_ = nullptr;
  torch::Tensor sent_;       ///< `.grad` at prepare() or gather(); undefined for zeros
  torch::Tensor guarded_;    ///< `.grad` from guard() to release()
  torch::Tensor unguarded_;  ///< `.grad` before guard() and after release(), unless it is guarded_
  torch::Tensor converted_;  ///< guarded_ in the agreed layout, if it had another one
  torch::Tensor sample_;     ///< values of a sparse guarded_
  std::uint32_t version_ = 0;  ///< version of guarded_
  std::uint32_t result_version_ = 0;
  /// The last result. A weak reference, so that a result that the program drops is freed.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> result_;
  torch::Tensor kept_;  ///< see keep_result()
  torch::Tensor wire_;  ///< the tensor that is reduced; shares the memory of sent_ where possible
  std::shared_ptr<SparseReduction> sparse_;  ///< instead of wire_
  bool shared_ = false;
  bool had_gradient_ = false;
  int group_;
  SparseDims agreed_;
  std::optional<double> unit_;  ///< weight in whose units `.grad` is; not set: unweighted
  double reference_ = 0;        ///< weight in whose units it is sent; 0: unweighted
  double result_factor_ = 1;
  std::string name_;
  const char* wrapper_ = "DistributedOptimizer";
  std::string label_;
};

}  // namespace hvd::libtorch
