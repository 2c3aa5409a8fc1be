#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace hvd::libtorch {

/// The options of LibTorch's optimizer types by name: "learning rate 0.1, betas (0.9, 0.999), ...".
/// Two texts are equal if and only if all options are. Of another type the learning rate and a
/// number for what it serializes; a type that cannot be serialized, or has no learning rate, says
/// so and is equal to itself.
std::string text_of(const torch::optim::OptimizerOptions& options);

/// A line for each parameter group: "parameter group 0 with learning rate 0.1, ...".
std::vector<std::string> group_lines(const torch::optim::Optimizer& optimizer);

}  // namespace hvd::libtorch
