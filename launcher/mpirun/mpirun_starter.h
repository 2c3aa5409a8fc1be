#pragma once

#include <sys/types.h>

#include <csignal>
#include <optional>
#include <string>
#include <vector>

#include "mpirun/job_folder.h"
#include "mpirun/mpirun_log.h"
#include "processes/job_starter.h"
#include "system/event_loop.h"
#include "system/process.h"

namespace hvd::launcher {

/// Starts the ranks through mpirun, which runs `hvdrun --supervise` on all hosts.
class MpirunStarter final : public JobStarter {
 public:
  /// @param verbose shows all output of mpirun
  MpirunStarter(asio::io_context& io, LaunchPlan plan, bool verbose, Show show);

  std::vector<std::string> commands() const override;
  void start() override;
  std::vector<Exit> reap() override;
  void terminate() override { stop(SIGTERM); }
  void kill() override { stop(SIGKILL); }
  bool has_output() const override;
  void close_output() override;
  std::string finish_output() override;
  std::string held_output() const override { return log_.held(); }
  void explain(JobRecord& record) const override;

 private:
  void on_output(std::string_view bytes);
  void stop(int signal);
  std::vector<std::string> suspect_hosts() const;

  asio::io_context& io_;
  LaunchPlan plan_;
  const bool verbose_;
  const Show show_;
  std::optional<TemporaryFolder> session_folder_;
  MpirunLog log_;
  pid_t mpirun_ = -1;
  std::optional<ExitStatus> end_;
  bool stopped_ = false;  ///< by the launcher
  std::optional<PipeReader> stdout_, stderr_;
};

}  // namespace hvd::launcher
