#pragma once

#include <optional>
#include <string>
#include <vector>

#include "report.h"

namespace hvd::launcher {

/// What hvdrun knows about one rank.
struct RankRecord {
  bool connected = false;  ///< its supervisor said hello at some time
  std::string host;
  int local_rank = 0;
  int supervisor_pid = 0;
  int pid = 0;                 ///< 0: the program never started
  long long connected_ns = 0;  ///< hvdrun's clock, as are all times here
  std::optional<Ended> ended;
  std::optional<long long>
      lost_ns;  ///< the connection broke before the supervisor could say how its program ended
  bool told_to_stop = false;  ///< hvdrun ordered it to end
};

/// Why a job ends before its ranks are all done.
enum class StopCause { kNone, kRankFailed, kUserSignal, kTimeout, kMpirunEnded, kStartTimeout };

/// Everything that the last message and the exit code depend on.
struct JobRecord {
  std::vector<RankRecord> ranks;
  StopCause cause = StopCause::kNone;
  long long started_ns = 0;
  long long stop_ns = 0;  ///< when the ranks were told to stop
  long long ended_ns = 0;
  int user_signal = 0;
  double timeout_s = 0;
  double grace_s = 0;

  int mpirun_code = 0;               ///< exit code, or 128 + signal
  std::optional<int> abort_rank;     ///< mpirun: this rank called MPI_Abort
  std::optional<int> improper_rank;  ///< mpirun: this rank left without MPI_Finalize
  bool mpirun_lacks_slots = false, mpirun_lost_host = false, mpirun_lacks_executable = false;

  /// Of the rank that is to blame.
  std::vector<std::string> stderr_tail;
  int tail_lines = 20;  ///< how many of them are kept; 0: the user wants none
};

/// The rank whose end came first among those that nobody had told to stop; none when every rank did
/// well.
std::optional<int> first_failure(const std::vector<RankRecord>& ranks);

/// A rank that ended with code 0 while others went on, and so ended the job: mpirun stops everybody
/// when a rank that called MPI_Init leaves without MPI_Finalize.
std::optional<int> early_leaver(const JobRecord& job);

/// A rank's own record explains the end, so mpirun's account of it can be left out.
bool is_explained(const JobRecord& job);

/// hvdrun's exit code.
int exit_code(const JobRecord& job);

/// The last message, for stderr; empty when the job went well. Ends in a newline.
std::string final_message(const JobRecord& job);

}  // namespace hvd::launcher
