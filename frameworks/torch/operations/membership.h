#pragma once

#include <vector>

#include "hvd/process_set.h"

namespace hvd::libtorch {

/// Whether this process is a worker of an elastic job that has no rank yet. Objects that concern
/// all ranks are then made for one rank, and made again when the process has its rank
/// (elastic::at_each_generation()).
bool waits_for_rank();

/// The ranks of a set and this rank's position. In a worker that waits for its rank, one rank
/// stands for all.
struct Membership {
  std::vector<int> ranks;
  int position = 0;
};
Membership membership_of(const ProcessSet& process_set);

}  // namespace hvd::libtorch
