#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/process_set.h"
#include "hvd/types.h"
#include "operations/sparse.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {

/// What becomes of sparse gradients.
enum class SparseGradients { kRefuse, kMakeDense, kReduceSparse };

/// How gradients are reduced. The same for all of one optimizer.
struct GradientReduction {
  std::string scope = {};  ///< goes before every name that ranks agree on
  ReduceOp op = ReduceOp::kAverage;
  double prescale = 1;
  double postscale = 1;
  Compression compression = Compression::kNone;
  ProcessSet process_set = {};
  SparseGradients sparse = SparseGradients::kRefuse;
  bool bucket_views = false;
  int check_every = 0;  ///< see ParameterCheck
};

/// Copying less than this into a common buffer costs less than another call of the backend. In
/// bytes.
inline constexpr std::size_t kWorthACallOfItsOwn = std::size_t{128} << 10;
/// From here on a tensor is not fused within one host, wherever it lies. In bytes.
inline constexpr std::size_t kLargeOnOneHost = std::size_t{256} << 10;

/// An allreduce of `memory` in its own place, which the core compresses if it can. The caller sets
/// keep_alive.
Submission reduction_in_place(std::string name, const GradientReduction& how, TensorView memory);

/// A gradient's strides in a bucket: the parameter's, if those leave no gaps.
std::vector<std::int64_t> strides_for(const torch::Tensor& parameter);

/// Number of sparse dimensions of a parameter's gradients, 0 for dense ones; nullopt: not known
/// yet.
using SparseDims = std::optional<std::int64_t>;

/// One parameter's gradient on its way through a reduction: prepare(), submit what it returned, and
/// after that is done complete(). Not thread-safe.
class GradientTransfer {
 public:
  GradientTransfer() = default;
  explicit GradientTransfer(torch::Tensor parameter) : parameter_(std::move(parameter)) {}

  const torch::Tensor& parameter() const noexcept { return parameter_; }
  bool has_gradient() const { return parameter_.grad().defined(); }
  /// Of the `.grad` that was sent, or else of the current one.
  SparseDims own_layout() const;
  /// What all ranks keep to; a gradient of another layout is converted. nullopt counts as dense.
  SparseDims agreed_layout() const noexcept { return agreed_; }
  void agree(SparseDims layout) { agreed_ = layout; }

  /// From here to release() `.grad` is not the program's: whoever touches it is noticed. @param
  /// name what the user calls the parameter; must live as long. @throws UsageError for a gradient
  /// with a graph of its own.
  void guard(const std::string& name);
  /// @return whether somebody has written to the `.grad` that was guarded
  bool release() noexcept;
  /// Whether `.grad` shares its memory with tensors other than `known`, the gradients that autograd
  /// still holds; of those, prepare() sends a copy.
  void note_sharing(at::TensorList known);

  /// The current `.grad`, or zeros if there is none, as an in-place reduction. Several submissions
  /// (of a sparse gradient) belong into one group.
  /// @throws UsageError for a gradient that cannot be sent.
  std::vector<Submission> prepare(const std::string& name, const GradientReduction& how);
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
  void place(const std::string& name, const GradientReduction& how);
  /// Instead of prepare(): where the current `.grad` is, to be reduced there with others'; a copy
  /// if it does not lie as the parameter does, and zeros if there is none. Neither reads nor writes
  /// it on the way.
  /// @return elements one behind the other in memory, in the order that strides_for() gives them
  /// @throws UsageError for a gradient that cannot be sent. @pre there is no view
  const torch::Tensor& gather(const std::string& name, const GradientReduction& how);

  /// Makes the reduced values the parameter's gradient. `used`: some rank had one. When none had,
  /// or the gradient that was sent has been reset since, `.grad` stays as it is.
  void complete(bool used);
  /// Forgets the memory without using it.
  void drop();

 private:
  void check_gradient(const std::string& name, const GradientReduction& how);
  bool copied_into_view(const torch::Tensor& gradient) const;
  void choose_layout(const Label& label, const GradientReduction& how);
  void choose_sent(const std::string& name, const GradientReduction& how);
  bool lies_as_parameter(const torch::Tensor& gradient) const;
  void complete_view(bool used);
  // Both of sent_.
  Submission prepare_dense(const std::string& name, const GradientReduction& how);
  std::vector<Submission> prepare_sparse(const std::string& name, const GradientReduction& how);

  torch::Tensor parameter_;
  SparseDims agreed_;
  torch::Tensor sent_;     ///< `.grad` at prepare() or gather(); undefined for zeros
  torch::Tensor guarded_;  ///< `.grad` from guard() to release()
  torch::Tensor
      unguarded_;  ///< what was `.grad` before, and will be again; undefined: guarded_ itself
  torch::Tensor sample_;       ///< of the values of a sparse guarded_
  std::uint32_t version_ = 0;  ///< of guarded_
  bool shared_ = false;
  torch::Tensor view_;
  torch::Tensor wire_;  ///< what is reduced; shares the memory of sent_ where it can
  std::shared_ptr<SparseReduction> sparse_;  ///< instead of wire_
};

/// Which parameters have a gradient on some rank: one number each, reduced along with the gradients
/// (same dtype and factors, so that it is fused with them). Behind them is room for numbers of
/// others, which are reduced too.
class UsedFlags {
 public:
  /// @param like a parameter of the set  @param used whether this rank has a gradient of the
  /// parameter with that number
  /// @param room how many numbers of others, which `fill` writes
  /// @return valid until the next prepare()
  const Submission& prepare(const GradientReduction& how, const torch::Tensor& like,
                            std::size_t count, const std::function<bool(std::size_t)>& used,
                            std::size_t room = 0,
                            const std::function<void(std::span<float>)>& fill = {});
  /// Once what prepare() returned is done.
  void read();
  /// Some rank has a gradient of it. @pre read()
  bool used(std::size_t parameter) const {
    return values_.const_data_ptr<float>()[parameter] != 0.0F;
  }
  /// The others' numbers, reduced. @pre read()
  std::span<const float> room() const;

 private:
  std::size_t count_ = 0;
  torch::Tensor values_;  ///< float32
  torch::Tensor flags_;   ///< of the dtype in which they travel; may be values_
  Submission submission_;
};

}  // namespace hvd::libtorch
