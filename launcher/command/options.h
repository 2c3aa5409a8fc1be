#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command/controller.h"
#include "command/hosts.h"
#include "command/rank_environment.h"

namespace hvd::launcher {

enum class Action { kRun, kDryRun, kCheckBuild, kPrint };

/// hvdrun's command line.
struct LaunchOptions {
  Action action = Action::kRun;
  std::string text;  ///< for kPrint: the help or the version

  int np = 0;
  std::vector<Host> hosts;
  Bind bind = Bind::kAuto;
  Controller controller = Controller::kAuto;
  bool verbose = false;
  bool tag = true;
  std::optional<std::string> output_folder;
  std::optional<std::string> timeline;
  /// From -x: with a value, or to be taken from the environment.
  std::vector<std::pair<std::string, std::optional<std::string>>> exports;
  std::vector<std::string> mpi_args;
  std::vector<std::string> remote_shell;  ///< of --rsh; empty: ssh
  double timeout_s = 0;                   ///< 0: none
  double start_timeout_s = 120;
  double grace_s = 5;
  double fail_grace_s = 5;
  int tail_lines = 20;
  std::vector<std::string> program;
};

/// `arguments` is argv without argv[0]. Reads the hostfile that is named, or mpirun's default one
/// when neither -H nor --hostfile is given (`default_hostfile`, from
/// OMPI_MCA_orte_default_hostfile, which mpirun 5 ignores).
/// @throws LaunchError (kUsage, or kUnavailable when the hosts have fewer slots than -np).
LaunchOptions parse_options(const std::vector<std::string>& arguments,
                            const std::optional<std::string>& default_hostfile);

}  // namespace hvd::launcher
