#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reports/report.h"

namespace hvd::launcher {

/// Adds the variables by which the ranks find each other, and their layout on the hosts.
/// @param init_method how the ranks find each other; empty: through MPI
/// @param token hvdrun's own, which the program must not see; the job's is derived from it
/// @param kept variables that -x has set: they stay as they are
void add_job_variables(std::vector<std::string>& environment, const StartOrder& order,
                       const std::string& init_method, std::string_view token,
                       const std::vector<std::string>& kept);

}  // namespace hvd::launcher
