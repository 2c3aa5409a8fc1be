#pragma once

#include <sys/types.h>

#include <csignal>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command/hosts.h"
#include "processes/job_starter.h"
#include "system/poller.h"
#include "system/process.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Copies from one descriptor to another, as fast as the target accepts the data. Not thread-safe.
///
/// A terminal is read only while this process is in its foreground, because the kernel would stop a
/// background process that reads.
class InputPump {
 public:
  /// @param source stays open; negative: only `head` is written
  /// @param head is written first
  InputPump(int source, UniqueFd target, std::string head = {});

  void add_to(Poller& poller);
  /// Whether the target has been closed, at the source's end or because its reader has closed it.
  bool done() const noexcept { return !target_; }

 private:
  void read();
  void write();

  int source_ = -1;
  UniqueFd target_;
  std::string pending_;
};

/// Starts the ranks without mpirun. hvdrun itself starts the supervisors of this host. On each
/// other host a remote shell runs `hvdrun --supervise-host`, which starts the supervisors there;
/// see Note [Starting without mpirun].
class DirectStarter final : public JobStarter {
 public:
  DirectStarter(LaunchPlan plan, Show show);

  std::vector<std::string> commands() const override;
  void start() override;
  void add_to(Poller& poller) override;
  std::vector<Exit> reap() override;
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
    std::string host = {};  ///< of a remote shell; empty: a supervisor
    std::optional<ExitStatus> end = {};
    bool stopped = false;  ///< this class has signalled it
  };

  void start_remote(const HostRanks& host);
  void start_local(const HostRanks& host);
  void run(SpawnOptions options, Child child, const std::string& advice);
  std::vector<std::string> remote_command(const std::string& host) const;
  std::vector<std::pair<std::string, std::string>> remote_variables() const;
  void signal_all(int signal);

  const LaunchPlan plan_;
  const std::vector<HostRanks> hosts_;
  const Show show_;
  std::vector<Child> children_;
  std::vector<InputPump> pumps_;
  UniqueFd output_, output_for_children_;
  bool wrote_ = false;
};

}  // namespace hvd::launcher
