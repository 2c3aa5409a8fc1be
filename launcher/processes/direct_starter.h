#pragma once

#include <sys/types.h>

#include <csignal>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command/hosts.h"
#include "processes/input_pump.h"
#include "processes/job_starter.h"
#include "system/process.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Starts the ranks without mpirun. hvdrun itself starts the supervisors of this host. On each
/// other host a remote shell runs `hvdrun --supervise-host`, which starts the supervisors there;
/// see Note [Starting without mpirun].
class DirectStarter final : public JobStarter {
 public:
  /// @param hostname of this machine
  DirectStarter(LaunchSpec spec, const std::string& hostname, Show show);

  std::vector<std::string> commands() const override;
  void start() override;
  void add_to(Poller& poller) override;
  std::vector<End> take_ends() override;
  void terminate() override { signal_all(SIGTERM); }
  void kill() override { signal_all(SIGKILL); }
  bool has_output() const override { return static_cast<bool>(output_); }
  void close_output() override { output_.reset(); }
  std::string finish_output() override { return {}; }
  std::string held_output() const override { return {}; }
  void explain(JobRecord& record) const override;

 private:
  /// A process that was started: a supervisor, or the remote shell of a host.
  struct Child {
    pid_t pid = -1;
    std::vector<int> ranks = {};
    std::string host = {};  ///< of a remote shell
    std::optional<ExitStatus> end = {};
    bool stopped = false;  ///< by us
  };

  void start_remote(const HostRanks& host);
  void start_local(const HostRanks& host);
  void run(SpawnOptions options, Child child, const std::string& what_to_do);
  std::vector<std::string> remote_command(const std::string& host) const;
  std::vector<std::pair<std::string, std::string>> remote_variables() const;
  std::string agent_name() const;
  void signal_all(int signal);

  const LaunchSpec spec_;
  const std::vector<HostRanks> hosts_;
  const Show show_;
  std::vector<Child> children_;
  std::vector<InputPump> pumps_;
  UniqueFd output_, output_for_children_;
  bool spoke_ = false;
};

}  // namespace hvd::launcher
