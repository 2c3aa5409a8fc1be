#include "bench/bench_process.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>

namespace hvd::bench {

std::string temporary_path(const std::string& name) {
  return (std::filesystem::temp_directory_path() / ("hvd-bench-smoke." + std::to_string(::getpid()) + "." + name)).string();
}

Outcome run_command(const std::string& command) {
  std::FILE* const pipe = ::popen(("timeout -s KILL 50 " + command + " 2>&1").c_str(), "r");
  Outcome outcome;
  std::array<char, 4096> buffer;
  while (const std::size_t size = std::fread(buffer.data(), 1, buffer.size(), pipe)) outcome.output.append(buffer.data(), size);
  const int status = ::pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

Outcome run_bench(int ranks, const std::string& arguments) {
  const std::string path = temporary_path("json");
  Outcome outcome = run_command(HVD_MPIEXEC " --oversubscribe --bind-to none -np " + std::to_string(ranks) + " " HVD_BENCH " " + arguments +
                                " --json " + path);
  std::ifstream file(path);
  outcome.document = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  std::filesystem::remove(path);
  return outcome;
}

}  // namespace hvd::bench
