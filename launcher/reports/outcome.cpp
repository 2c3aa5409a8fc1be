#include "reports/outcome.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "system/error.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

bool failed_alone(const RankRecord& rank) {
  return rank.ended && rank.ended->code != 0 && !rank.ended->stopped;
}

/// Whether the rank announced a failure before it was ordered to stop.
bool announced_failure(const RankRecord& rank) {
  return rank.death && rank.death->code != 0 && !rank.death->stopped &&
         !(rank.ended && rank.ended->code == 0);
}

/// Whether the rank reported the loss of `other`, which had not left in order.
bool has_lost(const RankRecord& rank, int other) {
  constexpr int kPeerLostStatus = 4;  // hvd::StatusCode::kPeerLost
  return rank.loss && rank.loss->about == other && rank.loss->code == kPeerLostStatus;
}

/// Whether each of the other ranks reported the loss of this rank, and this rank did not report a
/// loss itself.
bool lost_by_all(const std::vector<RankRecord>& ranks, int index) {
  const RankRecord& rank = ranks[static_cast<std::size_t>(index)];
  const bool over = rank.uses_hvd && !rank.in_job;
  if (ranks.size() < 2 || !rank.connected || over || (rank.loss && !has_lost(rank, index)))
    return false;
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    if (static_cast<int>(other) != index && !has_lost(ranks[other], index)) return false;
  }
  return true;
}

long long end_time(const RankRecord& rank) {
  return rank.ended ? rank.ended->time_ns : *rank.lost_ns;
}

/// When the rank itself failed; empty if it did not fail.
std::optional<long long> fault_time(const RankRecord& rank) {
  const bool lost = !rank.ended && rank.lost_ns && !rank.ordered_to_stop;
  if (announced_failure(rank)) return rank.death->time_ns;
  if (rank.lost_to_others) return rank.lost_to_others->time_ns;
  if (failed_alone(rank) || lost) return end_time(rank);
  return std::nullopt;
}

/// Whether the rank failed because another rank was lost before.
bool is_consequence(const RankRecord& rank) {
  const auto fault = fault_time(rank);
  return fault && !rank.lost_to_others && rank.loss && rank.loss->time_ns <= *fault;
}

/// Whether the rank ended without a failure of its own, but without hvd::shutdown().
bool left_unannounced(const RankRecord& rank) {
  return rank.death && rank.death->kind == "exit" && rank.death->code == 0 &&
         !rank.death->stopped && (!rank.loss || rank.death->time_ns <= rank.loss->time_ns);
}

/// Like left_unannounced(), but without a notice: the rank called _Exit(), for example, or ended
/// before hvd::init().
bool left_silently(const RankRecord& rank) {
  return rank.ended && rank.ended->code == 0 && !rank.ended->stopped && !rank.left &&
         (rank.in_job || !rank.uses_hvd);
}

std::vector<int> ranks_where(const JobRecord& job, bool (*condition)(const RankRecord&)) {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < job.ranks.size(); ++i) {
    if (condition(job.ranks[i])) ranks.push_back(static_cast<int>(i));
  }
  return ranks;
}

std::vector<int> without(std::vector<int> ranks, int rank) {
  std::erase(ranks, rank);
  return ranks;
}

/// The indices as numbers of ranks.
std::vector<int> numbers(const JobRecord& job, std::vector<int> ranks) {
  for (int& rank : ranks) rank += job.first_rank;
  return ranks;
}

std::string count_ranks(std::size_t count) { return text(count, count == 1 ? " rank" : " ranks"); }

/// "3 ranks (0, 1 and 3)"
std::string counted(const JobRecord& job, const std::vector<int>& ranks) {
  return text(count_ranks(ranks.size()), " (", rank_numbers(numbers(job, ranks)), ")");
}

std::string where(const RankRecord& rank) {
  return text("host ", rank.host, "  local rank ", rank.local_rank,
              rank.pid > 0 ? text("  pid ", rank.pid) : "");
}

