#pragma once

#include <sys/types.h>

#include <asio/io_context.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agent/host_order.h"
#include "command/hosts.h"
#include "command/launch_plan.h"
#include "processes/input_pump.h"

namespace hvd::launcher {

/// Starts the agents of a job without mpirun, each with its order at standard input. Not
/// thread-safe.
class AgentSpawner {
 public:
  /// `plan` must outlive this.
  AgentSpawner(asio::io_context& io, const LaunchPlan& plan) : io_(io), plan_(plan) {}

  /// The command: hvdrun itself, or a remote shell that runs it on another host.
  std::vector<std::string> command(const HostRanks& host) const;
  /// @param order with its ranks; the folder, the variables and the program are added
  /// @param output for stdout and stderr
  /// @param input_source is copied to its standard input after the order; -1: no input
  /// @throws LaunchError when the process cannot be started
  pid_t spawn(const HostRanks& host, HostOrder order, int output, int input_source);

 private:
  std::vector<std::pair<std::string, std::string>> remote_variables() const;

  asio::io_context& io_;
  const LaunchPlan& plan_;
  std::vector<std::unique_ptr<InputPump>> pumps_;
};

}  // namespace hvd::launcher
