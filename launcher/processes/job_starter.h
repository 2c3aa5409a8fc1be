#pragma once

#include <asio/io_context.hpp>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "command/launch_plan.h"
#include "reports/outcome.h"

namespace hvd::launcher {

/// Starts the agents of a job's ranks, on every host, and owns the processes that it started until
/// they end. The agents exchange output, ends and signals with hvdrun directly. Not thread-safe:
/// one thread, one loop, which also reads the output of the started processes.
class JobStarter {
 public:
  /// Shows the user a text.
  using Show = std::function<void(std::string_view)>;

  virtual ~JobStarter() = default;

  /// The commands that start() will run, a line each.
  virtual std::vector<std::string> commands() const = 0;
  /// @throws LaunchError when a process cannot be started.
  virtual void start() = 0;

  /// A started process that has ended.
  struct Exit {
    std::vector<int> ranks;   ///< the ranks that the process had to start
    bool last = false;        ///< no started process is left
    bool ends_ranks = false;  ///< its ranks end with it
  };
  /// Reaps the processes that have ended since the last call. The end of a process is an error if
  /// its ranks have not all connected.
  virtual std::vector<Exit> reap() = 0;
  /// Sends SIGTERM to the remaining processes, which then end the ranks that they started.
  virtual void terminate() = 0;
  virtual void kill() = 0;

  virtual bool has_output() const = 0;
  virtual void close_output() = 0;
  /// Returns the output that was not shown yet.
  virtual std::string finish_output() = 0;
  /// Returns the output that was withheld because the ranks' own records are clearer.
  virtual std::string held_output() const = 0;
  /// Adds the reasons to the record if the start has failed.
  virtual void explain(JobRecord& record) const = 0;
};

/// Makes the starter for the plan's controller.
/// @param plan contains the port, the token and the limits of this run
/// @param verbose shows all output of mpirun
std::unique_ptr<JobStarter> make_starter(asio::io_context& io, const LaunchPlan& plan, bool verbose,
                                         JobStarter::Show show);

}  // namespace hvd::launcher