/// How the rank that is named as the cause ended, in words.
std::string describe_end(const JobRecord& job, int index) {
  const RankRecord& rank = job.rank(index);
  if (!rank.ended) return "lost: its agent's connection broke without a report";
  const Ended& ended = *rank.ended;
  if (rank.lost_to_others && ended.stopped) return "the other ranks lost it, and hvdrun ended it";
  if (ended.start_error != 0)
    return text("its program could not be started: ", std::strerror(ended.start_error));
  if (announced_failure(rank) && ended.stopped) {
    return rank.death->kind == "exit"
               ? text("exited with code ", rank.death->code)
               : text("uncaught exception, then ", signal_name(ended.signal), " from hvdrun");
  }
  return text(ended.signal != 0
                  ? text("killed by ", signal_name(ended.signal), " (", ended.signal, ")")
                  : text("exited with code ", ended.code),
              ended.dumped_core ? ", core dumped" : "",
              job.abort_rank == index ? " (it called MPI_Abort)" : "");
}

std::string hint(const RankRecord& rank) {
  if (!rank.ended)
    return "its host may have died or left the network: see whether " + rank.host +
           " still answers";
  if (rank.lost_to_others) {
    return "a process that is stopped by a signal or a debugger, or that hangs, gives no sign of "
           "life, nor does one whose host is out of reach";
  }
  if (rank.ended->signal == SIGKILL) {
    return "SIGKILL without a message is often the out-of-memory killer: see dmesg on " + rank.host;
  }
  return {};
}

/// The lines, indented below the line of the message that names the rank.
std::string indented(std::string_view lines) {
  return text("        ", join_text(split_text(lines, '\n'), "\n        "), "\n");
}

/// Whether the last lines already show the exception: the C++ library prints what() of an uncaught
/// one.
bool is_quoted(const JobRecord& job, const Notice& death) {
  constexpr std::string_view kUncaught = "uncaught exception: ";
  std::string_view what = death.text;
  const std::size_t at = what.find(kUncaught);
  if (job.tail_lines == 0 || at == std::string_view::npos) return false;
  what = what.substr(at + kUncaught.size());
  what = what.substr(0, what.find('\n'));
  return std::any_of(job.stderr_tail.begin(), job.stderr_tail.end(),
                     [what](const auto& line) { return line.find(what) != std::string::npos; });
}

/// Whether there are several ranks, and all have thrown the same exception as this one.
bool all_threw_alike(const JobRecord& job, const RankRecord& rank) {
  const auto threw = [&rank](const RankRecord& other) {
    return other.death && other.death->kind == "throw" && !other.death->stopped &&
           other.death->text == rank.death->text;
  };
  return rank.death && job.ranks.size() > 1 &&
         std::all_of(job.ranks.begin(), job.ranks.end(), threw);
}

/// Describes the rank's end from its own notices.
std::string own_account(const JobRecord& job, const RankRecord& rank) {
  constexpr int kShutdownStatus = 5;  // hvd::StatusCode::kShutdown
  std::string account;
  if (rank.death && !rank.death->stopped && rank.death->kind == "exit")
    account += indented("it ended without hvd::shutdown()");
  if (rank.death && !rank.death->stopped && !rank.death->text.empty() &&
      !is_quoted(job, *rank.death))
    account += indented(rank.death->text);
  if (all_threw_alike(job, rank)) {
    account += indented(text("(all ", count_ranks(job.ranks.size()),
                             " threw the same: which was the first is chance)"));
  }
  if (rank.lost_to_others) account += indented(rank.lost_to_others->text);
  if (is_consequence(rank)) {
    account += indented(rank.loss->text);
    if (rank.loss->code == kShutdownStatus)
      account += indented(
          "(ranks with uneven numbers of batches call hvd::join() before hvd::shutdown())");
  }
  return account;
}

std::string last_lines(const JobRecord& job, int rank) {
  if (job.tail_lines == 0) return {};
  if (job.stderr_tail.empty())
    return indented(text("rank ", job.first_rank + rank, " wrote nothing to stderr"));
  std::string quoted = indented(text("last stderr lines of rank ", job.first_rank + rank, ":"));
  for (const std::string& line : job.stderr_tail) quoted += indented("| " + line);
  return quoted;
}

