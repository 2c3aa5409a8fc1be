#pragma once

#include <torch/types.h>

#include <string>

#include "hvd/collectives.h"
#include "hvd/process_set.h"
#include "hvd/types.h"

namespace hvd::libtorch {

/// How gradients are reduced. The same for all of one optimizer.
struct GradientReduction {
  ReduceOp op = ReduceOp::kAverage;
  double prescale = 1;
  double postscale = 1;
  Compression compression = Compression::kNone;
  int process_set = 0;
  bool sparse_as_dense = false;
};

/// One parameter's gradient on its way through an allreduce: prepare(), submit what it returned,
/// and after that is done complete(). Not thread-safe.
class GradientTransfer {
 public:
  GradientTransfer() = default;
  explicit GradientTransfer(torch::Tensor parameter) : parameter_(std::move(parameter)) {}

  const torch::Tensor& parameter() const noexcept { return parameter_; }
  bool has_gradient() const { return parameter_.grad().defined(); }

  /// The current `.grad`, or zeros if there is none, as an in-place reduction.
  /// @throws UsageError for a gradient that cannot be sent.
  Submission prepare(std::string name, const GradientReduction& how);
  /// Makes the reduced values the parameter's gradient. `used`: some rank had one. When none had,
  /// or the gradient that was sent has been reset since, `.grad` stays as it is.
  void complete(bool used);
  /// Forgets the memory without using it.
  void drop() { sent_ = wire_ = torch::Tensor(); }

 private:
  torch::Tensor parameter_;
  torch::Tensor sent_;  ///< `.grad` at prepare(); undefined for zeros
  torch::Tensor wire_;  ///< what is reduced; shares the memory of sent_ where it can
};

/// Which parameters have a gradient on some rank: one number each, reduced along with the gradients
/// (same dtype and factors, so that it is fused with them).
class UsedFlags {
 public:
  /// `like`: a parameter of the set.
  Submission prepare(std::string name, const GradientReduction& how, const std::vector<bool>& used,
                     const torch::Tensor& like);
  std::vector<bool> read() const;

 private:
  torch::Tensor flags_;
};

}  // namespace hvd::libtorch
