#pragma once

#include <stdexcept>
#include <string>

namespace hvd::launcher {

/// hvdrun's own exit codes; any other code is a rank's. docs/launching.md lists them for users.
enum class ExitCode : int {
  kUsage = 2,
  kUnavailable = 69,  ///< not enough slots, or a host cannot be reached
  kInternal = 70,
  kOutputLost = 74,   ///< the ranks succeeded, but not all their output could be written
  kTooFewRanks = 75,  ///< of an elastic job: too few ranks for too long, or all states are lost
  kLimit = 76,        ///< of an elastic job: a limit of resets, restarts or failures
  kTimeout = 124,
  kCannotRun = 126,
  kNotFound = 127,
  kReaderGone = 141,  ///< as if SIGPIPE had ended hvdrun
};

/// Ends hvdrun: it prints what(), and exits with exit_code(). The text gives the failure, the
/// expected and the found value, and advice.
class LaunchError : public std::runtime_error {
 public:
  LaunchError(ExitCode code, const std::string& message)
      : std::runtime_error(message), exit_code_(static_cast<int>(code)) {}
  int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

}  // namespace hvd::launcher