/// Whether the rank's agent never reported its end: the connection broke, or no report came.
bool is_lost(const RankRecord& rank) { return rank.connected && !rank.ended; }

bool never_started(const RankRecord& rank) { return !rank.connected; }

bool stopped_by_us(const RankRecord& rank) { return rank.ended && rank.ended->stopped; }

/// Lists the ranks without a report of their end, except `except`, which is named as the cause and
/// has its own line.
std::string lost_line(const JobRecord& job, int except) {
  const std::vector<int> lost = without(ranks_where(job, is_lost), except);
  return lost.empty() ? "" : indented("also lost without a report: " + counted(job, lost));
}

/// "host a (ranks 0 and 1) or host b (ranks 2 and 3)"
std::string hosts_of(const JobRecord& job, const std::vector<int>& ranks) {
  std::vector<std::pair<std::string, std::vector<int>>> hosts;
  for (const int rank : ranks) {
    const std::string& name = job.rank(rank).host;
    if (hosts.empty() || hosts.back().first != name) hosts.emplace_back(name, std::vector<int>{});
    hosts.back().second.push_back(rank);
  }
  std::vector<std::string> parts;
  for (const auto& [name, members] : hosts)
    parts.push_back(text("host ", name, " (", rank_list(numbers(job, members)), ")"));
  return join_text(parts, " or ");
}

/// The hosts of `ranks` that the starter may have lost, as a text; empty when they are not known.
std::string suspects_of(const JobRecord& job, std::vector<int> ranks) {
  std::erase_if(ranks, [&](int rank) {
    const std::string& name = job.rank(rank).host;
    return std::find(job.suspect_hosts.begin(), job.suspect_hosts.end(), name) ==
           job.suspect_hosts.end();
  });
  return hosts_of(job, ranks);
}

/// The lost ranks on other hosts, if rank `blamed` ended because of a loss; otherwise empty. Those
/// hosts, or the network to them, are then the cause.
std::vector<int> lost_elsewhere(const JobRecord& job, int blamed) {
  const RankRecord& rank = job.rank(blamed);
  std::vector<int> lost;
  if (!is_consequence(rank)) return lost;
  for (const int other : ranks_where(job, is_lost)) {
    if (job.rank(other).host != rank.host) lost.push_back(other);
  }
  return lost;
}

std::string stopped_line(const JobRecord& job, int blamed) {
  const std::vector<int> others = without(ranks_where(job, stopped_by_us), blamed);
  const std::vector<int> followed = without(ranks_where(job, failed_alone), blamed);
  const std::vector<int> absent = ranks_where(job, never_started);
  const double took = static_cast<double>(job.ended_ns - job.stop_ns) / 1e9;
  std::string line = "hvdrun: ";
  if (!followed.empty()) line += counted(job, followed) + " ended after it; ";
  if (!others.empty()) {
    line += text("stopped the other ", counted(job, others), ", which ended ",
                 format_duration(took), " later; ");
  }
  if (!absent.empty()) line += counted(job, absent) + " had not started; ";
  return text(line, "exit code ", exit_code(job), "\n");
}

std::string failure_message(const JobRecord& job, int index) {
  const RankRecord& rank = job.rank(index);
  const double ran = static_cast<double>(*fault_time(rank) - rank.connected_ns) / 1e9;
  std::string message =
      text("hvdrun: rank ", job.first_rank + index, " failed first: ", describe_end(job, index),
           "  ", where(rank), "  after ", format_duration(ran), "\n");
  if (const std::string advice = hint(rank); !advice.empty())
    message += indented(text("(", advice, ")"));
  message += own_account(job, rank) + lost_line(job, index) + last_lines(job, index);
  const std::vector<int> lost = lost_elsewhere(job, index);
  if (lost.empty()) return message + stopped_line(job, index);
  return text(message, "hvdrun: lost ", hosts_of(job, lost),
              ": no sign of life; it died, or the network to it is cut; exit code ", exit_code(job),
              "\n");
}

