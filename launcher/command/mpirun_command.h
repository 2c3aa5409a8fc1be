#pragma once

#include <string>
#include <utility>
#include <vector>

#include "command/launch_plan.h"
#include "command/rank_environment.h"

namespace hvd::launcher {

/// How the ranks are actually bound: arguments for mpirun take precedence over --bind.
Bind effective_bind(const LaunchPlan& plan);

struct MpirunCommand {
  std::vector<std::string> argv;
  std::vector<std::pair<std::string, std::string>>
      added_variables;  ///< beyond hvdrun's own environment
};

/// Makes the command. Values of variables never appear in argv, where every user of the machine
/// could read them. Pure.
MpirunCommand build_mpirun_command(const LaunchPlan& plan);

/// The host on which mpirun will start a rank, if the hosts and their slots determine it; else
/// empty.
std::string planned_host(const LaunchPlan& plan, int rank);

/// A line for a shell: the added variables, except those that only a running hvdrun can set, and
/// the command.
std::string format_command(const MpirunCommand& command);

/// Whether ranks on other hosts get this variable even if -x does not name it.
bool is_forwarded(const std::string& name);

}  // namespace hvd::launcher
