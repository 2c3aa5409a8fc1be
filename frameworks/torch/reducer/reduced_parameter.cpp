#include "reducer/reduced_parameter.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/memory.h"
#include "reducer/guarded_gradient.h"
#include "reducer/prefetch.h"
#include "tensors/device_order.h"

namespace hvd::libtorch {

ReduceOp op_of(const GradientReduction& how) {
  return how.op == ReduceOp::kAverage && how.divide_by_size ? ReduceOp::kAverageOfSet : how.op;
}

Submission reduction_in_place(std::string name, const GradientReduction& how, TensorView memory) {
  Submission submission;
  submission.name = std::move(name);
  submission.parameters =
      Allreduce{op_of(how), how.prescale, how.postscale,
                memory.dtype == DataType::kFloat32 ? how.compression : Compression::kNone};
  submission.input = submission.output = std::move(memory);
  submission.process_set = how.process_set.id();
  return submission;
}

Submission scatter_in_place(std::string name, const GradientReduction& how, TensorView memory) {
  Submission submission;
  submission.name = std::move(name);
  submission.parameters = Reducescatter{op_of(how), how.prescale, how.postscale};
  submission.output = memory;
  submission.output.count =
      rows_of_member(memory.count, how.process_set.size(), how.process_set.rank());
  submission.output.shape = {submission.output.count};
  submission.input = std::move(memory);
  submission.process_set = how.process_set.id();
  return submission;
}

Submission reduction_in_place(std::string name, const GradientReduction& how,
                              const torch::Tensor& tensor) {
  Submission submission = reduction_in_place(std::move(name), how, view_of(tensor));
  std::get<Allreduce>(submission.parameters).compression =
      compression_in_core(tensor.scalar_type(), how.compression);
  submission.keep_alive = keep_alive(tensor);
  return submission;
}

std::vector<std::int64_t> strides_for(const torch::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
  std::vector<std::int64_t> strides(static_cast<std::size_t>(parameter.dim()), 1);
  for (std::size_t d = strides.size(); d-- > 1;)
    strides[d - 1] = strides[d] * parameter.size(static_cast<std::int64_t>(d));
  return strides;
}

namespace {

// In bytes. LibTorch makes larger copies, with several threads.
constexpr std::size_t kSmall = std::size_t{64} << 10;

void refuse_graph(const torch::Tensor& gradient, const std::string& name) {
  if (!gradient.requires_grad()) return;
  throw UsageError("gradient '" + name +
                   "' has a graph (backward with create_graph), which would not lead through the "
                   "other ranks; expected one without; call detach_() "
                   "on it, or compute what needs a graph with torch::autograd::grad()");
}

/// A tensor of the same memory that can be detached while the gradient is guarded.
torch::Tensor unguarded(const torch::Tensor& gradient) {
  if (GuardedGradient::find(gradient) == nullptr) return gradient;
  torch::Tensor plain = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(gradient.storage()), gradient.key_set(), gradient.dtype());
  plain.unsafeGetTensorImpl()->set_sizes_and_strides(gradient.sizes(), gradient.strides(),
                                                     gradient.storage_offset());
  return plain;
}

/// Up to 64 values of a sparse gradient, on the host.
torch::Tensor sample_of(const torch::Tensor& coo) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor values = coo.detach()._values().reshape(-1);
  const std::int64_t stride = std::max<std::int64_t>(values.numel() / 64, 1);
  return values.slice(0, 0, std::nullopt, stride).cpu().clone(at::MemoryFormat::Contiguous);
}