std::string leaver_message(const JobRecord& job, int index) {
  const RankRecord& rank = job.rank(index);
  const char* how = " before hvd::init(), where other ranks waited for it  ";
  const char* advice = "(all ranks of a job call hvd::init())";
  if (rank.left) {
    how = " after hvd::shutdown() while other ranks were running  ";
    advice =
        "(the others still needed it: a rank that has no more data calls hvd::join() before "
        "hvd::shutdown())";
  } else if (rank.uses_hvd) {
    how = " but without hvd::shutdown() while other ranks were running  ";
    advice = "(a rank must not leave a job alone: call hvd::shutdown() on every rank)";
  } else if (job.improper_rank == index) {
    how = " but without MPI_Finalize while other ranks were running  ";
    advice = "(a rank must not leave a job alone: call MPI_Finalize() on every rank)";
  }
  return text("hvdrun: rank ", job.first_rank + index, " ended with code 0", how, where(rank), "\n",
              indented(advice), last_lines(job, index), stopped_line(job, index));
}

/// The ranks that had to be killed because the first signal did not end them.
std::vector<int> killed_after_grace(const JobRecord& job) {
  return ranks_where(job, [](const RankRecord& rank) {
    return stopped_by_us(rank) && rank.ended && rank.ended->signal == SIGKILL;
  });
}

std::string stop_message(const JobRecord& job, const std::string& why) {
  std::string message = "hvdrun: " + why;
  if (const auto stopped = ranks_where(job, stopped_by_us); !stopped.empty())
    message += "; stopped " + counted(job, stopped);
  if (const auto killed = killed_after_grace(job); !killed.empty()) {
    message +=
        text("; ", counted(job, killed), " did not end within ", format_duration(job.grace_s),
             " and ", killed.size() == 1 ? "was" : "were", " killed");
  }
  return text(message, "; exit code ", exit_code(job), "\n");
}

std::string unexplained_message(const JobRecord& job) {
  const std::vector<int> missing = ranks_where(job, never_started);
  std::string what =
      text(job.starter, " ended with code ", job.starter_code,
           missing.empty() ? std::string(", though no rank failed")
                           : text(" before ", counted(job, missing), " had started"));
  if (job.lacks_slots) {
    what = "the hosts have too few slots for this job";
  } else if (job.lost_host) {
    const std::string hosts = suspects_of(job, missing);
    what = text(hosts.empty() ? "a host" : hosts, " could not be reached or was lost");
  } else if (job.lacks_executable) {
    what = text(job.starter,
                " did not find hvdrun on every host; it must be installed at the same path on all "
                "of them");
  }
  const std::string message_of_starter = job.starter_wrote
                                             ? text(" (", job.starter, "'s message is above)")
                                             : ", and without a message";
  return text("hvdrun: ", what, message_of_starter, "; exit code ", exit_code(job), "\n");
}

}  // namespace

void apply_notice(RankRecord& rank, Notice notice) {
  if (notice.kind == "init") {
    rank.uses_hvd = rank.in_job = true;
    rank.has_mpi = notice.code == 1;
    rank.left = false;
    rank.death.reset();
    rank.loss.reset();
  } else if (notice.kind == "left") {
    rank.left = true;
  } else if (notice.kind == "over") {
    rank.in_job = false;
  } else if (notice.kind == "loss") {
    if (!rank.loss) rank.loss = std::move(notice);
  } else if (notice.kind == "throw" || notice.kind == "exit") {
    if (!rank.death) rank.death = std::move(notice);
  }
}

bool must_be_held(const RankRecord& rank) { return rank.uses_hvd && !rank.has_mpi; }

std::optional<int> abandoned_rank(const std::vector<RankRecord>& ranks) {
  std::optional<int> left;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].ended) continue;
    if (left || ranks[i].lost_ns) return std::nullopt;
    left = static_cast<int>(i);
  }
  return left && lost_by_all(ranks, *left) ? left : std::nullopt;
}

void mark_lost_ranks(std::vector<RankRecord>& ranks) {
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    RankRecord& rank = ranks[i];
    if (!stopped_by_us(rank) || !lost_by_all(ranks, static_cast<int>(i))) continue;
    for (std::size_t other = 0; other < ranks.size(); ++other) {
      if (other == i) continue;
      const Notice& loss = *ranks[other].loss;
      if (!rank.lost_to_others || loss.time_ns < rank.lost_to_others->time_ns)
        rank.lost_to_others = loss;
    }
  }
}

