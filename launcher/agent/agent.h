#pragma once

#include <csignal>
#include <functional>
#include <string>
#include <vector>

#include "command/rank_environment.h"

namespace hvd::launcher {

/// The ranks that an agent starts, and their program.
struct AgentJob {
  std::vector<std::string> program = {};
  std::vector<RankIdentity> ranks = {};  ///< on this host, not empty
  /// mpirun has started this process and has bound it to cores; the ranks find each other through
  /// MPI.
  bool under_mpirun = false;
  /// Completes the environment of each program.
  std::function<void(std::vector<std::string>&)> add_variables = [](std::vector<std::string>&) {};
};

/// Blocks the signals that an agent handles, and ignores SIGPIPE. Call it before the process has a
/// second thread or a child.
/// @return the signals
sigset_t block_agent_signals();

/// Connects to the hvdrun that the HVD_LAUNCHER_ variables name, runs the ranks' programs, sends
/// their output and reports of their ends to hvdrun, and forwards signals, until hvdrun has
/// released all ranks. If the connection is lost, ends the programs. Returns the exit code of the
/// first rank that failed, else 0; kUnavailable if hvdrun is out of reach.
/// @throws LaunchError (kUnavailable, kInternal) when this host has too few descriptors.
int run_ranks(const AgentJob& job);

/// `hvdrun --agent`, which starts and watches the ranks of one host if there is no mpirun. hvdrun
/// starts it directly on its own host, and through a remote shell on other hosts. Reads a HostOrder
/// from its standard input, then runs the ranks.
int run_agent();

}  // namespace hvd::launcher
