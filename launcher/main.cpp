#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "check_build.h"
#include "error.h"
#include "job.h"
#include "launch_plan.h"
#include "mpirun_command.h"
#include "options.h"
#include "supervisor.h"

namespace hvd::launcher {
namespace {

constexpr const char* kSupervise = "--supervise";

/// Each rank costs a connection and, with --output-filename, two files.
void raise_file_limit(int np) {
  rlimit limit{};
  const rlim_t needed = 64 + 4 * static_cast<rlim_t>(np);
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
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
      std::printf("%s\n", format_command(build_mpirun_command(plan.spec)).c_str());
      return 0;
    }
    case Action::kRun:
      break;
  }
  raise_file_limit(options.np);
  return Job(options, make_launch_plan(options)).run();
}

int start(const std::vector<std::string>& arguments) {
  if (arguments.size() >= 3 && arguments[0] == kSupervise && arguments[1] == "--") {
    return run_supervisor({arguments.begin() + 2, arguments.end()});
  }
  const char* hostfile = std::getenv("OMPI_MCA_orte_default_hostfile");
  return run(parse_options(
      arguments, hostfile != nullptr ? std::optional<std::string>(hostfile) : std::nullopt));
}

}  // namespace
}  // namespace hvd::launcher

int main(int argc, char** argv) {
  using namespace hvd::launcher;
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
