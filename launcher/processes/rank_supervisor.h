#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "reports/program_sockets.h"
#include "reports/report.h"
#include "system/process.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// A connection to hvdrun that has been welcomed.
struct LauncherConnection {
  UniqueFd fd;
  FrameDecoder decoder;
  Welcome welcome;
  long long clock_offset_ns = 0;  ///< hvdrun's clock minus this host's
};
/// Proves to hvdrun that this process has the token, and checks hvdrun's proof, before it sends
/// anything else. Empty if the other side is not this job's hvdrun.
/// @param same_clock whether both processes run on the same host
std::optional<LauncherConnection> introduce(UniqueFd fd, Hello hello, const std::string& token,
                                            bool same_clock, int timeout_ms);

/// The signals that a supervisor and its front process read from a signalfd; they must be blocked
/// before either starts.
sigset_t supervised_signals();

/// Runs one rank's program and reports to hvdrun until hvdrun releases it. Not thread-safe; one
/// thread, one poll loop, which never blocks on the program, on hvdrun or on a full pipe.
///
///   waiting --order to start--> running --program ended--> reported --pipes at their end-->
///   drained --release, or connection lost--> done
///
/// A supervisor that is stopped while it waits ends without a program.
class RankSupervisor {
 public:
  /// Makes the program's environment from the start order. The order's `address` is never empty.
  using MakeEnvironment = std::function<std::vector<std::string>(const StartOrder&)>;

  /// @param rendezvous the socket through which the rank's processes reach hvdrun's rendezvous, if
  /// there is one
  /// @param use_terminal makes the program's stdout a pseudo-terminal, so that its C library writes
  /// line by line
  RankSupervisor(LauncherConnection connection, std::optional<RendezvousSocket> rendezvous,
                 bool use_terminal);
  /// Runs the program. Returns its exit code. @param cpus the program is bound to these; empty: it
  /// is not bound
  int run(const std::vector<std::string>& program, const MakeEnvironment& environment,
          const std::vector<int>& cpus);

 private:
  using Clock = std::chrono::steady_clock;
  using TimePoint = Clock::time_point;

  void start(const std::vector<std::string>& program, const MakeEnvironment& environment,
             const std::vector<int>& cpus);
  UniqueFd open_stdout(UniqueFd& program_end) const;
  void wait_for_events();
  void on_timers();
  void on_signals();
  void on_hvdrun_readable();
  void process_frames();
  void on_hvdrun_frame(const Frame& frame);
  void on_connection_lost();
  /// Reads once. Returns whether there was output.
  bool relay(UniqueFd& from, FrameType type);
  void flush();
  void relay_notices();
  void relay_rendezvous();
  void detect_end();
  void report_if_ended();
  void finish_output();
  bool may_read() const;
  void stop(int signal, int kill_after_ms);
  void stop_later(const SignalOrder& order);
  void signal_program(int signal) const;
  void pass_on(int signal) const;
  std::optional<TimePoint> next_deadline() const;
  bool done() const;

  LauncherConnection connection_;
  const bool use_terminal_;
  UniqueFd signals_;
  NoticeSocket notices_;
  std::optional<RendezvousSocket> rendezvous_;
  UniqueFd stdout_, stderr_;
  pid_t program_ = -1;
  std::optional<StartOrder> start_;
  std::string outgoing_;
  std::optional<Ended> ended_;
  bool reported_ = false;
  bool drained_ = false;
  long long credit_ = 0;  ///< bytes of output that hvdrun accepts
  bool released_ = false;
  bool stopped_ = false;
  SignalOrder later_{
      .signal = SIGTERM, .stop = true, .kill_after_ms = -1};  ///< the order that is due at stop_at_
  std::optional<TimePoint> stop_at_, kill_at_, drain_until_;
};

}  // namespace hvd::launcher
