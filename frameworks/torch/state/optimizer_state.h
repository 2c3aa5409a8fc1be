#pragma once

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/torch/object.h"

namespace hvd::libtorch {

// If these functions are called with a wrapper, they use the optimizer that it wraps.

/// The wrapped optimizer, or the optimizer itself. Options that were written to it are then visible
/// in the wrapper.
torch::optim::Optimizer& unwrapped(torch::optim::Optimizer& optimizer);

/// @param what begins the error text @throws UsageError for an optimizer that a ShardedOptimizer
/// wraps, since its state is in the wrapper
void refuse_sharded(const torch::optim::Optimizer& optimizer, const std::string& what);

/// An optimizer's type and the shapes of the parameters of each group. One optimizer can load
/// another's state if these are equal.
using OptimizerLayout = std::pair<std::string, std::vector<std::vector<std::vector<std::int64_t>>>>;

OptimizerLayout layout_of(torch::optim::Optimizer& optimizer);

/// The first difference as a text; empty if the layouts are equal. @param whose describes
/// `expected`, such as "the root's"
std::string difference(const OptimizerLayout& expected, const OptimizerLayout& got,
                       const std::string& whose);

/// LibTorch's archive of state, options of each group and defaults.
std::string save_optimizer(torch::optim::Optimizer& optimizer);
/// Appends the same archive.
void save_optimizer(torch::optim::Optimizer& optimizer, ObjectWriter& writer);
/// An estimate of the archive's bytes, for optimizers whose state hvd supports; otherwise 0.
std::size_t saved_bytes(torch::optim::Optimizer& optimizer);

/// @throws UsageError when the optimizer's parameters are on several devices; c10::Error for
/// another layout, in which case the optimizer may have changed
void load_optimizer(torch::optim::Optimizer& optimizer, std::string_view bytes);

}  // namespace hvd::libtorch