void mark_ranks_lost_by_mpirun(JobRecord& job) {
  if (job.cause != StopCause::kStarterEnded || job.starter_signal != 0 || !job.lost_host) return;
  for (RankRecord& rank : job.ranks) {
    if (!rank.connected || rank.ended) continue;
    rank.ordered_to_stop = false;
    rank.lost_ns = job.stop_ns;
  }
}

std::optional<int> first_failure(const std::vector<RankRecord>& ranks) {
  std::optional<int> first;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const RankRecord& rank = ranks[i];
    const auto time = fault_time(rank);
    if (!time) continue;
    if (first) {
      const RankRecord& known = ranks[static_cast<std::size_t>(*first)];
      if (std::pair(is_consequence(known), *fault_time(known)) <=
          std::pair(is_consequence(rank), *time))
        continue;
    }
    first = static_cast<int>(i);
  }
  return first;
}

namespace {

/// Whether MPI_Init waited for other ranks until hvd::init() ended the process.
bool waited_in_mpi_init(const RankRecord& rank) {
  constexpr int kMpiDidNotReturn = 75;  // hvd's exit code for that
  return !rank.uses_hvd && rank.ended && rank.ended->code == kMpiDidNotReturn;
}

bool left_before_init(const RankRecord& rank) { return left_silently(rank) && !rank.uses_hvd; }

/// The first rank to leave among those that fulfil the condition.
std::optional<int> first_leaver(const JobRecord& job, bool (*condition)(const RankRecord&)) {
  const auto time_of = [&job](int index) {
    const RankRecord& rank = job.rank(index);
    return rank.death ? rank.death->time_ns : rank.ended->time_ns;
  };
  const std::vector<int> leavers = ranks_where(job, condition);
  const auto first = std::min_element(leavers.begin(), leavers.end(),
                                      [&](int a, int b) { return time_of(a) < time_of(b); });
  return first == leavers.end() ? std::nullopt : std::optional(*first);
}

/// The rank that left without hvd::shutdown(), if no failure explains the other ends: the rank that
/// the first failed rank reported as lost, else the first one that left.
std::optional<int> unannounced_leaver(const JobRecord& job) {
  const auto failed = first_failure(job.ranks);
  if (!failed) return std::nullopt;
  const RankRecord& victim = job.rank(*failed);
  if (waited_in_mpi_init(victim)) return first_leaver(job, left_before_init);
  if (!is_consequence(victim)) return std::nullopt;
  const int lost = victim.loss->about;
  if (lost >= 0 && lost < static_cast<int>(job.ranks.size())) {
    const RankRecord& rank = job.rank(lost);
    if (left_unannounced(rank) || left_silently(rank)) return lost;
  }
  return first_leaver(job, left_unannounced);
}

}  // namespace

std::optional<int> early_leaver(const JobRecord& job) {
  if (const auto leaver = unannounced_leaver(job)) return leaver;
  if (!job.improper_rank || *job.improper_rank < 0 ||
      *job.improper_rank >= static_cast<int>(job.ranks.size())) {
    return std::nullopt;
  }
  // mpirun's text alone is not reliable, so hvdrun's own record must agree.
  const RankRecord& rank = job.rank(*job.improper_rank);
  if (!rank.ended || rank.ended->code != 0) return std::nullopt;
  if (const auto failed = first_failure(job.ranks)) {
    const RankRecord& other = job.rank(*failed);
    const bool needed_it = rank.left && is_consequence(other);
    if (needed_it || *fault_time(other) < rank.ended->time_ns) return std::nullopt;
  }
  return job.improper_rank;
}

