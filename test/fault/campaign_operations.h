#pragma once

#include <hvd/collectives.h>

#include <optional>
#include <string>
#include <vector>

#include "fault/campaign_plan.h"

/// The operations of a step: what is submitted, and what has to come out.
namespace hvd::campaign {

enum class Set { kWorld, kSubset, kSurvivors };

struct Spec {
  std::string key = {};  ///< the name too, unless unnamed
  bool unnamed = false;
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  DataType dtype = DataType::kFloat32;
  std::int64_t rows = 1;
  std::int64_t columns = 1;
  int salt = 0;    ///< changes the values
  int ragged = 0;  ///< changes the sizes that differ by rank
  int root = 0;
  double prescale = 1;
  double postscale = 1;
  Set set = Set::kWorld;
  std::vector<int> members = {};
  std::vector<int> contributors = {};  ///< the members that have not joined
  std::string group = {};
  int group_size = 0;
  int group_index = 0;
};

/// Memory of one operation on one rank.
struct Memory {
  std::vector<std::byte> input = {};
  std::vector<std::byte> output = {};
};

/// The operations that all ranks submit in one step, alike on all of them; rank by rank in another
/// order.
std::vector<Spec> operations_of_step(const Plan&, int epoch, int step);
/// The same in a step that only some ranks do, before they join.
std::vector<Spec> operations_of_extra_step(const Plan&, int epoch, int step, int extra);
/// Indices into the operations in the order in which this rank submits them: unnamed ones keep
/// theirs.
std::vector<std::size_t> order_on(int rank, const std::vector<Spec>&, const Plan&, int epoch,
                                  int step);
/// What the victim submits instead, when its fault concerns this operation.
Spec sabotaged(const Spec&, const Plan&);
bool concerned(const Spec&, const Plan&);

Submission make_submission(const Spec&, int rank, int process_set, const std::shared_ptr<Memory>&);
/// What is wrong with the result, if anything.
std::optional<std::string> check(const Spec&, int rank, const Memory&);

}  // namespace hvd::campaign
