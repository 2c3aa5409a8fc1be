#include "hvd/torch/metric.h"

#include <cmath>
#include <limits>
#include <utility>

#include "hvd/error.h"
#include "hvd/torch/operations.h"

namespace hvd {

Metric::Metric(std::string name, Kind kind, ProcessSet process_set)
    : name_(std::move(name)), kind_(kind), process_set_(std::move(process_set)) {
  if (name_.empty()) throw UsageError("Metric: expected a name, the same on every rank");
}

void Metric::update(double value, double weight) {
  update(torch::scalar_tensor(value, torch::kFloat64), weight);
}

void Metric::update(const torch::Tensor& values, double weight) {
  const std::string who = "Metric '" + name_ + "'";
  if (!values.defined() || values.is_complex())
    throw UsageError(who + ": expected a tensor of real numbers, got " +
                     (values.defined() ? "complex ones" : "an undefined one"));
  if (!(weight >= 0) || !std::isfinite(weight)) {
    throw UsageError(who + ": expected a weight that is finite and not negative, got " +
                     std::to_string(weight));
  }
  if (values.numel() == 0 || weight == 0) return;
  const torch::NoGradGuard no_grad;
  const torch::Tensor wide = values.detach().to(torch::kFloat64);
  torch::Tensor own;
  if (extreme()) {
    own = kind_ == Kind::kMin ? wide.min() : wide.neg().min();
  } else {
    own = wide.sum() * weight;
  }
  if (!total_.defined()) {
    total_ = own;
  } else {
    own = own.to(total_.device());
    total_ = extreme() ? torch::minimum(total_, own) : total_ + own;
  }
  weight_ += weight * static_cast<double>(values.numel());
}

double Metric::compute() const {
  const double neutral = extreme() ? std::numeric_limits<double>::infinity() : 0.0;
  double own = total_.defined() ? total_.item<double>() : neutral;
  // The order of a number and a NaN is unspecified, so NaNs are sent separately.
  double beside = weight_;
  if (extreme()) {
    beside = std::isnan(own) ? -1 : 0;
    if (std::isnan(own)) own = neutral;
  }
  const torch::Tensor all = allreduce(torch::tensor({own, beside}, torch::kFloat64),
                                      {.name = "metric." + name_,
                                       .op = extreme() ? ReduceOp::kMin : ReduceOp::kSum,
                                       .process_set = process_set_});
  const double result = all[0].item<double>();
  beside = all[1].item<double>();
  switch (kind_) {
    case Kind::kMean:
      return result / beside;
    case Kind::kSum:
      return result;
    default:
      if (beside < 0) return std::numeric_limits<double>::quiet_NaN();
      return kind_ == Kind::kMin ? result : -result;
  }
}

void Metric::reset() {
  total_ = torch::Tensor();
  weight_ = 0;
}

}  // namespace hvd
