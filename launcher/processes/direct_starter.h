#pragma once

#include <sys/types.h>

#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "command/hosts.h"
#include "processes/agent_spawner.h"
#include "processes/job_starter.h"
#include "system/event_loop.h"
#include "system/process.h"

namespace hvd::launcher {

/// Starts the ranks without mpirun. hvdrun itself starts the agent of this host. On each other host
/// a remote shell runs `hvdrun --agent`; see Note [Starting without mpirun].
class DirectStarter final : public JobStarter {
 public:
  DirectStarter(asio::io_context& io, LaunchPlan plan, Show show);

  std::vector<std::string> commands() const override;
  void start() override;
  std::vector<Exit> reap() override;
  void terminate() override { signal_all(SIGTERM); }
  void kill() override { signal_all(SIGKILL); }
  bool has_output() const override { return output_ && output_->is_open(); }
  void close_output() override {
    if (output_) output_->close();
  }
  std::string finish_output() override { return {}; }
  std::string held_output() const override { return {}; }
  void explain(JobRecord& record) const override;

 private:
  /// A process that was started: an agent, or the remote shell of a host.
  struct Child {
    pid_t pid = -1;
    std::vector<int> ranks = {};
    std::string host = {};  ///< of a remote shell; empty: the agent of this host
    std::optional<ExitStatus> end = {};
    bool stopped = false;  ///< this class has signalled it
  };

  void start_agent(const HostRanks& host, int output);
  void signal_all(int signal);

  asio::io_context& io_;
  const LaunchPlan plan_;
  const std::vector<HostRanks> hosts_;
  const Show show_;
  AgentSpawner spawner_;
  std::vector<Child> children_;
  std::optional<PipeReader> output_;
  bool wrote_ = false;
};

}  // namespace hvd::launcher
