#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/parameters.h"
#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {

/// @param who name of the wrapper, which begins messages
/// @throws UsageError for an option that is out of range.
void check_options(const DistributedOptimizerOptions& options, const std::string& who);

GradientReduction reduction_of(const DistributedOptimizerOptions& options, std::string scope);

/// The user's group of each parameter, by name. @throws UsageError for a name that occurs twice
std::map<std::string, int> groups_by_name(const std::vector<std::vector<std::string>>& groups,
                                          const std::string& who);

/// A guard that adds one to `depth` until its last copy is destroyed.
std::shared_ptr<const void> counted_scope(std::shared_ptr<std::atomic<int>> depth);

/// @param who name of the wrapper, which begins messages
/// @throws UsageError for a module without parameters.
NamedParameters named_parameters_of(const torch::nn::Module& module, const std::string& who);
NamedParameters named_parameters_of(const torch::jit::Module& module, const std::string& who);

/// The running mean and variance of every BatchNorm layer that has them, by the buffer's name.
/// @param buffers of a module
std::vector<std::pair<std::string, torch::Tensor>> batch_norm_statistics(
    const NamedParameters& buffers);

/// Returns `known` and the optimizer's other parameters, which are named by their positions:
/// "param3".
NamedParameters numbered(const torch::optim::Optimizer& optimizer, NamedParameters known);

/// The optimizer's parameters in its own order, each once, with their names.
/// @param groups names of parameters that are reduced together
/// @throws UsageError if a parameter has no name, or a group contains an unknown name.
std::vector<ReducedParameter> name_parameters(const torch::optim::Optimizer& optimizer,
                                              const NamedParameters& named,
                                              const std::vector<std::vector<std::string>>& groups,
                                              const std::string& who);

}  // namespace hvd::libtorch
