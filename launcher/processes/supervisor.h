#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reports/report.h"

namespace hvd::launcher {

/// `hvdrun --supervise -- program args`, which mpirun starts once per rank instead of the program.
/// Runs the program, sends its output and its end to hvdrun, and passes signals on. Returns the
/// exit code for mpirun: the program's own, or 128 + signal if it was killed. Without the
/// HVD_LAUNCHER_ variables (if a user runs the line that --dry-run prints), replaces this process
/// by the program.
///
/// See Note [Two processes per rank] in supervisor.cpp.
int run_supervisor(const std::vector<std::string>& program);

/// Adds the variables by which the ranks find each other, and their layout on the hosts.
/// @param init_method how the ranks find each other; empty: through MPI
/// @param token hvdrun's own, which the program must not see; the job's is derived from it
/// @param kept variables that -x has set: they stay as they are
void add_job_variables(std::vector<std::string>& environment, const StartOrder& order,
                       const std::string& init_method, std::string_view token,
                       const std::vector<std::string>& kept);

}  // namespace hvd::launcher
