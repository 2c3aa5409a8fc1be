#pragma once

#include <vector>

#include "reports/report.h"

namespace hvd::launcher {

/// What each rank is told once all have come: where rank 0 is, and how the ranks lie on the hosts.
/// Pure. Hosts are told apart by their names.
/// @param hellos of all ranks, in their order
std::vector<StartOrder> plan_starts(const std::vector<Hello>& hellos);

}  // namespace hvd::launcher
