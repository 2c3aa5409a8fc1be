#pragma once

#include <vector>

#include "reports/report.h"

namespace hvd::launcher {

/// The start order of each rank once all are connected: the address of rank 0, and the layout of
/// the ranks on the hosts. Pure. Hosts are distinguished by their names.
/// @param hellos of all ranks, in their order
std::vector<StartOrder> plan_starts(const std::vector<Hello>& hellos);

}  // namespace hvd::launcher
