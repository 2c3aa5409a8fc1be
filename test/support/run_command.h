#pragma once

#include <string>

namespace hvd::testing {

struct CommandResult {
  int exit_code = -1;  ///< 128 + the signal that ended it
  std::string output;  ///< stdout and stderr
};

/// Runs a shell command, and kills it after `seconds` seconds, which should be a little less than
/// the test's own limit.
CommandResult run_command(const std::string& command, int seconds);

}  // namespace hvd::testing
