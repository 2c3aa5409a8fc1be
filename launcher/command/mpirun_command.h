#pragma once

#include <string>
#include <utility>
#include <vector>

#include "command/hosts.h"
#include "command/rank_environment.h"

namespace hvd::launcher {

/// The input of every starter of ranks.
struct LaunchSpec {
  std::string mpirun = "mpirun";
  int np = 1;
  std::vector<Host>
      hosts;               ///< empty: this machine, or the hosts that the batch system has allotted
  bool local_only = true;  ///< no rank runs on another machine
  bool managed = false;    ///< a batch system (Slurm, PBS, LSF) decides which slots there are
  Bind bind = Bind::kAuto;
  std::vector<std::pair<std::string, std::string>> variables;  ///< to be set for the ranks
  std::vector<std::string> exports;                            ///< names that -x asked for
  std::vector<std::string> mpi_args;
  std::vector<std::string> remote_shell;  ///< HOST and COMMAND follow; empty: mpirun's own
  std::string hvdrun;                     ///< path of this executable, on every host
  std::vector<std::string> program;
  bool as_root = false;
  std::string session_folder;  ///< for mpirun's files on this machine; empty: its own default
  int silence_limit_s = 0;     ///< after which a host counts as lost; 0: mpirun's default
  std::vector<std::string> environment;  ///< hvdrun's own, NAME=value
};

/// How the ranks are bound in the end: the request to mpirun in `mpi_args` or the environment
/// rules.
Bind effective_bind(const LaunchSpec& spec);

struct MpirunCommand {
  std::vector<std::string> argv;
  std::vector<std::pair<std::string, std::string>>
      added_variables;  ///< beyond hvdrun's own environment
};

/// Pure. Values of variables never appear in argv, where every user of the machine could read them.
MpirunCommand build_mpirun_command(const LaunchSpec& spec);

/// The host on which mpirun will start a rank, if the hosts and their slots determine it; else
/// empty.
std::string planned_host(const LaunchSpec& spec, int rank);

/// A line for a shell: the added variables, without those that only a running hvdrun can give, and
/// the command.
std::string format_command(const MpirunCommand& command);

/// A variable that ranks on other hosts get without being asked for.
bool is_forwarded(const std::string& name);

}  // namespace hvd::launcher
