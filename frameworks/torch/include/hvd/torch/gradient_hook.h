#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hvd/process_set.h"

namespace hvd {

/// Gradients that travel together, as a GradientHook gets them.
struct BucketGradients {
  /// This rank's own gradients one behind the other, zeros for what has none: [elements], in the
  /// parameters' type, on their device. May be written to until the result is there; it is other
  /// memory in another step.
  torch::Tensor values;
  /// The same on every rank, and another one for each bucket: to name operations by.
  std::string name;
  /// Of the bucket, in the order of the calls of a step.
  std::size_t index = 0;
  std::vector<std::string> parameters;
  /// Of each parameter, the position of its first element. What lies between is zero.
  std::vector<std::int64_t> first;
  ProcessSet process_set;
};

/// Begins to reduce gradients over the ranks, in place of hvd: a compression of the program's own.
/// Returns a function that waits and returns the reduced gradients, of as many elements:
///
///     options.gradient_hook = [](const hvd::BucketGradients& bucket) {
///       hvd::Handle sum = hvd::allreduce_async(bucket.values.to(torch::kFloat16),
///           {.name = bucket.name, .process_set = bucket.process_set});
///       return [sum]() mutable { return sum.wait().to(torch::kFloat32); };
///     };
///
/// In each step it is called once for each bucket, and so is each function that it returned, on
/// every rank in the same order: so both may call any operation of hvd's, with names. What it
/// begins runs while backward goes on; what the returned function begins does not.
///
/// It is called by the thread of backward() that completes the bucket (not two at a time), and by
/// step() or synchronize() for what is left: in the first step for all, where each gradient is a
/// bucket of its own, and again whenever parameters were frozen or added. The returned functions
/// are called by step() or synchronize(), or where gradients are dropped (zero_grad()). Autograd
/// records nothing meanwhile. None of them may call the DistributedOptimizer.
///
/// What it throws, backward() or step() throws on this rank; after backward() has thrown, step()
/// calls it again. Other ranks wait for operations that this one has left out, and get a
/// StalledError. A result without as many elements is a UsageError.
using GradientHook = std::function<std::function<torch::Tensor()>(const BucketGradients&)>;

}  // namespace hvd