/// Compares bits, so that a nan is equal to itself.
bool same_bytes(const torch::Tensor& a, const torch::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

std::uint32_t version_of(const torch::Tensor& tensor) {
  return tensor.is_inference() ? 0
                               : tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace

/// Sets the label, which must differ from the names of hvd's own operations.
void ReducedParameter::set_scope(const GradientReduction& how) {
  static constexpr std::array<std::string_view, 16> kTaken = {
      "add_param_group", "buckets", "check", "checksums", "descriptions", "finite",
      "found_inf",       "layouts", "loss",  "norm",      "open",         "options",
      "order",           "shards",  "used",  "parameters"};
  const bool taken = std::find(kTaken.begin(), kTaken.end(), name()) != kTaken.end();
  label_ = how.scope + (taken ? ".parameter." : ".") + name();
  wrapper_ = how.wrapper;
}

void ReducedParameter::guard() {
  torch::Tensor& gradient = parameter_.mutable_grad();
  if (!gradient.defined()) return;
  refuse_graph(gradient, name());
  if (gradient.layout() == torch::kSparse) {
    sample_ = sample_of(gradient);
  } else if (gradient.layout() == torch::kStrided) {
    if (GuardedGradient::find(gradient) == nullptr) {
      unguarded_ = gradient;
      gradient = GuardedGradient::of(gradient);
    }
    GuardedGradient::find(gradient)->guard(*this);
    version_ = version_of(gradient);
  } else {
    return;
  }
  guarded_ = gradient;
}

bool ReducedParameter::release() noexcept {
  if (!guarded_.defined()) return false;
  torch::Tensor& gradient = parameter_.mutable_grad();
  const bool still_there = gradient.is_same(guarded_);
  // An undefined gradient was dropped, together with its result.
  bool touched = gradient.defined() && !gradient.is_same(expected());
  if (GuardedGradient* const guard = GuardedGradient::find(guarded_)) {
    guard->release();
    touched = touched || (still_there && version_of(guarded_) != version_);
    if (still_there && unguarded_.defined()) gradient = unguarded_;
  } else {
    touched = touched || (still_there && !same_bytes(sample_of(guarded_), sample_));
  }
  guarded_ = unguarded_ = converted_ = sample_ = torch::Tensor();
  return touched;
}

// Autograd gives two parameters gradients in the same memory if they are added without an operation
// in between: a.view(-1) + b.view(-1). References that autograd still holds are not other
// gradients: the summand itself, and its base if only the summand is a view of it (the gradient of
// a Linear's weight is computed transposed).
void ReducedParameter::detect_sharing(at::TensorList known) {
  const torch::Tensor& gradient = this->gradient();
  shared_ = false;
  if (!gradient.defined() || !gradient.has_storage()) return;
  std::size_t explained = 1;
  for (const torch::Tensor& tensor : known) {
    if (!tensor.defined() || tensor.is_same(gradient) || !tensor.has_storage() ||
        !tensor.is_alias_of(gradient))
      continue;
    const bool owns_base = tensor.is_view() && tensor._base().use_count() == 1;
    explained += owns_base ? 2 : 1;
  }
  // The program may have assigned one tensor to two parameters.
  const bool assigned_twice = known.empty() && gradient.use_count() > 1;
  shared_ = gradient.storage().use_count() > explained || assigned_twice;
}

std::span<const std::byte> ReducedParameter::shared_memory() const {
  const torch::Tensor& gradient = this->gradient();
  if (!shared_ || view_.defined() || !gradient.defined() || gradient.layout() != torch::kStrided)
    return {};
  return {static_cast<const std::byte*>(gradient.const_data_ptr()),
          at::detail::computeStorageNbytes(gradient.sizes(), gradient.strides(),
                                           gradient.element_size())};
}

SparseDims ReducedParameter::own_layout() const {
  // `.grad` may have been reset since it was sent.
  if (sent_.defined()) return sent_.layout() == torch::kSparse ? sent_.sparse_dim() : 0;
  const torch::Tensor& gradient = this->gradient();
  if (!gradient.defined()) return std::nullopt;
  return gradient.layout() == torch::kSparse ? gradient.sparse_dim() : 0;
}

/// Converts `.grad` to the layout that the ranks have agreed on or that the options require.
/// @throws UsageError for a layout that the options refuse
void ReducedParameter::choose_layout(const GradientReduction& how) {
  torch::Tensor& gradient = parameter_.mutable_grad();
  const std::int64_t agreed = agreed_.value_or(0);
  if (gradient.layout() == torch::kStrided) {
    if (agreed > 0) gradient = gradient.to_sparse(agreed);
    return;
  }
  const bool coo = gradient.layout() == torch::kSparse;
  if (how.sparse == SparseGradients::kRefuse ||
      (!coo && how.sparse == SparseGradients::kReduceSparse)) {
    throw UsageError(Label{"gradient", label_}.str() + ": expected a dense gradient, got layout " +
                     c10::str(gradient.layout()) + "; convert it with to_dense()");
  }
  if (how.sparse == SparseGradients::kMakeDense || agreed == 0) {
    gradient = gradient.to_dense();
  } else if (gradient.sparse_dim() != agreed) {
    gradient = gradient.to_dense().to_sparse(agreed);
  }
}

void ReducedParameter::check_gradient(const GradientReduction& how) {
  if (!has_gradient()) return;
  const Label label{"gradient", label_};
  refuse_graph(gradient(), label_);
  const bool untouched = guarded_.defined() && gradient().is_same(expected());
  choose_layout(how);
  if (untouched && !gradient().is_same(guarded_)) converted_ = gradient();
  const torch::Tensor& gradient = this->gradient();
  if (gradient.sizes() != parameter_.sizes()) {
    throw UsageError(label.str() + ": expected shape " + shape_to_string(parameter_.sizes().vec()) +
                     ", got " + shape_to_string(gradient.sizes().vec()));
  }
}

/// Copies a small gradient by memcpy(): an operator of LibTorch takes ten times as long. Most
/// gradients of a model are small. @return false for any other gradient, which is not copied
bool ReducedParameter::copied_into_view(const torch::Tensor& gradient) const {
  if (!gradient.defined() || gradient.layout() != torch::kStrided || gradient.is_neg() ||
      gradient._is_zerotensor() || gradient.requires_grad() || !gradient.is_cpu() ||
      !view_.is_cpu() || gradient.nbytes() > kSmall ||
      gradient.scalar_type() != view_.scalar_type() || gradient.sizes() != view_.sizes() ||
      gradient.strides() != view_.strides()) {
    return false;
  }
  if (!gradient.is_same(view_) && gradient.const_data_ptr() != view_memory_) {
    std::memcpy(view_memory_, gradient.const_data_ptr(), gradient.nbytes());
    mark_written(view_);
  }
  return true;
}

void ReducedParameter::set_view(torch::Tensor view) {
  view_ = std::move(view);
  view_memory_ = view_.defined() ? static_cast<std::byte*>(view_.mutable_data_ptr()) : nullptr;
}

void ReducedParameter::prefetch() const noexcept {
  for (const torch::Tensor* const tensor : {&view_, &parameter_})
    prefetch_to_write(tensor->unsafeGetTensorImpl(), sizeof(c10::TensorImpl));
}

void ReducedParameter::prefetch_memory() const noexcept {
  // A core has about this many loads under way at once.
  constexpr std::size_t kMax = 16 * kCacheLine;
  if (view_memory_ == nullptr) return;
  const c10::TensorImpl& parameter = *parameter_.unsafeGetTensorImpl();
  prefetch_to_write(parameter.autograd_meta(), sizeof(torch::autograd::AutogradMeta));
  prefetch_to_write(view_memory_, std::min(view_.nbytes(), kMax));
  // A load whose result is not used: the address of the version is private.
  asm volatile("" : : "r"(version_of(view_)));
}

bool ReducedParameter::take(const torch::Tensor& gradient) {
  if (!view_.defined() || has_gradient() || !copied_into_view(gradient)) return false;
  parameter_.mutable_grad() = view_;
  sent_ = view_;
  return true;
}

/// Writes to the view through another tensor, since the guard counts writes to the view itself.
void ReducedParameter::scale_view() {
  const double factor = sent_factor();
  if (factor == 1) return;
  if (view_.scalar_type() == torch::kFloat32 && view_.is_cpu() && view_.nbytes() <= kSmall &&
      view_.is_non_overlapping_and_dense()) {
    auto* const values = static_cast<float*>(view_.unsafeGetTensorImpl()->mutable_data());
    const auto single = static_cast<float>(factor);
    for (std::int64_t i = 0, count = view_.numel(); i < count; ++i) values[i] *= single;
  } else {
    const torch::NoGradGuard no_grad;
    unguarded(view_).mul_(factor);
  }
  record_scaled_gradient();
}

void ReducedParameter::record_scaled_gradient() {
  if (reference_ > 0) unit_ = reference_;
}

void ReducedParameter::place(const GradientReduction& how) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(view_.defined());
  if (torch::Tensor& gradient = parameter_.mutable_grad(); copied_into_view(gradient)) {
    if (!gradient.is_same(view_)) gradient = view_;
    sent_ = view_;
    scale_view();
    return;
  }
  const torch::NoGradGuard no_grad;
  check_gradient(how);
  torch::Tensor& gradient = parameter_.mutable_grad();
  if (!gradient.defined()) {
    view_.zero_();
  } else if (!gradient.is_set_to(view_)) {
    const double factor = sent_factor();
    if (factor != 1 && gradient.const_data_ptr() != view_.const_data_ptr()) {
      at::mul_out(view_, gradient, torch::scalar_tensor(factor, torch::kFloat64));
      record_scaled_gradient();
    } else if (gradient.const_data_ptr() != view_.const_data_ptr() ||
               gradient.strides() != view_.strides()) {
      view_.copy_(gradient);
    }
    gradient = view_;
  }
  sent_ = gradient;
  if (gradient.defined()) scale_view();
}

void ReducedParameter::choose_sent(const GradientReduction& how) {
  check_gradient(how);
  if (!guarded_.defined()) detect_sharing({});
  sent_ = gradient();
  if (guarded_.defined() && !sent_.is_same(guarded_) && guarded_.layout() == torch::kStrided &&
      agreed_.value_or(0) == 0) {
    sent_ = guarded_;  // the program has replaced the gradient that was marked ready
  }
}

bool ReducedParameter::has_parameter_strides(const torch::Tensor& gradient) const {
  return gradient.layout() == torch::kStrided &&
         gradient.scalar_type() == parameter_.scalar_type() && !gradient.is_neg() &&
         !gradient.is_conj() &&
         (parameter_.is_non_overlapping_and_dense() ? gradient.strides() == parameter_.strides()
                                                    : gradient.is_contiguous());
}

torch::Tensor ReducedParameter::empty_gradient() const {
  return torch::empty_strided(parameter_.sizes(), strides_for(parameter_),
                              parameter_.options().requires_grad(false));
}

const torch::Tensor& ReducedParameter::gather(const GradientReduction& how) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(!view_.defined());
  const torch::NoGradGuard no_grad;
  choose_sent(how);
  if (sent_.defined() && has_parameter_strides(sent_) && !shared_) {
    wire_ = unguarded_.defined() && sent_.is_same(guarded_) ? unguarded_ : sent_;
    if (sent_factor() != 1) unguarded(wire_).mul_(sent_factor());
    record_scaled_gradient();
    return wire_;
  }
  wire_ = empty_gradient();
  if (!sent_.defined()) return wire_.zero_();
  wire_.copy_(unguarded(sent_));
  return sent_factor() == 1 ? wire_ : wire_.mul_(sent_factor());
}

