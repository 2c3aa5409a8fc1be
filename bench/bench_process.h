#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace hvd::bench {

struct Outcome {
  int exit_code = -1;
  std::string output;
  nlohmann::json document;  ///< written by --json; discarded when the file cannot be parsed
};

/// Runs a shell command. Kills it shortly before the test itself would time out.
Outcome run_command(const std::string& command);
/// Runs hvd-bench under mpirun, with --json.
Outcome run_bench(int ranks, const std::string& arguments);
/// A path for a temporary file that only this process uses.
std::string temporary_path(const std::string& name);

}  // namespace hvd::bench
