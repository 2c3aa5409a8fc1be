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

// A wrapper stands for the optimizer that it wraps.

/// The optimizer that has the state; a wrapper then sees the options that were written to it.
torch::optim::Optimizer& unwrapped(torch::optim::Optimizer& optimizer);

/// @throws UsageError for an optimizer whose state a ShardedOptimizer has shared out: there is none
/// in it. @param what begins the message
void refuse_sharded(const torch::optim::Optimizer& optimizer, const std::string& what);

/// An optimizer's type and the shapes of the parameters of each of its groups: what must agree for
/// one optimizer's state to be another's.
using OptimizerLayout = std::pair<std::string, std::vector<std::vector<std::vector<std::int64_t>>>>;

OptimizerLayout layout_of(torch::optim::Optimizer& optimizer);

/// The first difference; empty if there is none. @param whose `expected` is, such as "the root's"
std::string difference(const OptimizerLayout& expected, const OptimizerLayout& got,
                       const std::string& whose);

/// State, options of each group and defaults.
std::string save_optimizer(torch::optim::Optimizer& optimizer);
/// Appends the same.
void save_optimizer(torch::optim::Optimizer& optimizer, ObjectWriter& writer);
/// About as many bytes, of types whose state is known to hvd; 0 of others.
std::size_t saved_bytes(torch::optim::Optimizer& optimizer);

/// @throws UsageError when the optimizer's parameters are on several devices; c10::Error when the
/// bytes are of an optimizer with another layout, which may then have changed.
void load_optimizer(torch::optim::Optimizer& optimizer, std::string_view bytes);

}  // namespace hvd::libtorch