std::vector<Submission> ReducedParameter::prepare(const GradientReduction& how) {
  const torch::NoGradGuard no_grad;
  choose_sent(how);
  if (own_layout().value_or(agreed_.value_or(0)) > 0) return prepare_sparse(how);
  std::vector<Submission> one;
  one.push_back(prepare_dense(how));
  return one;
}

Submission ReducedParameter::prepare_dense(const GradientReduction& how) {
  const Label label{"gradient", label_};
  const auto wire_dtype =
      type_to_cast_to(parameter_.scalar_type(), how.compression).value_or(parameter_.scalar_type());
  if (sent_.defined()) {
    check_tensor(sent_, label, Elements::kAddable);
    const double factor = sent_factor();
    const bool casts = wire_dtype != parameter_.scalar_type();
    torch::Tensor values = packed(unguarded(sent_));
    if (factor != 1 && casts) values = values * factor;  // rounded to 16 bits once
    wire_ = values.to(wire_dtype);
    if (shared_ && wire_.is_alias_of(sent_)) wire_ = wire_.clone();
    if (factor != 1 && !casts) wire_.mul_(factor);
    if (wire_.is_alias_of(sent_)) record_scaled_gradient();
  } else {
    check_tensor(parameter_, label, Elements::kAddable);
    wire_ = torch::zeros(parameter_.sizes(),
                         parameter_.options().dtype(wire_dtype).requires_grad(false));
  }
  Submission submission = reduction_in_place(label_, how, wire_);
  // Memory that ranks share is reduced in place, so a copy into a common buffer would be the most
  // expensive part. Other memory goes through shared memory piece by piece, and the common buffer
  // would be as large as all gradients.
  const bool one_host = local_size() == size();
  // Compressed gradients go through a buffer in any case.
  const bool compressed =
      std::get<Allreduce>(submission.parameters).compression != Compression::kNone;
  const std::size_t sent_bytes = compressed ? wire_.nbytes() / 2 : wire_.nbytes();
  submission.alone = (!compressed && sent_bytes >= kMinUnfusedBytes &&
                      is_shared(wire_.const_data_ptr(), wire_.nbytes())) ||
                     (sent_bytes >= kLargeOnOneHost && one_host && wire_.is_cpu());
  return submission;
}

