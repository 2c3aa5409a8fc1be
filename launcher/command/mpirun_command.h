#pragma once

#include <string>
#include <utility>
#include <vector>

#include "command/launch_plan.h"
#include "command/rank_environment.h"

namespace hvd::launcher {

/// How the ranks are bound in the end: arguments for mpirun take precedence over --bind.
Bind effective_bind(const LaunchPlan& plan);

struct MpirunCommand {
  std::vector<std::string> argv;
  std::vector<std::pair<std::string, std::string>>
      added_variables;  ///< beyond hvdrun's own environment
};

/// Pure. Values of variables never appear in argv, where every user of the machine could read them.
MpirunCommand build_mpirun_command(const LaunchPlan& plan);

/// The host on which mpirun will start a rank, if the hosts and their slots determine it; else
/// empty.
std::string planned_host(const LaunchPlan& plan, int rank);

/// A line for a shell: the added variables, without those that only a running hvdrun can give, and
/// the command.
std::string format_command(const MpirunCommand& command);

/// Whether ranks on other hosts get this variable even if -x does not name it.
bool is_forwarded(const std::string& name);

}  // namespace hvd::launcher
