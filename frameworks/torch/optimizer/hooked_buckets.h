#pragma once

#include <torch/types.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <span>
#include <vector>

#include "hvd/torch/gradient_hook.h"
#include "optimizer/gradient_readiness.h"
#include "optimizer/gradient_units.h"
#include "optimizer/reduced_parameter.h"

namespace hvd::libtorch {

/// Units of gradients that the user's GradientHook reduces instead of hvd. Not thread-safe.
class HookedBuckets {
 public:
  HookedBuckets(const GradientReduction& how, std::span<ReducedParameter> parameters)
      : how_(how), parameters_(parameters) {}

  /// Calls the hook, unless all of the unit is frozen. @param index of the unit
  /// @param readiness gradients that are not handed over are taken as they are now
  void start(std::size_t index, GradientUnit& unit, const GradientReadiness& readiness);
  /// Waits for all that was started, in that order, and makes the results the gradients. @throws
  /// what the hook's functions throw; UsageError for a result of another size
  void finish();
  /// Waits as well, and uses nothing.
  void drop();

 private:
  struct Started {
    BucketGradients bucket;
    std::vector<torch::Tensor> rows;  ///< the members' memory, if it is not that of bucket.values
    std::function<torch::Tensor()> finish;
  };

  std::exception_ptr finish_all(bool use);
  void take_over(const Started& started, const torch::Tensor& result) const;

  const GradientReduction& how_;
  const std::span<ReducedParameter> parameters_;
  std::vector<Started> started_;
};

}  // namespace hvd::libtorch
