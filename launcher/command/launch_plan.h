#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command/controller.h"
#include "command/hosts.h"
#include "command/options.h"
#include "command/rank_environment.h"

namespace hvd::launcher {

/// The MPIs whose launchers hvdrun can use.
enum class MpirunKind { kOpenMpi, kMpich, kIntelMpi };

/// Describes a launch, as determined by the options, this machine and its environment. It is the
/// input of every JobStarter.
struct LaunchPlan {
  std::string mpirun = "mpirun";
  MpirunKind mpirun_kind = MpirunKind::kOpenMpi;
  int np = 1;  ///< the ranks that hvdrun starts
  /// The number of the first rank and the number of all ranks. They differ from 0 and `np` in a job
  /// with torchrun's options, in which each node's hvdrun starts its own ranks.
  int first_rank = 0;
  int world_size = 1;
  /// Empty: this machine, or the hosts that the batch system has allocated.
  std::vector<Host> hosts;
  std::string hostname;    ///< of this machine
  bool local_only = true;  ///< no rank runs on another machine
  bool managed = false;    ///< a batch system (Slurm, PBS, LSF) decides which slots there are
  ControllerChoice controller;
  Bind bind = Bind::kAuto;
  std::vector<std::pair<std::string, std::string>> variables;  ///< to be set for the ranks
  std::vector<std::string> exports;                            ///< names given by -x
  std::vector<std::string> mpi_args;
  std::vector<std::string> remote_shell;  ///< before HOST and COMMAND; empty: mpirun's own
  std::string hvdrun;                     ///< path of this executable, on every host
  std::vector<std::string> program;
  bool as_root = false;
  std::string session_folder;  ///< for mpirun's files on this machine; empty: its own default
  int silence_limit_s = 0;     ///< after which a host counts as lost; 0: mpirun's default
  std::vector<std::string> environment;  ///< hvdrun's own, NAME=value
};

/// @throws LaunchError when the program cannot be run (checked only if a rank runs on this
/// machine), or when -x names an unset variable.
LaunchPlan make_launch_plan(const LaunchOptions& options);

/// The value that -x gives the variable, if any.
std::optional<std::string> exported(const LaunchPlan& plan, const std::string& name);
/// The ranks' value of a variable that is forwarded to them.
std::optional<std::string> value_for_ranks(const LaunchPlan& plan, const std::string& name);

/// HVD_MPIRUN, else "mpirun", or "mpiexec" if PATH has only that.
std::string mpirun_name();

/// Determines which MPI an mpirun belongs to, by its file name and the files beside it, without
/// running it. An unknown mpirun counts as Open MPI's.
MpirunKind kind_of_mpirun(const std::string& mpirun);

}  // namespace hvd::launcher
