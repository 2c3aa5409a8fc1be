#pragma once

namespace hvd::libtorch {

/// How many DistributedOptimizers with the default average exist in this process. Thread-safe.
int averaging_optimizers() noexcept;

}  // namespace hvd::libtorch
