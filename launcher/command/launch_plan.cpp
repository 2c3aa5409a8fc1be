#include "command/launch_plan.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "base/text.h"
#include "system/error.h"
#include "system/process.h"
#include "system/socket.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

/// Each is set inside an allocation of the batch system that mpirun asks for its hosts.
constexpr std::array kBatchSystems = {"SLURM_JOB_ID", "PBS_NODEFILE", "PBS_JOBID", "LSB_JOBID",
                                      "LOADL_HOSTFILE"};

/// The variable that shows an allocation; empty: no allocation.
std::string allocation() {
  const auto* const found =
      std::find_if(kBatchSystems.begin(), kBatchSystems.end(),
                   [](const char* name) { return std::getenv(name) != nullptr; });
  return found == kBatchSystems.end() ? "" : *found;
}

ControllerChoice find_controller(const Options& options) {
  const char* const named = std::getenv("HVD_MPIRUN");
  ControllerFacts facts;
  facts.batch_system = allocation();
  facts.mpi_args = !options.mpi_args.empty();
  facts.names_mpirun = named != nullptr && *named != '\0';
  facts.needs_mpi = program_that_needs_mpi(options.program);
  facts.has_mpirun = find_program(mpirun_name()).executable;
  facts.has_ucx = finds_ucx;
  return choose_controller(options.controller, facts);
}

/// mpirun asks the batch system for the hosts. hvdrun does not, and must not put all ranks onto one
/// of them.
void require_hosts(const LaunchPlan& plan) {
  if (plan.controller.controller != Controller::kUcx || !plan.spec.managed) return;
  throw LaunchError(ExitCode::kUsage,
                    "--controller ucx: expected the hosts of this allocation (" + allocation() +
                        " is set), as in -H h1:2,h2:2 or --hostfile; got none; or leave the "
                        "hosts to mpirun: --controller mpi");
}

void check_program(const std::string& program) {
  const ProgramSearch found = find_program(program);
  if (found.executable) return;
  if (found.found) {
    throw LaunchError(ExitCode::kCannotRun,
                      "program '" + program + "' cannot be run: expected an executable file, got " +
                          found.path + " without execute permission; see chmod +x");
  }
  const bool has_path = program.find('/') != std::string::npos;
  throw LaunchError(
      ExitCode::kNotFound,
      "program '" + program + "' not found: expected an executable file" +
          (has_path ? "" : " in PATH (for one in this folder, write ./" + program + ")"));
}

bool has_local_rank(const LaunchPlan& plan) {
  if (plan.spec.local_only) return true;
  return std::any_of(plan.spec.hosts.begin(), plan.spec.hosts.end(),
                     [&](const Host& host) { return is_local_host(host.name, plan.hostname); });
}

void add_exports(const Options& options, LaunchSpec& spec) {
  for (const auto& [name, value] : options.exports) {
    spec.exports.push_back(name);
    if (value) {
      spec.variables.emplace_back(name, *value);
    } else if (std::getenv(name.c_str()) == nullptr) {
      throw LaunchError(ExitCode::kUsage,
                        "-x " + name +
                            ": expected a variable of the environment, got one that is unset; "
                            "export it, or give its value: -x " +
                            name + "=VALUE");
    }
  }
}

void add_variables(const Options& options, LaunchPlan& plan) {
  auto& variables = plan.spec.variables;
  if (!plan.spec.local_only)
    variables.emplace_back(kAddressesVariable, join_text(reachable_addresses(), ","));
  variables.emplace_back(kHostVariable, plan.hostname);
  variables.emplace_back(kBindVariable, std::string(to_string(effective_bind(plan.spec))));
  variables.emplace_back(kControllerVariable, std::string(to_string(plan.controller.controller)));
  if (!plan.spec.exports.empty())
    variables.emplace_back(kExportsVariable, join_text(plan.spec.exports, ","));
  variables.emplace_back(kOutputTtyVariable, ::isatty(STDOUT_FILENO) == 1 ? "1" : "0");
  if (options.timeline) variables.emplace_back("HVD_TIMELINE", *options.timeline);
}

}  // namespace

LaunchPlan make_launch_plan(const Options& options) {
  LaunchPlan plan;
  plan.hostname = own_hostname();
  LaunchSpec& spec = plan.spec;
  spec.mpirun = mpirun_name();
  spec.np = options.np;
  spec.hosts = options.hosts;
  spec.managed = options.hosts.empty() && !allocation().empty();
  spec.local_only = !spec.managed && all_local(options.hosts, plan.hostname);
  spec.bind = options.bind;
  spec.mpi_args = options.mpi_args;
  plan.controller = find_controller(options);
  require_hosts(plan);
  spec.remote_shell = options.remote_shell;
  if (spec.remote_shell.empty() && plan.controller.controller == Controller::kUcx)
    spec.remote_shell = {"ssh", "-x", "-T", "-o", "BatchMode=yes"};
  spec.hvdrun = own_executable();
  spec.program = options.program;
  spec.as_root = ::geteuid() == 0;
  spec.environment = current_environment();
  add_exports(options, spec);
  add_variables(options, plan);
  if (has_local_rank(plan)) check_program(options.program.front());
  return plan;
}

std::string mpirun_name() {
  const char* name = std::getenv("HVD_MPIRUN");
  return name != nullptr && *name != '\0' ? name : "mpirun";
}

}  // namespace hvd::launcher
