#pragma once

#include <string>
#include <vector>

#include "hvd/process_set.h"

namespace hvd::libtorch {

/// What one rank says of itself.
struct RankStatement {
  std::string error;        ///< why it cannot go on; empty: it can
  std::string description;  ///< what has to be the same on every rank
};

/// Compares the ranks' statements. Collective over the set, which this rank is in; blocks. `what`
/// names it and whose it is, the same on every rank.
/// @throws on every rank, if any has an error or descriptions differ: UsageError with this rank's
/// own error, otherwise MismatchError, which names a rank; and as every collective
void require_agreement(const std::string& what, const RankStatement& own, const ProcessSet& set);

}  // namespace hvd::libtorch
