#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/collectives.h"
#include "operations/sparse.h"
#include "reducer/gradient_reduction.h"

namespace hvd::libtorch {

/// Whose gradient is guarded, for messages.
struct GuardedParameter {
  std::string name = {};
  const char* wrapper = "DistributedOptimizer";  ///< the class that reduces it
};

/// A dense gradient that does not let `data()` take it while guarded. That is how LibTorch's
/// clip_grad_norm_() and clip_grad_value_() and the step() of some optimizers reach it, and what
/// they write there no version counter shows; an ordinary operation counts up `_version()`.
///
/// Thread-safe as far as the guard goes; otherwise as a tensor.
class GuardedGradient final : public c10::TensorImpl {
 public:
  GuardedGradient(c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta type)
      : c10::TensorImpl(std::move(storage), keys, type) {}

  /// Another tensor of the same memory, in no relation to it that autograd knows of, so that an
  /// optimizer may detach it in place.
  static torch::Tensor of(const torch::Tensor& memory);
  /// Null for a tensor that is none.
  static GuardedGradient* find(const torch::Tensor& gradient) {
    return dynamic_cast<GuardedGradient*>(gradient.unsafeGetTensorImpl());
  }

  /// @param parameter must live until release()
  void guard(const GuardedParameter& parameter) noexcept { guarded_for_.store(&parameter); }
  void release() noexcept { guarded_for_.store(nullptr); }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override;

 private:
  void refuse_while_guarded() const;

  std::atomic<const GuardedParameter*> guarded_for_ = nullptr;
};

/// What to do instead of touching a gradient between backward() and step(): the end of an error
/// message. @param wrapper the class that reduces gradients
std::string right_order(const std::string& wrapper);

/// Number of sparse dimensions of a parameter's gradients, 0 for dense ones; nullopt: not known
/// yet.
using SparseDims = std::optional<std::int64_t>;

/// A parameter whose gradient is reduced, and its gradient on the way: prepare(), submit what it
/// returned, and after that is done complete(). Not thread-safe.
class ReducedParameter {
 public:
  /// @param name as the user calls it  @param group index of the user's group, or -1
  ReducedParameter(std::string name, torch::Tensor parameter, int group = -1)
      : self_{.name = std::move(name)},
        group_(group),
        parameter_(std::move(parameter)),
        result_(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()) {}

  /// What goes before the name that the ranks agree on, and before messages. To be set before
  /// anything is sent.
  void set_scope(const GradientReduction& how);
  const std::string& name() const noexcept { return self_.name; }
  /// As ranks agree on it.
  const std::string& label() const noexcept { return label_; }
  int group() const noexcept { return group_; }
  const torch::Tensor& tensor() const noexcept { return parameter_; }
  /// It may get a gradient.
  bool active() const { return parameter_.requires_grad(); }
  bool has_gradient() const { return parameter_.grad().defined(); }
  /// Of the `.grad` that was sent, or else of the current one.
  SparseDims own_layout() const;
  /// What all ranks keep to; a gradient of another layout is converted. nullopt counts as dense.
  SparseDims agreed_layout() const noexcept { return agreed_; }
  void agree(SparseDims layout) { agreed_ = layout; }

  /// A backward pass has reached the parameter. It need not have left a gradient: a function may
  /// return an undefined one.
  void note_pass() { had_gradient_ = has_gradient(); }
  /// The gradient that the last pass of this cycle has left is gone.
  bool was_reset() const { return had_gradient_ && !has_gradient(); }
  bool had_gradient() const noexcept { return had_gradient_; }

  /// `.grad` is the result of a reduction, and the program has neither reset nor replaced it.
  bool holds_result() const;
  /// The same, and nothing has been written to it since.
  bool holds_untouched_result() const;
  /// Puts a result aside, so that the next reduction does not count it once for each rank. `.grad`
  /// is zeros then; complete() adds to the next result what was put aside. @pre holds_result()
  void keep_result();
  /// The program has reset its gradients.
  void forget_result();

