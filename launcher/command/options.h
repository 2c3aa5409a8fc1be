#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command/controller.h"
#include "command/elastic_options.h"
#include "command/hosts.h"
#include "command/node_options.h"
#include "command/option_sources.h"
#include "command/rank_environment.h"

namespace hvd::launcher {

enum class Action { kRun, kDryRun, kCheckBuild, kPrint };

/// hvdrun's command line.
struct LaunchOptions {
  Action action = Action::kRun;
  std::string text;  ///< for kPrint: the help, the version, or the options with their sources

  int np = 0;  ///< the ranks that hvdrun starts, or with which an elastic job starts
  /// Set if torchrun's options describe the job. `hosts` is then empty.
  std::optional<NodeOptions> node;
  std::vector<Host> hosts;
  /// Set for an elastic job.
  std::optional<ElasticOptions> elastic;
  int max_restarts = 0;  ///< how often all ranks may be started again after one has failed
  Bind bind = Bind::kAuto;
  Controller controller = Controller::kAuto;
  bool verbose = false;
  bool tag = true;
  std::optional<std::string> output_folder;
  LogOptions logs;
  std::optional<std::string> timeline;
  /// From -x: each name with its value, or without one if the environment gives the value.
  std::vector<std::pair<std::string, std::optional<std::string>>> exports;
  std::vector<std::string> mpi_args;
  std::vector<std::string> remote_shell;  ///< from --rsh; empty: ssh
  double timeout_s = 0;                   ///< 0: no limit
  double start_timeout_s = 120;
  double grace_s = 5;
  double fail_grace_s = 5;
  int tail_lines = 20;
  std::vector<std::string> program;
};

/// Parses the command line, the file of --config-file and the variables of the environment that
/// stand for options: torchrun's (PET_NNODES for --nnodes), and mpirun's default hostfile
/// (OMPI_MCA_orte_default_hostfile; mpirun 5 ignores it). torchrun's are ignored if the command
/// line or the file gives the ranks in hvdrun's own way. Reads the hostfile.
/// @param arguments argv without argv[0]
/// @throws LaunchError (kUsage, or kUnavailable when the hosts have fewer slots than -np).
LaunchOptions parse_options(const std::vector<std::string>& arguments, const Lookup& variable);

}  // namespace hvd::launcher