void ReducedParameter::move_to_view() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(view_.defined());
  const torch::NoGradGuard no_grad;
  torch::Tensor& gradient = parameter_.mutable_grad();
  const bool fits = gradient.defined() && gradient.layout() == torch::kStrided &&
                    gradient.scalar_type() == view_.scalar_type() &&
                    gradient.sizes() == view_.sizes();
  if (!fits) return;
  const bool result = holds_result();
  view_.copy_(gradient);
  gradient = view_;
  if (result) remember_result();
}

std::vector<Submission> ReducedParameter::prepare_sparse(const GradientReduction& how) {
  const torch::Tensor coo =
      sent_.defined() ? sent_
                      : torch::_sparse_coo_tensor_with_dims(
                            *agreed_, parameter_.dim() - *agreed_, parameter_.sizes(),
                            parameter_.options().layout(torch::kSparse).requires_grad(false));
  sparse_ = std::make_shared<SparseReduction>(
      sent_factor() == 1 || !sent_.defined() ? coo : coo * sent_factor(),
      AllreduceOptions{.name = label_,
                       .op = op_of(how),
                       .prescale_factor = how.prescale,
                       .postscale_factor = how.postscale,
                       .compression = how.compression,
                       .process_set = how.process_set});
  return sparse_->take_submissions();
}

