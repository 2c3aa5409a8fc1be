#include "gradient_transfer.h"

#include <utility>
#include <vector>

#include "hvd/error.h"
#include "tensor_adapter.h"

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
  submission.process_set = how.process_set;
  submission.keep_alive = keep_alive({wire});
  return submission;
}

}  // namespace

Submission GradientTransfer::prepare(std::string name, const GradientReduction& how) {
  const torch::NoGradGuard no_grad;
  const Label label{"gradient", name};
  const auto wire_dtype =
      wire_type(parameter_.scalar_type(), how.compression).value_or(parameter_.scalar_type());
  torch::Tensor& gradient = parameter_.mutable_grad();
  if (gradient.defined() && gradient.layout() != torch::kStrided) {
    if (!how.sparse_as_dense) {
      throw UsageError(
          label.str() + ": expected a dense gradient, got layout " + c10::str(gradient.layout()) +
          "; set DistributedOptimizerOptions::sparse_as_dense or convert it with to_dense()");
    }
    gradient = gradient.to_dense();
  }
  if (gradient.defined()) {
    check_tensor(gradient, label);
    if (gradient.sizes() != parameter_.sizes()) {
      throw UsageError(label.str() + ": expected shape " +
                       shape_to_string(parameter_.sizes().vec()) + ", got " +
                       shape_to_string(gradient.sizes().vec()));
    }
    sent_ = gradient;
    wire_ = packed(gradient).to(wire_dtype);
  } else {
    check_tensor(parameter_, label);
    sent_ = torch::Tensor();
    wire_ = torch::zeros(parameter_.sizes(),
                         parameter_.options().dtype(wire_dtype).requires_grad(false));
  }
  return in_place(std::move(name), how, wire_);
}

void GradientTransfer::complete(bool used) {
  const torch::NoGradGuard no_grad;
  torch::Tensor& gradient = parameter_.mutable_grad();
  const torch::Tensor wire = std::exchange(wire_, torch::Tensor());
  const torch::Tensor sent = std::exchange(sent_, torch::Tensor());
  if (!gradient.defined()) {
    // Zeros stood in for a gradient that another rank has; one that was sent and is gone now was
    // reset by the user.
    if (used && !sent.defined()) gradient = wire.to(parameter_.scalar_type());
    return;
  }
  if (gradient.is_alias_of(wire)) return;
  if (gradient.layout() == torch::kStrided && gradient.is_non_overlapping_and_dense()) {
    gradient.detach().copy_(wire);
  } else {
    gradient = wire.to(parameter_.scalar_type());
  }
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
