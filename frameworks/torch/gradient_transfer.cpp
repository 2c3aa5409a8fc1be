#include "gradient_transfer.h"

#include <utility>
#include <vector>

#include "hvd/error.h"

namespace hvd::libtorch {
namespace {

Submission in_place(std::string name, const GradientReduction& how, const torch::Tensor& wire) {
  Submission submission;
  submission.name = std::move(name);
  submission.kind = OpKind::kAllreduce;
  submission.op = how.op;
  submission.input = submission.output = view_of(wire);
  submission.prescale = how.prescale;
  submission.postscale = how.postscale;
  submission.process_set = how.process_set.id();
  submission.keep_alive = keep_alive({wire});
  return submission;
}

}  // namespace

SparseDims GradientTransfer::own_layout() const {
  // What was sent counts, though `.grad` may have been reset since.
  if (sent_.defined()) return sent_.layout() == torch::kSparse ? sent_.sparse_dim() : 0;
  const torch::Tensor& gradient = parameter_.grad();
  if (!gradient.defined()) return std::nullopt;
  return gradient.layout() == torch::kSparse ? gradient.sparse_dim() : 0;
}

/// Converts a `.grad` that is not as the ranks have agreed or the user wants it.
void GradientTransfer::choose_layout(const Label& label, const GradientReduction& how) {
  torch::Tensor& gradient = parameter_.mutable_grad();
  const std::int64_t agreed = agreed_.value_or(0);
  if (gradient.layout() == torch::kStrided) {
    if (agreed > 0) gradient = gradient.to_sparse(agreed);
    return;
  }
  const bool coo = gradient.layout() == torch::kSparse;
  if (how.sparse == SparseGradients::kRefuse ||
      (!coo && how.sparse == SparseGradients::kReduceSparse)) {
    throw UsageError(label.str() + ": expected a dense gradient, got layout " +
                     c10::str(gradient.layout()) + "; convert it with to_dense()");
  }
  if (how.sparse == SparseGradients::kMakeDense || agreed == 0) {
    gradient = gradient.to_dense();
  } else if (gradient.sparse_dim() != agreed) {
    gradient = gradient.to_dense().to_sparse(agreed);
  }
}

std::vector<Submission> GradientTransfer::prepare(const std::string& name,
                                                  const GradientReduction& how) {
  const torch::NoGradGuard no_grad;
  const Label label{"gradient", name};
  if (has_gradient()) {
    choose_layout(label, how);
    const torch::Tensor& gradient = parameter_.grad();
    if (gradient.sizes() != parameter_.sizes()) {
      throw UsageError(label.str() + ": expected shape " +
                       shape_to_string(parameter_.sizes().vec()) + ", got " +
                       shape_to_string(gradient.sizes().vec()));
    }
  }
  sent_ = parameter_.grad();
  if (own_layout().value_or(agreed_.value_or(0)) > 0) return prepare_sparse(name, how);
  std::vector<Submission> one;
  one.push_back(prepare_dense(name, how));
  return one;
}

Submission GradientTransfer::prepare_dense(const std::string& name, const GradientReduction& how) {
  const Label label{"gradient", name};
  const auto wire_dtype =
      wire_type(parameter_.scalar_type(), how.compression).value_or(parameter_.scalar_type());
  if (sent_.defined()) {
    check_tensor(sent_, label);
    wire_ = packed(sent_).to(wire_dtype);
  } else {
    check_tensor(parameter_, label);
    wire_ = torch::zeros(parameter_.sizes(),
                         parameter_.options().dtype(wire_dtype).requires_grad(false));
  }
  return in_place(name, how, wire_);
}

std::vector<Submission> GradientTransfer::prepare_sparse(const std::string& name,
                                                         const GradientReduction& how) {
  const torch::Tensor coo =
      sent_.defined() ? sent_
                      : torch::_sparse_coo_tensor_with_dims(
                            *agreed_, parameter_.dim() - *agreed_, parameter_.sizes(),
                            parameter_.options().layout(torch::kSparse).requires_grad(false));
  sparse_ =
      std::make_shared<SparseReduction>(coo, AllreduceOptions{.name = name,
                                                              .op = how.op,
                                                              .prescale_factor = how.prescale,
                                                              .postscale_factor = how.postscale,
                                                              .compression = how.compression,
                                                              .process_set = how.process_set});
  return sparse_->take_submissions();
}

void GradientTransfer::complete(bool used) {
  const torch::NoGradGuard no_grad;
  torch::Tensor& gradient = parameter_.mutable_grad();
  const torch::Tensor wire = sparse_ ? sparse_->result() : wire_;
  const torch::Tensor sent = sent_;
  drop();
  if (!gradient.defined()) {
    // Zeros stood in for a gradient that another rank has; one that was sent and is gone now was
    // reset by the user.
    if (used && !sent.defined()) gradient = wire.to(parameter_.scalar_type());
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

void GradientTransfer::drop() {
  sent_ = wire_ = torch::Tensor();
  sparse_.reset();
}

Submission UsedFlags::prepare(std::string name, const GradientReduction& how,
                              const std::vector<bool>& used, const torch::Tensor& like) {
  const auto own = is_supported(like.scalar_type()) ? like.scalar_type() : torch::kFloat32;
  const auto dtype = wire_type(own, how.compression).value_or(own);
  std::vector<float> values(used.begin(), used.end());
  flags_ = torch::tensor(values, torch::kFloat32).to(dtype);
  GradientReduction reduction = how;
  if (how.op == ReduceOp::kAdasum) reduction.op = ReduceOp::kSum;
  return in_place(std::move(name), reduction, flags_);
}

std::vector<bool> UsedFlags::read() const {
  const torch::Tensor values = flags_.to(torch::kFloat32);
  const auto* data = values.const_data_ptr<float>();
  std::vector<bool> used(static_cast<std::size_t>(values.numel()));
  for (std::size_t i = 0; i < used.size(); ++i) used[i] = data[i] != 0.0F;
  return used;
}

}  // namespace hvd::libtorch
