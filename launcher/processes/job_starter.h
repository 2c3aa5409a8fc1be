#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "command/launch_plan.h"
#include "reports/outcome.h"
#include "system/poller.h"

namespace hvd::launcher {

/// Starts the supervisors of a job's ranks, on every host, and keeps what it has started for it
/// until that has ended. All else (output, ends, signals) is between the supervisors and hvdrun.
/// Not thread-safe: one thread, one poll loop.
class JobStarter {
 public:
  /// Shows the user a text.
  using Show = std::function<void(std::string_view)>;

  virtual ~JobStarter() = default;

  /// What start() will run, a line each.
  virtual std::vector<std::string> commands() const = 0;
  /// @throws LaunchError when something cannot be run
  virtual void start() = 0;
  /// Reads what the started processes print, and shows what is of use.
  virtual void add_to(Poller& poller) = 0;

  struct End {
    std::vector<int> ranks;   ///< that it was to start
    bool last = false;        ///< nothing that was started is left
    bool ends_ranks = false;  ///< they do not outlive it
  };
  /// Of processes that have ended since the last call. A process whose ranks have not all connected
  /// must not end.
  virtual std::vector<End> take_ends() = 0;
  /// Asks what is left to end the ranks that it has started.
  virtual void terminate() = 0;
  virtual void kill() = 0;

  virtual bool has_output() const = 0;
  virtual void close_output() = 0;
  /// What there was no occasion to show yet.
  virtual std::string finish_output() = 0;
  /// What was not shown because the ranks' own records say it better.
  virtual std::string held_output() const = 0;
  /// Its part of the account: how the start failed, if it did.
  virtual void explain(JobRecord& record) const = 0;
};

/// What the plan's controller asks for.
/// @param spec the plan's, with what only a running hvdrun knows
/// @param verbose all that mpirun prints is shown
std::unique_ptr<JobStarter> make_starter(const LaunchPlan& plan, LaunchSpec spec, bool verbose,
                                         JobStarter::Show show);

}  // namespace hvd::launcher
