#pragma once

#include <sys/types.h>

#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "reports/program_sockets.h"
#include "reports/report.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Runs the program of one rank and reports to hvdrun until hvdrun releases the rank. Not
/// thread-safe. Never blocks on the program, on hvdrun or on a full pipe.
///
///   waiting --order to start--> running --program ended--> reported --pipes at their end-->
///   drained --release, or connection lost--> done
///
/// A rank that is stopped while it waits ends without starting a program.
class RankProcess {
 public:
  /// The agent's connection to hvdrun.
  class Link {
   public:
    virtual ~Link() = default;
    /// Drops the frame if the connection is lost.
    virtual void send(FrameType type, int rank, std::string_view payload) = 0;
    /// Whether the queue is short enough to read from the programs' rendezvous.
    virtual bool has_room() const = 0;
  };
  struct Program {
    std::vector<std::string> argv = {};
    std::vector<int> cpus = {};  ///< it is bound to these; empty: it is not bound
    int stdin_fd = -1;           ///< -1: the agent's own
    int inherited_fd = -1;       ///< stays open in the program; -1: none
    /// Reports the end of the program before its last output, which others need not wait for.
    bool reports_at_once = false;
    /// Called when the program has ended, before its end is reported.
    std::function<void()> on_end = [] {};
    /// The time from SIGTERM to SIGKILL when the connection to hvdrun is lost.
    std::chrono::milliseconds orphan_grace{500};
    /// Makes the program's standard output a pseudo-terminal, so that its C library writes line by
    /// line.
    bool use_terminal = false;
    /// Makes its environment, from the start order and HVD_INIT_METHOD. Empty: the ranks find each
    /// other through MPI.
    std::function<std::vector<std::string>(const StartOrder&, const std::string& init_method)>
        make_environment = {};
  };

  /// @param has_rendezvous the ranks find each other through hvdrun
  /// @throws LaunchError (kInternal) when a socket cannot be made.
  RankProcess(asio::io_context& io, int rank, Program program, bool has_rendezvous, Link& link);

  int rank() const noexcept { return rank_; }
  /// The process of the program; -1 if it does not run.
  pid_t pid() const noexcept { return ended_ ? -1 : pid_; }
  /// Sets hvdrun's answer to the hello. @param clock_offset_ns hvdrun's clock minus this host's
  void welcome(const Welcome& welcome, long long clock_offset_ns);
  /// @throws ProtocolError
  void on_frame(const Frame& frame);
  /// Stops the program, because hvdrun is out of reach.
  void on_connection_lost();
  /// Call this when a child of the agent has ended.
  void on_child_ended() { detect_end(); }
  /// Call this when the agent has received a signal.
  void on_signal(int signal);
  /// Handles what is due now. Call this after every event.
  void step();
  std::optional<Deadline> next_deadline() const;
  /// Whether the rank has ended, its output has been read, and hvdrun has released it or is out of
  /// reach.
  bool done() const { return ended_ && drained_ && (released_ || !connected_); }
  /// The program's exit code, or 128 + signal. Valid once done() returns true.
  int exit_code() const { return ended_->code; }
  /// Kills the processes that the program left running in its group, and reaps the program.
  void clean_up();

 private:
  struct Output {
    FrameType type;
    asio::posix::stream_descriptor pipe;
    bool waiting = false;
  };

  void start(StartOrder order);
  UniqueFd open_stdout(UniqueFd& program_end) const;
  static void assign(Output& output, UniqueFd pipe);
  void close_outputs();
  void wait(Output& output);
  /// Reads once. Returns whether there was output.
  bool relay(Output& output);
  void relay_notices();
  void detect_end();
  void end_without_program(Ended ended);
  void report_if_ended();
  void finish_output();
  bool has_output() const { return outputs_[0].pipe.is_open() || outputs_[1].pipe.is_open(); }
  void stop(int signal, int kill_after_ms);
  void stop_later(const SignalOrder& order);
  void signal_program(int signal) const;
  void pass_on(int signal) const;
  void send(FrameType type, std::string_view payload) { link_.send(type, rank_, payload); }

  const int rank_;
  const Program program_;
  Link& link_;
  NoticeSocket notices_;
  std::optional<RendezvousSocket> rendezvous_;
  Output outputs_[2];
  Welcome welcome_;
  long long clock_offset_ns_ = 0;
  bool connected_ = true;
  pid_t pid_ = -1;
  std::optional<Ended> ended_;
  bool reported_ = false, drained_ = false, released_ = false, stopped_ = false;
  long long credit_ = 0;  ///< bytes of output that hvdrun accepts
  SignalOrder later_;     ///< the order that is due at stop_at_
  std::optional<Deadline> stop_at_, kill_at_, drain_until_;
};

}  // namespace hvd::launcher
