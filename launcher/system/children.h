#pragma once

#include <functional>
#include <string>
#include <vector>

namespace hvd::launcher {

/// The work of a child process: a program, or a function of this process.
struct ChildCommand {
  std::vector<std::string> argv = {};  ///< argv[0] is looked up in PATH
  /// Runs instead of a program, for example because it has side effects, and writes its output to
  /// the descriptor.
  std::function<void(int fd)> function = {};
};

struct ChildResult {
  int code = 0;  ///< the exit code, 128 + signal, or 127 if it cannot be run
  bool timed_out = false;
  std::string out = {};
  std::string err = {};
};

/// Runs processes side by side, with an empty stdin, and returns their output. A process that still
/// runs after `seconds` gets SIGTERM, and after another second SIGKILL. Call it from a process with
/// one thread. @throws LaunchError (kInternal) when a process cannot be made.
std::vector<ChildResult> run_children(const std::vector<ChildCommand>& commands, double seconds);

}  // namespace hvd::launcher
