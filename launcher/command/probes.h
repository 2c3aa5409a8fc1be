#pragma once

#include <optional>
#include <string>

namespace hvd::launcher {

/// The reason why hvd cannot use UCX on this machine, such as "UCX 1.12.0 is too old (hvd needs
/// 1.13)"; empty if it can. Loads UCX in a child process.
std::string ucx_problem();
/// The same for the version that a library reports; a library without one is too old. Pure.
std::string problem_of_ucx_version(const std::optional<std::string>& version);

/// The number of GPUs that a program started from here sees. 0 also without a driver.
int visible_gpus();
/// The number of CPUs that this process may use.
int usable_cpus();

}  // namespace hvd::launcher