/// The result is in the gradient's memory, unless the program has replaced the gradient since.
void ReducedParameter::complete_view(bool used) {
  torch::Tensor& gradient = parameter_.mutable_grad();
  const bool sent = sent_.defined();
  drop();
  if (!gradient.defined()) {
    if (used && !sent) gradient = view_;
  } else if (gradient.layout() != torch::kStrided || !gradient.is_non_overlapping_and_dense()) {
    gradient = view_;
  } else if (!gradient.is_same(view_) && gradient.const_data_ptr() != view_.const_data_ptr()) {
    gradient.detach().copy_(view_);
  }
}

void ReducedParameter::complete(bool used) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(!torch::GradMode::is_enabled());
  view_.defined() ? complete_view(used) : complete_wire(used);
  add_kept();
  remember_result();
}

void ReducedParameter::complete_wire(bool used) {
  torch::Tensor& gradient = parameter_.mutable_grad();
  torch::Tensor wire = sparse_ ? sparse_->result() : wire_;
  if (result_factor_ != 1) wire = wire.to(parameter_.scalar_type()) * result_factor_;
  const torch::Tensor sent = sent_;
  drop();
  used_by_current_stream(wire);
  if (!gradient.defined()) {
    // The result is used if this rank has sent zeros, and another rank a gradient. If this rank has
    // sent a gradient, the program has reset it since.
    // Its strides must be those of the other ranks, because the rounding of an optimizer's step
    // depends on them.
    if (used && !sent.defined())
      gradient = wire.layout() == torch::kStrided && wire.strides() != strides_for(parameter_)
                     ? empty_gradient().copy_(wire)
                     : wire.to(parameter_.scalar_type());
    return;
  }
  if (wire.layout() == torch::kStrided && gradient.is_alias_of(wire)) return;
  if (wire.layout() == torch::kStrided && gradient.layout() == torch::kStrided &&
      gradient.is_non_overlapping_and_dense()) {
    gradient.detach().copy_(wire);
  } else {
    gradient = wire.to(parameter_.scalar_type());
  }
}

