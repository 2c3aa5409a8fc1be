#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "command/check_build.h"
#include "command/launch_plan.h"
#include "command/options.h"
#include "processes/host_supervisor.h"
#include "processes/job.h"
#include "processes/job_starter.h"
#include "processes/supervisor.h"
#include "system/error.h"

namespace hvd::launcher {
namespace {

constexpr const char* kSupervise = "--supervise";
constexpr const char* kSuperviseHost = "--supervise-host";

/// Each rank costs a connection and, with --output-filename, two files. mpirun needs about as many.
void raise_file_limit(const Options& options) {
  rlimit limit{};
  const rlim_t needed = 40 + static_cast<rlim_t>(options.np) * (options.output_folder ? 4 : 2);
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  if (limit.rlim_max < needed) {
    throw LaunchError(ExitCode::kUnavailable,
                      "too few file descriptors: expected at least " + std::to_string(needed) +
                          " for -np " + std::to_string(options.np) + ", got a limit of " +
                          std::to_string(limit.rlim_max) + "; raise it (ulimit -Hn)");
  }
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

/// The next open() would reuse the number of a closed standard descriptor. Another file takes the
/// number: reads from it return end of file, and writes to it fail as on a closed descriptor.
void occupy_standard_descriptors() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    if (::open("/dev/null", O_RDONLY) < 0) std::_Exit(static_cast<int>(ExitCode::kInternal));
  }
}

/// Blocks requests for a state dump (SIGUSR1), which would end hvdrun before it has a job to pass
/// them on to.
void hold_state_dumps() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR1);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
}

int run(const Options& options) {
  switch (options.action) {
    case Action::kPrint:
      std::fputs(options.text.c_str(), stdout);
      return 0;
    case Action::kCheckBuild:
      std::fputs(check_build(mpirun_name()).c_str(), stdout);
      return 0;
    case Action::kDryRun: {
      const LaunchPlan plan = make_launch_plan(options);
      const auto starter = make_starter(plan, plan.spec, false, [](std::string_view) {});
      for (const std::string& command : starter->commands()) std::printf("%s\n", command.c_str());
      return 0;
    }
    case Action::kRun:
      break;
  }
  raise_file_limit(options);
  return Job(options, make_launch_plan(options)).run();
}

int start(const std::vector<std::string>& arguments) {
  if (arguments.size() >= 3 && arguments[0] == kSupervise && arguments[1] == "--") {
    return run_supervisor({arguments.begin() + 2, arguments.end()});
  }
  if (arguments == std::vector<std::string>{kSuperviseHost}) return run_host_supervisor();
  const char* hostfile = std::getenv("OMPI_MCA_orte_default_hostfile");
  return run(parse_options(
      arguments, hostfile != nullptr ? std::optional<std::string>(hostfile) : std::nullopt));
}

}  // namespace
}  // namespace hvd::launcher

int main(int argc, char** argv) {
  using namespace hvd::launcher;
  hold_state_dumps();
  occupy_standard_descriptors();
  try {
    return start({argv + 1, argv + argc});
  } catch (const LaunchError& error) {
    std::fprintf(stderr, "hvdrun: %s\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hvdrun: internal error: %s\n", error.what());
    return static_cast<int>(ExitCode::kInternal);
  }
}
