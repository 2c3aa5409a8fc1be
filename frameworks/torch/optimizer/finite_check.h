#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "optimizer/gradient_reduction.h"
#include "optimizer/reduced_parameter.h"

namespace hvd::libtorch {

/// Finds out which rank has an inf or a nan in a gradient before the gradients of all ranks are
/// reduced, after which all ranks have it. Reads every gradient, and sends a number for each rank
/// and cycle: for DistributedOptimizerOptions::error_if_nonfinite only. Not thread-safe.
class FiniteCheck {
 public:
  explicit FiniteCheck(const GradientReduction& how) : how_(how) {}

  /// This rank's own gradient, before anything is sent of it. Undefined ones are finite.
  void look_at(std::size_t parameter, const torch::Tensor& gradient);
  /// Collective over the set. @return which ranks have found what since end_cycle(), the same on
  /// every rank; empty when all gradients were finite
  std::string difference(std::span<const ReducedParameter> parameters) const;
  void end_cycle() { found_.reset(); }

 private:
  struct Found {
    std::size_t parameter;
    bool nan;
  };

  const GradientReduction& how_;
  std::optional<Found> found_;  ///< the first of this cycle
};

}  // namespace hvd::libtorch