  /// From here to release() `.grad` is not the program's: whoever touches it is noticed. This
  /// object stays where it is as long. @throws UsageError for a gradient with a graph of its own.
  void guard();
  /// @return whether somebody has written to the `.grad` that was guarded, or put another in its
  /// place
  bool release() noexcept;
  /// Whether `.grad` shares its memory with tensors other than `known`, the gradients that autograd
  /// still holds; of those, prepare() sends a copy.
  void note_sharing(at::TensorList known);

  /// The current `.grad`, or zeros if there is none, as an in-place reduction. Several submissions
  /// (of a sparse gradient) belong into one group.
  /// @throws UsageError for a gradient that cannot be sent.
  std::vector<Submission> prepare(const GradientReduction& how);
  /// Where the gradient goes instead of being sent by itself: memory that is reduced with others'.
  /// Undefined: nowhere.
  void set_view(torch::Tensor view) { view_ = std::move(view); }
  const torch::Tensor& view() const noexcept { return view_; }
  /// Brings a `.grad` that is not in flight into the view, so that its own memory is free. Does
  /// nothing to one that is no such tensor.
  /// @pre there is a view
  void move_to_view();
  /// Instead of prepare(): brings the current `.grad` into the view, which becomes `.grad`; zeros
  /// if there is none.
  /// @throws UsageError for a gradient that cannot be sent. @pre there is a view
  void place(const GradientReduction& how);
  /// Instead of prepare(): where the current `.grad` is, to be reduced there with others'; a copy
  /// if it does not lie as the parameter does, and zeros if there is none. Neither reads nor writes
  /// it on the way.
  /// @return elements one behind the other in memory, in the order that strides_for() gives them
  /// @throws UsageError for a gradient that cannot be sent. @pre there is no view
  const torch::Tensor& gather(const GradientReduction& how);

  /// Makes the reduced values the parameter's gradient. `used`: some rank had one. When none had,
  /// or the gradient that was sent has been reset since, `.grad` stays as it is.
  void complete(bool used);
  /// Instead of complete(), after a reduction whose result is not used: a gradient that was reduced
  /// in its place is a result all the same.
  void note_dropped_result();
  /// Forgets the memory without using it.
  void drop();
  /// Forgets what belongs to one cycle.
  void end_cycle();

 private:
  void check_gradient(const GradientReduction& how);
  bool copied_into_view(const torch::Tensor& gradient) const;
  void choose_layout(const GradientReduction& how);
  void choose_sent(const GradientReduction& how);
  bool lies_as_parameter(const torch::Tensor& gradient) const;
  void complete_view(bool used);
  void complete_wire(bool used);
  void note_result();
  void add_kept();
  // Both of sent_.
  Submission prepare_dense(const GradientReduction& how);
  std::vector<Submission> prepare_sparse(const GradientReduction& how);

  GuardedParameter self_;
  std::string label_;
  int group_;
  torch::Tensor parameter_;
  SparseDims agreed_;
  torch::Tensor sent_;     ///< `.grad` at prepare() or gather(); undefined for zeros
  torch::Tensor guarded_;  ///< `.grad` from guard() to release()
  torch::Tensor
      unguarded_;  ///< what was `.grad` before, and will be again; undefined: guarded_ itself
  torch::Tensor expected_;     ///< what has become of guarded_: `.grad`, if nobody has replaced it
  torch::Tensor sample_;       ///< of the values of a sparse guarded_
  std::uint32_t version_ = 0;  ///< of guarded_
  bool shared_ = false;
  bool had_gradient_ = false;
  /// The last result. Weak: a result that the program drops is freed.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> result_;
  std::uint32_t result_version_ = 0;
  torch::Tensor kept_;  ///< see keep_result()
  torch::Tensor view_;
  torch::Tensor wire_;  ///< what is reduced; shares the memory of sent_ where it can
  std::shared_ptr<SparseReduction> sparse_;  ///< instead of wire_
};

}  // namespace hvd::libtorch
