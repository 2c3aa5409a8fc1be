#pragma once

#include <optional>
#include <string>
#include <vector>

#include "negotiation/ready_table.h"

namespace hvd::control {

/// Process sets that their members are making alone and that would wait for each other forever.
struct SetDisagreement {
  std::vector<PendingRef> sets = {};
  std::string text = {};  ///< names the ranks and the different sets that they make
};

// Note [Sets that wait for each other]
// A rank makes one set of a name at a time (OperationTable). So a rank that has submitted set B of
// a name submits no other set of this name before B has ended. If set A lacks that rank, A waits
// for B. A cycle of such waits can never end. The ranks on it disagree about the members of a set,
// or about the order of several sets. Without a cycle all sets can be completed in some order, and
// there is no error. A submission closes a cycle, so the search starts at the set of each
// submission, and covers only sets of the same name. All sets of a cycle end in one plan, so that
// no rank tries again in between (MUT_SPLIT in test/models/member_sets.pml).

/// The shortest cycle of sets that wait for each other, of those that contain `last`.
/// @param last a pending add_process_set by its members, to which a rank was added
std::optional<SetDisagreement> find_disagreement(ReadyTable&, PendingRef last);

}  // namespace hvd::control
