#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "command/launch_plan.h"
#include "command/options.h"
#include "processes/host_supervisor.h"
#include "processes/job.h"
#include "processes/job_starter.h"
#include "processes/supervisor.h"
#include "system/error.h"
#include "system/process.h"
#include "system/text.h"
#include "version.h"

namespace hvd::launcher {
namespace {

constexpr const char* kSupervise = "--supervise";
constexpr const char* kSuperviseHost = "--supervise-host";

/// Each rank costs a connection and, with --output-filename, two files. mpirun needs about as many.
void raise_file_limit(const LaunchOptions& options) {
  rlimit limit{};
  const rlim_t needed = 40 + static_cast<rlim_t>(options.np) * (options.output_folder ? 4 : 2);
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  if (limit.rlim_max < needed) {
    throw LaunchError(
        ExitCode::kUnavailable,
        text("too few file descriptors: expected at least ", needed, " for -np ", options.np,
             ", got a limit of ", limit.rlim_max, "; raise it (ulimit -Hn)"));
  }
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

/// Opens /dev/null for each closed standard descriptor, because the next open() would reuse the
/// descriptor's number. Reads from it return end of file, and writes fail as on a closed one.
void occupy_standard_descriptors() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    if (::open("/dev/null", O_RDONLY) < 0) std::_Exit(static_cast<int>(ExitCode::kInternal));
  }
}

/// Blocks SIGUSR1, which requests a state dump and would end hvdrun before it has a job to forward
/// the signal to.
void block_state_dumps() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR1);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
}

/// Runs a program. Returns its stdout and stderr, and its exit code.
std::pair<std::string, int> output_of(const std::vector<std::string>& argv) {
  Pipe output = make_pipe();
  SpawnOptions options;
  options.argv = argv;
  options.environment = current_environment();
  options.stdout_fd = output.write_end.get();
  options.stderr_fd = output.write_end.get();
  const SpawnResult child = spawn(options);
  if (child.error != 0) return {std::strerror(child.error), 127};
  output.write_end.reset();
  std::string printed;
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t count = ::read(output.read_end.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    printed.append(buffer.data(), static_cast<std::size_t>(count));
  }
  return {std::move(printed), wait_for(child.pid).code};
}

std::string first_line(const std::string& lines) {
  return std::string(trim(lines.substr(0, lines.find('\n'))));
}

/// The output of --check-build: the versions of hvdrun, mpirun and LibTorch, and hvd::build_info(),
/// which lists the parts that the runtime was built with and the reasons for missing ones.
///
/// A separate program beside hvdrun, hvd-build-info, loads the runtime and prints its information.
/// hvdrun runs once per rank and should not load MPI, and a runtime that cannot be loaded costs
/// only one line of this report.
std::string check_build(const std::string& mpirun) {
  std::string report = text("hvdrun: ", kVersion, "\n");
  if (const ProgramSearch found = find_program(mpirun); found.executable) {
    report +=
        text("mpirun: ", found.path, ", ", first_line(output_of({mpirun, "--version"}).first));
  } else {
    report += text("mpirun: not found: expected '", mpirun,
                   "' in PATH; install Open MPI, MPICH or Intel MPI, or name its mpirun "
                   "with HVD_MPIRUN; hvdrun --controller ucx does not need it");
  }
  report +=
      text("\nLibTorch: ", *kTorchVersion != '\0' ? kTorchVersion : "not built: HVD_WITH_TORCH=OFF",
           "\n");
  const auto helper = std::filesystem::path(own_executable()).parent_path() / "hvd-build-info";
  if (::access(helper.c_str(), X_OK) != 0)
    return text(report, "runtime: not found: expected ", helper, "\n");
  const auto [printed, code] = output_of({helper});
  if (code == 0) return report + printed;
  return text(report, "runtime: ", helper, " ended with code ", code, ": ", first_line(printed),
              "\n");
}

int run(const LaunchOptions& options) {
  switch (options.action) {
    case Action::kPrint:
      std::fputs(options.text.c_str(), stdout);
      return 0;
    case Action::kCheckBuild:
      std::fputs(check_build(mpirun_name()).c_str(), stdout);
      return 0;
    case Action::kDryRun: {
      const auto starter = make_starter(make_launch_plan(options), false, [](std::string_view) {});
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
  block_state_dumps();
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
