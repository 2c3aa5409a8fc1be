#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

/// A campaign is many short jobs of processes, one for each seed, in which something goes wrong.
namespace hvd::testing {

struct CampaignOptions {
  bool stacks = false;  ///< add the stacks of processes that hang to the output
  /// The campaign's own option and its value, if it is on the command line.
  std::vector<std::string> own = {};
};

/// A job that has ended, compared with its plan.
struct JudgedJob {
  std::string plan = {};                  ///< one line, printed with the verdict
  std::string row = {};                   ///< the row of the summary that counts the job
  std::vector<std::string> defects = {};  ///< empty: the job was as expected
  std::string output = {};                ///< of its processes
  bool happened = true;                   ///< the planned fault did occur
  double detection = 0;                   ///< seconds until the last process had detected the fault
};

struct Campaign {
  std::uint64_t seeds = 0;      ///< their number unless the command line names another
  std::string own_option = {};  ///< of this campaign alone: "--ucx", or "--moment 0|1|2"
  /// Runs and judges the job of a seed; nullopt if this build cannot run it. An exception is a
  /// defect of the job.
  std::function<std::optional<JudgedJob>(std::uint64_t seed, const CampaignOptions&)> run_job;
};

/// The body of a campaign's main(). It reads the command line, runs the job of each seed, prints
/// those that were wrong with the command that repeats them, and a summary. Options:
///
///   --seeds N, --first SEED  the range of seeds
///   --verbose                prints the jobs that were as expected, too
///   --stacks                 prints the stacks of processes that hang, from gdb
///
/// Returns the exit code: 0, 1 if a job had a defect, 2 if the command line is wrong.
int run_campaign(int argc, char** argv, const Campaign&);

/// Whether a process has this id. It may be a zombie.
bool exists(pid_t);
/// Ends a process that takes too long. Returns its stacks if the options ask for them.
std::string end_late_process(pid_t, const CampaignOptions&);

}  // namespace hvd::testing
