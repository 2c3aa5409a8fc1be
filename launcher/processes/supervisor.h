#pragma once

#include <string>
#include <vector>

namespace hvd::launcher {

/// `hvdrun --supervise -- program args`: what mpirun starts in place of the program, once per rank.
/// Runs the program, sends its output and its end to hvdrun, and passes signals on. Returns the
/// exit code for mpirun: the program's, 128 + signal when killed. Without the HVD_LAUNCHER_
/// variables (a user ran the line that --dry-run printed) it becomes the program.
///
/// See Note [Two processes per rank] in supervisor.cpp.
int run_supervisor(const std::vector<std::string>& program);

}  // namespace hvd::launcher
