#pragma once

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "command/hosts.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// A discovery script cannot be run, has failed, or has printed a bad line.
class DiscoveryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Limit of the slots that a host of an elastic job may get while the job runs.
inline constexpr int kMaxSlotsPerHost = 4096;

/// Parses the output of a discovery script: a line "host" or "host:slots" for each host, where a
/// host is as in parse_host_list(). Empty lines are ignored. Pure.
/// @param slots of a host without a number
/// @throws DiscoveryError that names the line by its number
std::vector<Host> parse_discovered_hosts(std::string_view printed, int slots);

/// Runs the script of --host-discovery-script repeatedly, one process at a time. The script's
/// output goes to memory, so it need not be read while the script runs. Not thread-safe. The
/// destructor ends the script, and does not wait for processes that it has ended.
class HostDiscovery {
 public:
  /// From the end of a run to the next one.
  static constexpr std::chrono::milliseconds kPause{1000};
  /// A run that takes longer is ended.
  static constexpr std::chrono::milliseconds kLimit{10'000};
  /// A run that prints more bytes is ended.
  static constexpr std::size_t kMaxOutputBytes = std::size_t{1} << 20;

  /// @param command the script and its arguments, not empty
  /// @param slots of a host without a number
  HostDiscovery(std::vector<std::string> command, int slots,
                std::chrono::milliseconds limit = kLimit);
  HostDiscovery(const HostDiscovery&) = delete;
  HostDiscovery& operator=(const HostDiscovery&) = delete;
  ~HostDiscovery() { end_run(); }

  /// Runs the script once, and waits for it. @throws DiscoveryError
  std::vector<Host> run();

  /// Starts the script when it is due, and checks whether it has ended. Call it no later than
  /// next_deadline(), and after SIGCHLD. Returns the hosts from a run that has ended. @throws
  /// DiscoveryError
  std::optional<std::vector<Host>> step(Deadline now);
  Deadline next_deadline() const {
    return pid_ > 0 ? std::min(ends_at_, size_check_at_) : starts_at_;
  }

 private:
  void start(Deadline now);
  void end_run();
  void reap();
  bool prints_too_much() const;

  const std::vector<std::string> command_;
  const int slots_;
  const std::chrono::milliseconds limit_;
  pid_t pid_ = -1;             ///< -1: it does not run
  std::vector<pid_t> former_;  ///< runs that were ended, until they are reaped
  UniqueFd out_, err_;
  Deadline starts_at_ = {}, ends_at_ = {}, size_check_at_ = {};
};

}  // namespace hvd::launcher