namespace {

/// Whether mpirun was killed. The ends of the ranks are then not failures of their own.
bool mpirun_was_killed(const JobRecord& job) {
  return job.cause == StopCause::kStarterEnded && job.starter_signal != 0;
}

std::string warning_for_single_rank_jobs(const JobRecord& job) {
  const bool used = std::any_of(job.ranks.begin(), job.ranks.end(),
                                [](const RankRecord& rank) { return rank.uses_hvd; });
  if (used || job.ranks.size() < 2) return "";
  return text(
      "hvdrun: warning: none of the ", job.ranks.size(),
      " ranks has joined a job of hvd. If the program calls MPI itself (a script, mpi4py), "
      "each rank was an MPI job of its own: use --controller mpi. For a program without hvd "
      "and MPI, --controller ucx turns this warning off\n");
}

bool all_ended_well(const JobRecord& job) {
  return std::all_of(job.ranks.begin(), job.ranks.end(), [](const RankRecord& rank) {
    return rank.ended && rank.ended->code == 0 && !rank.ended->stopped;
  });
}

}  // namespace

bool is_explained(const JobRecord& job) {
  return all_ended_well(job) || mpirun_was_killed(job) || job.cause == StopCause::kReaderGone ||
         job.cause == StopCause::kUserSignal || job.cause == StopCause::kTimeout ||
         early_leaver(job) || first_failure(job.ranks);
}

int exit_code(const JobRecord& job) {
  if (job.cause == StopCause::kUserSignal) return 128 + job.user_signal;
  if (job.cause == StopCause::kTimeout) return static_cast<int>(ExitCode::kTimeout);
  if (job.cause == StopCause::kReaderGone) return static_cast<int>(ExitCode::kReaderGone);
  if (mpirun_was_killed(job)) return static_cast<int>(ExitCode::kInternal);
  // If all ranks ended well, an error of the starter while it cleaned up is not the job's failure.
  if (all_ended_well(job)) return job.output_lost ? static_cast<int>(ExitCode::kOutputLost) : 0;
  if (early_leaver(job)) return 1;
  if (const auto failed = first_failure(job.ranks)) {
    const RankRecord& rank = job.rank(*failed);
    if (!rank.ended || rank.lost_to_others || !lost_elsewhere(job, *failed).empty())
      return static_cast<int>(ExitCode::kUnavailable);
    return announced_failure(rank) && rank.ended->stopped ? rank.death->code : rank.ended->code;
  }
  if (job.cause == StopCause::kStartTimeout) return static_cast<int>(ExitCode::kUnavailable);
  if (job.lacks_slots || job.lost_host) return static_cast<int>(ExitCode::kUnavailable);
  if (job.lacks_executable) return static_cast<int>(ExitCode::kNotFound);
  return job.starter_code != 0 && job.starter_code < 128 ? job.starter_code
                                                         : static_cast<int>(ExitCode::kInternal);
}

std::string final_message(const JobRecord& job) {
  switch (job.cause) {
    case StopCause::kUserSignal:
      return stop_message(job, "got " + signal_name(job.user_signal));
    case StopCause::kTimeout:
      return stop_message(job,
                          "the job ran longer than --timeout " + format_duration(job.timeout_s));
    case StopCause::kReaderGone:
      return stop_message(job, "the reader of " + job.lost_reader + " has closed it");
    case StopCause::kStartTimeout: {
      const std::vector<int> missing = ranks_where(job, never_started);
      if (!first_failure(job.ranks)) {
        return stop_message(job, text(counted(job, missing), " did not start within ",
                                      format_duration(job.timeout_s),
                                      ": see whether every host answers to the remote shell"));
      }
      break;
    }
    case StopCause::kNone:
    case StopCause::kRankFailed:
    case StopCause::kStarterEnded:
      break;
  }
  if (mpirun_was_killed(job)) {
    return stop_message(job, text("mpirun was killed by ", signal_name(job.starter_signal), " (",
                                  job.starter_signal, "), not by hvdrun"));
  }
  if (all_ended_well(job)) {
    if (!job.output_lost) return job.expects_hvd ? warning_for_single_rank_jobs(job) : "";
    return text("hvdrun: the ranks ended well, but part of what they printed was lost; exit code ",
                exit_code(job), "\n");
  }
  if (const auto leaver = early_leaver(job)) return leaver_message(job, *leaver);
  if (const auto failed = first_failure(job.ranks)) return failure_message(job, *failed);
  return unexplained_message(job);
}

}  // namespace hvd::launcher
