#pragma once

#include <optional>
#include <string>
#include <vector>

#include "reports/report.h"

namespace hvd::launcher {

/// hvdrun's record of one rank.
struct RankRecord {
  bool connected = false;  ///< its agent has been admitted
  std::string host;        ///< before `connected`: the planned host, if it is known
  int local_rank = 0;
  int pid = 0;                 ///< 0: the program never started
  long long connected_ns = 0;  ///< hvdrun's clock, as are all times here
  std::optional<Ended> ended;
  std::optional<long long>
      lost_ns;           ///< when the connection broke before the agent reported the program's end
  bool drained = false;  ///< all its output has been received
  bool ordered_to_stop = false;  ///< hvdrun ordered it to end

  // From the program's notices (core/observe/supervisor_notice.h).
  bool uses_hvd = false;
  bool in_job = false;   ///< it has joined in hvd::init(); hvd::shutdown() has not ended in order
  bool has_mpi = false;  ///< the program itself started MPI before hvd::init()
  bool left = false;     ///< it has called hvd::shutdown()
  std::optional<Notice> death;  ///< an uncaught exception, or exit() without shutdown()
  std::optional<Notice> loss;   ///< another rank is lost or has left
  /// The first notice of its loss, if all other ranks reported it as lost while it ran. Set by
  /// mark_lost_ranks().
  std::optional<Notice> lost_to_others;
};

/// Why a job is stopped before its ranks are done.
enum class StopCause {
  kNone,
  kRankFailed,
  kUserSignal,
  kTimeout,
  kStarterEnded,
  kStartTimeout,
  kReaderGone,
};

/// Everything that the last message and the exit code depend on.
struct JobRecord {
  std::vector<RankRecord> ranks;  ///< those that this hvdrun has started
  int first_rank = 0;             ///< the number of the first of them, for the messages
  RankRecord& rank(int index) { return ranks[static_cast<std::size_t>(index)]; }
  const RankRecord& rank(int index) const { return ranks[static_cast<std::size_t>(index)]; }

  /// Warns if the ranks end well and none has called hvd::init(), because each may then have been
  /// an MPI job of its own.
  bool expects_hvd = false;

  StopCause cause = StopCause::kNone;
  long long started_ns = 0;
  long long stop_ns = 0;  ///< when the order to stop was sent
  long long ended_ns = 0;
  int user_signal = 0;
  double timeout_s = 0;
  double grace_s = 0;

  std::string lost_reader;   ///< for kReaderGone: the stream
  bool output_lost = false;  ///< output of ranks could not be written, which was reported

  std::string starter = "mpirun";          ///< the program that starts the ranks
  int starter_code = 0;                    ///< exit code, or 128 + signal
  int starter_signal = 0;                  ///< the signal that killed it, unless hvdrun sent it
  bool starter_wrote = false;              ///< it has printed something
  std::optional<int> abort_rank;           ///< mpirun: this rank called MPI_Abort
  std::optional<int> improper_rank;        ///< mpirun: this rank left without MPI_Finalize
  std::vector<std::string> suspect_hosts;  ///< one of these was lost or never reached
  bool lacks_slots = false, lost_host = false, lacks_executable = false;

  /// The last lines of stderr of the rank that is named as the cause.
  std::vector<std::string> stderr_tail;
  int tail_lines = 20;  ///< the largest number of lines; 0: none
};

/// Records a notice of the rank's program.
void apply_notice(RankRecord& rank, Notice notice);

/// Whether the agent of a rank that has ended with code 0 must stay until the other ranks have
/// ended. The rank may have left without MPI_Finalize. If its agent ended too, mpirun would
/// end the other ranks, although hvd ends them itself. False if the program has started MPI itself,
/// because the other ranks may then wait for the rank inside MPI, and only mpirun can end them.
bool must_be_held(const RankRecord& rank);

/// The rank that still runs although all others have ended and have reported it as lost: it is
/// stopped, hangs, or cannot be reached.
std::optional<int> abandoned_rank(const std::vector<RankRecord>& ranks);

/// Marks the ranks that all others have reported as lost. Call it once the record is complete.
void mark_lost_ranks(std::vector<RankRecord>& ranks);

/// Marks ranks as lost if mpirun detected the loss of a host and ended first: ranks that sent no
/// further report were lost before hvdrun ordered them to stop. Call it once the record is
/// complete.
void mark_ranks_lost_by_mpirun(JobRecord& job);

/// The rank that ended first among those that had no order to stop. Ranks that ended because of
/// another's loss count only if there are no others. Empty if every rank ended well.
std::optional<int> first_failure(const std::vector<RankRecord>& ranks);

/// The rank that ended the job because it ended with code 0 while others were still running. Either
/// it left without shutdown() or before init(), and another rank failed because of that; or it
/// called MPI_Init and left without MPI_Finalize, and mpirun therefore ended the others. A rank
/// that has called shutdown() does not count as an early leaver: a rank that still needed it has
/// then failed.
std::optional<int> early_leaver(const JobRecord& job);

/// Whether the records explain how the job ended. The starter's output can then be left out.
bool is_explained(const JobRecord& job);

/// hvdrun's exit code.
int exit_code(const JobRecord& job);

/// The last message, for stderr; empty when the job went well, unless there is a warning. Ends in a
/// newline.
std::string final_message(const JobRecord& job);

}  // namespace hvd::launcher
