#pragma once

#include <span>
#include <string>
#include <vector>

#include "hvd/process_set.h"
#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {

/// Whether all ranks of the set add the same parameters to an optimizer. Collective: a rank that
/// cannot add its own says so here.
/// @param who begins messages  @param scope the optimizer's  @param complaint why this rank cannot;
/// empty: it can
/// @throws UsageError with this rank's complaint; MismatchError for one of another rank, and on all
/// for the first difference.
void agree_on_addition(const std::string& who, const std::string& scope,
                       const ProcessSet& process_set, const std::string& complaint,
                       std::span<const ReducedParameter> added);

}  // namespace hvd::libtorch
