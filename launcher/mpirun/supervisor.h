#pragma once

#include <string>
#include <vector>

namespace hvd::launcher {

/// `hvdrun --supervise -- program args`, which mpirun starts once per rank instead of the program.
/// Runs the program as an agent of one rank. Returns the exit code for mpirun: the program's own,
/// or 128 + signal if it was killed. Without the HVD_LAUNCHER_ variables (if a user runs the line
/// that --dry-run prints), replaces this process by the program.
///
/// See Note [Two processes per rank] in supervisor.cpp.
int run_supervisor(const std::vector<std::string>& program);

}  // namespace hvd::launcher
