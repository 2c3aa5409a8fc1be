#pragma once

#include <string>
#include <vector>

#include "hvd/process_set.h"

namespace hvd::libtorch {

/// The statement of one rank for a comparison.
struct RankStatement {
  std::string error;        ///< the rank's error; empty if it has no error
  std::string description;  ///< must be equal on all ranks
};

/// Compares the ranks' statements. Collective over the set, of which this rank is a member; blocks.
/// @param what the name of the operation, the same on every rank @throws on every rank, if any rank
/// has an error or descriptions differ: UsageError with this rank's own error, otherwise
/// MismatchError, which names a rank; and as every collective
void require_agreement(const std::string& what, const RankStatement& own, const ProcessSet& set);

}  // namespace hvd::libtorch
