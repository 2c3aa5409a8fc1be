#pragma once

#include <torch/optim/optimizer.h>

#include <span>
#include <string>

#include "hvd/process_set.h"
#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {

/// Whether all ranks of the set are about to share out the same: type of optimizer, groups with
/// their options, parameters. Collective: a rank that cannot do its part says so here.
/// @param scope the optimizer's  @param complaint why this rank cannot; empty: it can
/// @throws UsageError with this rank's complaint; MismatchError for one of another rank, and on all
/// for the first difference.
void agree_on_shards(const std::string& scope, const ProcessSet& process_set,
                     const std::string& complaint, const torch::optim::Optimizer& optimizer,
                     std::span<const ReducedParameter> parameters);

}  // namespace hvd::libtorch