bool ReducedParameter::holds_result() const {
  const torch::Tensor& gradient = this->gradient();
  return gradient.defined() && result_._unsafe_get_target() == gradient.unsafeGetTensorImpl();
}

bool ReducedParameter::holds_untouched_result() const {
  return holds_result() && version_of(gradient()) == result_version_;
}

void ReducedParameter::keep_result() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(holds_result());
  const torch::NoGradGuard no_grad;
  torch::Tensor& gradient = parameter_.mutable_grad();
  result_.reset();
  if (gradient.layout() == torch::kStrided) {
    kept_ = gradient.clone();
    gradient.zero_();
  } else {
    kept_ = gradient;
    gradient = torch::zeros_like(gradient);
  }
}

void ReducedParameter::forget_result() {
  result_.reset();
  kept_ = torch::Tensor();
}

void ReducedParameter::remember_result() {
  const torch::Tensor& gradient = this->gradient();
  result_.reset();
  if (!gradient.defined()) return;
  result_ = decltype(result_)(gradient.getIntrusivePtr());
  result_version_ = version_of(gradient);
}

void ReducedParameter::remember_dropped_result() {
  const torch::Tensor& gradient = this->gradient();
  const torch::Tensor& reduced = view_.defined() ? view_ : wire_;
  if (gradient.defined() && reduced.defined() && gradient.layout() == torch::kStrided &&
      gradient.is_alias_of(reduced))
    remember_result();
}

void ReducedParameter::add_kept() {
  if (!kept_.defined()) return;
  const torch::Tensor kept = std::exchange(kept_, torch::Tensor());
  torch::Tensor& gradient = parameter_.mutable_grad();
  if (!gradient.defined()) return;
  if (gradient.layout() == torch::kStrided) {
    gradient.add_(kept);
  } else {
    gradient = kept.is_sparse() ? gradient + kept : kept + gradient;  // dense + sparse
  }
}

void ReducedParameter::drop() {
  sent_ = wire_ = torch::Tensor();
  sparse_.reset();
}

void ReducedParameter::begin_weighted_pass(double weight) {
  const torch::NoGradGuard no_grad;
  torch::Tensor& gradient = parameter_.mutable_grad();
  if (gradient.defined() && unit_ && *unit_ != weight) {
    // Two parameters may have their gradients in the same memory; see detect_sharing().
    const bool own_memory = gradient.layout() == torch::kStrided &&
                            (gradient.is_same(view_) || gradient.storage().use_count() == 1);
    if (own_memory) {
      gradient.mul_(*unit_ / weight);
    } else {
      gradient = gradient * (*unit_ / weight);
    }
  }
  unit_ = weight;
}

void ReducedParameter::weigh(double weight, double reference) {
  const torch::NoGradGuard no_grad;
  reference_ = reference;
  if (!unit_) unit_ = weight;
  if (view_.defined() && sent_.defined()) scale_view();  // it was placed already
}

torch::Tensor ReducedParameter::dense_wire() const {
  const bool scalable = wire_.defined() && wire_.scalar_type() == parameter_.scalar_type();
  return scalable ? unguarded(wire_) : torch::Tensor();
}

void ReducedParameter::end_cycle() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(!torch::GradMode::is_enabled());
  unit_.reset();
  reference_ = 0;
  result_factor_ = 1;
  release();
  drop();
  had_gradient_ = false;
  add_kept();
}

}  // namespace hvd::libtorch
