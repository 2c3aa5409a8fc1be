#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hvd/process_set.h"

namespace hvd {

/// @addtogroup train
/// @{

/// Gradients that a GradientHook reduces together.
struct BucketGradients {
  /// This rank's own gradients one after the other, with zeros for parameters without a gradient:
  /// [elements], of the parameters' dtype, on their device. The hook may write to it until it has
  /// returned the result. The memory may differ from step to step.
  torch::Tensor values;
  /// A name for operations, the same on every rank and different for each bucket.
  std::string name;
  /// Number of the bucket, in the order of the calls of a step.
  std::size_t index = 0;
  /// Names of the parameters.
  std::vector<std::string> parameters;
  /// Position of each parameter's first element. Elements between gradients are zero.
  std::vector<std::int64_t> first;
  ProcessSet process_set;
};

/// Starts the reduction of gradients over the ranks in place of hvd, for example with the program's
/// own compression. Returns a function that waits and returns the reduced gradients, a tensor with
/// as many elements:
///
///     options.gradient_hook = [](const hvd::BucketGradients& bucket) {
///       hvd::Handle sum = hvd::allreduce_async(bucket.values.to(torch::kFloat16),
///           {.name = bucket.name, .process_set = bucket.process_set});
///       return [sum]() mutable { return sum.wait().to(torch::kFloat32); };
///     };
///
/// In each step the hook is called once for each bucket, and each returned function once, in the
/// same order on every rank. Both may therefore call any operation of hvd by name. Operations that
/// the hook begins run while backward continues; those of the returned function do not.
///
/// The thread of backward() that completes a bucket calls the hook, one bucket at a time. step() or
/// synchronize() calls it for the remaining buckets, in the first step for all buckets. In the
/// first step, and after parameters were frozen or added, each gradient is a separate bucket. The
/// returned functions are called by step() or synchronize(), or when gradients are dropped
/// (zero_grad()). Autograd does not record during these calls. Neither function may call the
/// DistributedOptimizer.
///
/// backward() or step() throws the hook's exception on this rank; after backward() has thrown,
/// step() calls the hook again. Other ranks wait for the operations that this rank has not
/// submitted, and get a StalledError. A result with another number of elements is a UsageError.
using GradientHook = std::function<std::function<torch::Tensor()>(const BucketGradients&)>;

/// @}

}  // namespace hvd
