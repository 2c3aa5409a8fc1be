#pragma once

#include <hvd/collectives.h>

#include <memory>
#include <string>
#include <vector>

#include "fault/campaign_plan.h"
#include "support/program_operation.h"

/// The operations of a step, and their expected results.
namespace hvd::campaign {

enum class Set { kWorld, kSubset, kSurvivors };

struct Spec : testing::ProgramOperation {
  std::string key = {};  ///< also the name, unless the operation is unnamed
  Set set = Set::kWorld;
  std::vector<int> contributors = {};  ///< the members that have not joined

  bool unnamed() const { return form.name.empty(); }
};
using Memory = testing::OperationMemory;

/// The operation named "without", on the set of the survivors.
Spec operation_without_victim(const Plan&);
/// The operations of one step. They are the same on all ranks, but each rank submits them in its
/// own order.
std::vector<Spec> operations_of_step(const Plan&, int epoch, int step);
/// The operations of an extra step, which only some ranks run before they join.
std::vector<Spec> operations_of_extra_step(const Plan&, int epoch, int step, int extra);
/// Indices into the operations in the order in which this rank submits them. Unnamed operations
/// keep their relative order.
std::vector<std::size_t> order_on(int rank, const std::vector<Spec>&, const Plan&, int epoch,
                                  int step);
/// The operation that the victim submits instead of this one, which must be concerned().
Spec sabotaged(const Spec&, const Plan&);
bool concerned(const Spec&, const Plan&);

Submission make_submission(const Spec&, int rank, int process_set, const std::shared_ptr<Memory>&);
/// Describes the error of a result; empty if it is correct.
std::string check(const Spec&, int rank, const Memory&);

}  // namespace hvd::campaign
