#pragma once

#include <string>

#include "command/controller.h"
#include "command/mpirun_command.h"
#include "command/options.h"

namespace hvd::launcher {

/// The launch that the options, this machine and this environment ask for.
struct LaunchPlan {
  LaunchSpec spec;
  std::string hostname;  ///< of this machine
  ControllerChoice controller;
};

/// @throws LaunchError when the program is not there (checked where a rank runs on this machine),
/// or a variable of -x is unset.
LaunchPlan make_launch_plan(const Options& options);

/// HVD_MPIRUN, else "mpirun".
std::string mpirun_name();

}  // namespace hvd::launcher
