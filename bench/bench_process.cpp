#include "bench/bench_process.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "support/run_command.h"

namespace hvd::bench {

std::string temporary_path(const std::string& name) {
  return (std::filesystem::temp_directory_path() /
          ("hvd-bench-smoke." + std::to_string(::getpid()) + "." + name))
      .string();
}

Outcome run_command(const std::string& command) {
  testing::CommandResult result = testing::run_command(command, 50);
  return {.exit_code = result.exit_code, .output = std::move(result.output), .document = {}};
}

Outcome run_bench(int ranks, const std::string& arguments) {
  const std::string path = temporary_path("json");
  Outcome outcome =
      run_command(HVD_MPIEXEC " --oversubscribe --bind-to none -np " + std::to_string(ranks) +
                  " " HVD_BENCH " " + arguments + " --json " + path);
  std::ifstream file(path);
  outcome.document = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  std::filesystem::remove(path);
  return outcome;
}

}  // namespace hvd::bench
