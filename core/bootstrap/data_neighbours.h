#pragma once

#include <vector>

#include "base/topology.h"

namespace hvd::runtime {

/// With whom this rank will certainly exchange data: hosts do so along a chain, rank by rank
/// (decision 13), and two hosts in any case. Those who have this rank among theirs, in turn; at
/// most two. With all others a rank connects when it has something to send.
std::vector<int> data_neighbours(const Topology&);

}  // namespace hvd::runtime
