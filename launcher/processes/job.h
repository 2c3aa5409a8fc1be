#pragma once

#include <sys/types.h>

#include <asio/io_context.hpp>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "command/launch_plan.h"
#include "command/options.h"
#include "processes/job_output.h"
#include "processes/job_starter.h"
#include "processes/rank_rendezvous.h"
#include "reports/outcome.h"
#include "reports/rank_output.h"
#include "reports/report.h"
#include "reports/report_server.h"
#include "system/event_loop.h"

namespace hvd::launcher {

/// The location of a rank, as its agent has reported it.
struct RankLocation {
  std::string host = {};
  int local_rank = 0;
  std::string address = {};  ///< numeric, from which the agent has connected
  int master_port = 0;       ///< a port that the agent reserves for rank 0
};

/// The start order of each rank, once all are connected: the address of rank 0, and the layout of
/// the ranks on the hosts. Hosts are distinguished by their names. Pure.
/// @param locations in rank order
std::vector<StartOrder> plan_starts(const std::vector<RankLocation>& locations);

/// Makes the folder for the logs of the ranks as torchrun does, DIR/ID_RANDOM, if there will be
/// logs. Without --log-dir, DIR is TMPDIR. @throws LaunchError
std::filesystem::path make_log_folder(const LaunchOptions& options);

/// One start of all ranks of a job that may be restarted.
struct Attempt {
  int number = 0;                   ///< 0 is the first
  std::filesystem::path logs = {};  ///< from make_log_folder()
};

/// One run of a program, from start to the last message. Not thread-safe: one thread, one loop.
///
///   running  --rank failed, signal, timeout, starter ended-->  stopping
///   stopping --all ranks settled-->                            released
///   released --starter ended-->                                over
///   running  --every rank ended well, starter ended-->         over
///
/// A rank is settled when its agent has reported its program's end, or is lost. Failed ranks, and
/// ranks that use hvd, are held until they are released. This way mpirun does not detect a failure,
/// and does not stop ranks, before hvdrun has stopped the ranks with the grace period that it
/// promises.
///
/// A rank runs as long as the connection to its agent exists. The starter of the agents may end
/// earlier: the ranks outlive a remote shell, but not mpirun.
class Job final : private RankObserver {
 public:
  /// @throws LaunchError.
  Job(const LaunchOptions& options, LaunchPlan plan, const Attempt& attempt);
  /// Returns hvdrun's exit code. @throws LaunchError when the starter of the ranks cannot be run.
  int run();
  /// After run(): whether the job has ended because a rank has failed, and the user has not
  /// interrupted it.
  bool may_restart() const noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  using TimePoint = Clock::time_point;

  void on_hello(const Hello& hello, const std::string& address) override;
  void on_started(int rank, const ProgramStarted& started) override;
  void on_notice(int rank, const Notice& notice) override;
  void on_rendezvous(int rank, const RendezvousBytes& bytes) override;
  void on_output(int rank, Stream stream, std::string_view bytes) override;
  void on_ended(int rank, const Ended& ended) override;
  void on_drained(int rank) override;
  void on_lost(int rank) override;

  void start_agents();
  void admit(const Seat& seat, const Hello& hello, const std::string& address);
  void after_events();
  std::optional<TimePoint> next_deadline();
  void on_timers();
  void on_signal(int signal);
  void on_user_signal(int signal);
  void check_starter();
  void on_last_starter_end();
  void await_last_reports();
  void begin_stop(StopCause cause, int signal, double grace_s);
  void order_stop(int rank);
  void order_starts();
  void kill_now();
  void release_if_settled();
  bool stopping() const { return record_.cause != StopCause::kNone; }
  bool over() const;
  bool is_settled(int rank) const;
  bool all_settled() const;
  bool all_connected() const;
  int size() const { return options_.np; }
  void on_reader_gone(const std::string& stream);
  void collect_outcome();
  int finish();

  const LaunchOptions options_;
  LaunchPlan plan_;
  asio::io_context io_{1};
  Alarm alarm_{io_};
  JobOutput output_;
  std::vector<std::unique_ptr<RankOutput>> outputs_;
  ReportServer server_;
  RankRendezvous rendezvous_;
  std::vector<RankLocation> locations_;  ///< by rank
  JobRecord record_;
  std::unique_ptr<JobStarter> starter_;

  std::optional<SignalReader> signals_;
  bool starter_ended_ = false;

  int stop_signal_ = 0;
  int stop_grace_ms_ = 0;
  TimePoint user_signal_at_{};
  bool finishing_ = false;    ///< only the last output is left
  bool interrupted_ = false;  ///< by the user
  bool hurried_ = false;      ///< the user has sent a second signal
  std::optional<TimePoint> timeout_at_, start_timeout_at_, end_starter_at_, kill_starter_at_,
      give_up_at_;
};

}  // namespace hvd::launcher
