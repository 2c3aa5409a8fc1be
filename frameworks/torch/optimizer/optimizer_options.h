#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "hvd/torch/distributed_optimizer.h"
#include "optimizer/gradient_reduction.h"

namespace hvd::libtorch {

/// @param who begins messages  @throws UsageError for an option that is out of range.
void check_options(const DistributedOptimizerOptions& options, const std::string& who);

GradientReduction reduction_of(const DistributedOptimizerOptions& options, std::string scope);

/// Counts itself in `depth` for as long as anybody holds it.
std::shared_ptr<const void> counted_scope(std::shared_ptr<std::atomic<int>> depth);

}  // namespace hvd::libtorch
