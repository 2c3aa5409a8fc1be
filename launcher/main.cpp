#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <asio.hpp>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/elastic_agent.h"
#include "base/text.h"
#include "command/launch_plan.h"
#include "command/options.h"
#include "doctor/doctor.h"
#include "elastic/elastic_job.h"
#include "elastic/host_discovery.h"
#include "mpirun/supervisor.h"
#include "processes/job.h"
#include "processes/job_starter.h"
#include "system/children.h"
#include "system/error.h"
#include "system/process.h"
#include "system/socket.h"
#include "system/text.h"
#include "version.h"

namespace hvd::launcher {
namespace {

constexpr const char* kSupervise = "--supervise";
constexpr const char* kAgent = "--agent";

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

/// Runs a program to its end. Returns its stdout and stderr, and its exit code.
std::pair<std::string, int> output_of(const std::vector<std::string>& argv) {
  constexpr double kNoLimit = 1e9;
  const ChildResult result = run_children({{.argv = argv}}, kNoLimit).front();
  return {result.out + result.err, result.code};
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

/// Whether the endpoint is an address of this machine.
bool is_here(const std::string& host) {
  std::vector<Host> hosts = {{.name = host}};
  mark_local_hosts(hosts, own_names());
  return hosts.front().local;
}

/// Gets this node's rank from the other nodes, if the command line does not give it. A separate
/// program does this, so that hvdrun does not link the runtime. Also sets the master's port, which
/// is `reserved_port` on node 0.
void distribute_ranks(LaunchOptions& options, std::uint16_t reserved_port) {
  NodeOptions& node = *options.node;
  const std::string helper =
      std::filesystem::path(own_executable()).parent_path() / "hvd-node-rank";
  const auto [printed, code] =
      output_of({helper, node.master_address, text(node.master_port), node.run_id, text(node.nodes),
                 text(options.start_timeout_s), text(reserved_port),
                 is_here(node.master_address) ? "1" : "0"});
  const auto words = split_text(trim(printed), ' ');
  const auto rank = parse_number<int>(words.front());
  const auto port = parse_number<int>(words.back());
  if (code != 0 || words.size() != 2 || !rank || !port) {
    throw LaunchError(ExitCode::kUnavailable,
                      text("--rdzv-endpoint ", node.master_address, ":", node.master_port,
                           ": the nodes have not found each other: ", trim(printed)));
  }
  node.rank = *rank;
  node.master_port = *port;
}

/// Starts the ranks, and restarts all of them after one has failed, as often as --max-restarts
/// permits. --timeout covers all attempts together.
int run_attempts(LaunchOptions options) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const double limit_s = options.timeout_s;
  Attempt attempt{.logs = make_log_folder(options)};
  for (;; ++attempt.number) {
    Job job(options, make_launch_plan(options), attempt);
    const int code = job.run();
    if (code == 0 || !job.may_restart() || attempt.number >= options.max_restarts) return code;
    if (limit_s > 0) {
      options.timeout_s = limit_s - std::chrono::duration<double>(Clock::now() - begin).count();
      if (options.timeout_s <= 0) return code;
    }
    std::fprintf(stderr, "hvdrun: all ranks are started again: restart %d of %d\n",
                 attempt.number + 1, options.max_restarts);
  }
}

/// A job whose nodes join and leave while the job runs. The hvdrun that serves the endpoint's port
/// coordinates, and the others join it.
int run_elastic_nodes(const LaunchOptions& options) {
  const NodeOptions& node = *options.node;
  const LaunchPlan plan = make_launch_plan(options);
  const bool here = is_here(node.master_address);
  if (here) {
    try {
      return ElasticJob(options, plan).run();
    } catch (const PortTaken&) {
      // Several nodes run on this host, and another node was first.
    }
  }
  for (const auto& [name, value] : plan.variables) ::setenv(name.c_str(), value.c_str(), 1);
  const std::string secret = environment_variable("HVD_JOB_TOKEN").value_or("");
  ::setenv(kTokenVariable, rendezvous_token(node.run_id, secret).c_str(), 1);
  return run_node_agent({.program = plan.program},
                        {.host = node.master_address,
                         .port = node.master_port,
                         .here = here,
                         .start_timeout_s = options.start_timeout_s},
                        node.processes);
}

/// The first output of the discovery script.
std::vector<Host> discover_hosts(const ElasticOptions& options) {
  try {
    return HostDiscovery(options.discovery, options.slots).run();
  } catch (const DiscoveryError& error) {
    throw LaunchError(ExitCode::kUsage,
                      text("--host-discovery-script ", join_text(options.discovery, " "),
                           ": expected lines "
                           "HOST or HOST:SLOTS, but ",
                           error.what()));
  }
}

int run(LaunchOptions options) {
  if (options.elastic && !options.elastic->discovery.empty())
    options.hosts = discover_hosts(*options.elastic);
  switch (options.action) {
    case Action::kPrint:
      std::fputs(options.text.c_str(), stdout);
      return 0;
    case Action::kCheckBuild:
      std::fputs(check_build(mpirun_name()).c_str(), stdout);
      return 0;
    case Action::kDryRun: {
      asio::io_context io;
      const auto starter =
          make_starter(io, make_launch_plan(options), false, [](std::string_view) {});
      for (const std::string& command : starter->commands()) std::printf("%s\n", command.c_str());
      return 0;
    }
    case Action::kRun:
      break;
  }
  // With --output-filename or --log-dir each rank costs two files. mpirun needs about as many
  // descriptors.
  const auto ranks = static_cast<std::size_t>(options.np);
  const std::size_t files = (options.output_folder ? 2U : 0U) + (options.logs.any() ? 2U : 0U);
  raise_descriptor_limit(40 + ranks * (2 + files), "", text("-np ", options.np));
  if (options.node && options.node->is_elastic()) return run_elastic_nodes(options);
  asio::io_context io;
  std::optional<asio::ip::tcp::acceptor> master;  // keeps the port for rank 0
  if (options.node && !options.node->rank) {
    master = reserve_port(io);
    distribute_ranks(options, port_of(*master));
    if (options.node->rank != 0) master.reset();
  }
  if (options.elastic) return ElasticJob(options, make_launch_plan(options)).run();
  return run_attempts(options);
}

int start(const std::vector<std::string>& arguments) {
  if (arguments.size() >= 3 && arguments[0] == kSupervise && arguments[1] == "--") {
    return run_supervisor({arguments.begin() + 2, arguments.end()});
  }
  if (arguments == std::vector<std::string>{kAgent}) return run_agent();
  if (!arguments.empty() && arguments[0] == "doctor")
    return doctor::run_doctor({arguments.begin() + 1, arguments.end()});
  return run(parse_options(arguments, environment_variable));
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
