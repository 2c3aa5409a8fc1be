#include "command/launch_plan.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "base/text.h"
#include "command/mpirun_command.h"
#include "system/error.h"
#include "system/process.h"
#include "system/socket.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

/// Variables of the batch systems that mpirun gets its hosts from. Each is set inside an
/// allocation.
constexpr std::array kBatchSystems = {"SLURM_JOB_ID", "PBS_NODEFILE", "PBS_JOBID", "LSB_JOBID",
                                      "LOADL_HOSTFILE"};

/// The variable that shows an allocation; empty: no allocation.
std::string allocation() {
  const auto* const found =
      std::find_if(kBatchSystems.begin(), kBatchSystems.end(),
                   [](const char* name) { return std::getenv(name) != nullptr; });
  return found == kBatchSystems.end() ? "" : *found;
}

ControllerChoice find_controller(const LaunchOptions& options) {
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

/// Requires the user to name the hosts if hvdrun starts the ranks in an allocation. mpirun gets the
/// hosts from the batch system, but hvdrun cannot, and it must not put all ranks onto one host.
void require_hosts(const LaunchPlan& plan) {
  if (plan.controller.controller != Controller::kUcx || !plan.managed) return;
  throw LaunchError(ExitCode::kUsage,
                    text("--controller ucx: expected the hosts of this allocation (", allocation(),
                         " is set), as in -H h1:2,h2:2 or --hostfile; got none; or leave the hosts "
                         "to mpirun: --controller mpi"));
}

void check_program(const std::string& program) {
  const ProgramSearch found = find_program(program);
  if (found.executable) return;
  if (found.found) {
    throw LaunchError(
        ExitCode::kCannotRun,
        text("program '", program, "' cannot be run: expected an executable file, got ", found.path,
             " without execute permission; see chmod +x"));
  }
  const bool has_path = program.find('/') != std::string::npos;
  throw LaunchError(
      ExitCode::kNotFound,
      text("program '", program, "' not found: expected an executable file",
           has_path ? "" : text(" in PATH (for one in this folder, write ./", program, ")")));
}

bool has_local_rank(const LaunchPlan& plan) {
  if (plan.local_only) return true;
  return std::any_of(plan.hosts.begin(), plan.hosts.end(),
                     [&](const Host& host) { return is_local_host(host.name, plan.hostname); });
}

void add_exports(const LaunchOptions& options, LaunchPlan& plan) {
  for (const auto& [name, value] : options.exports) {
    plan.exports.push_back(name);
    if (value) {
      plan.variables.emplace_back(name, *value);
    } else if (std::getenv(name.c_str()) == nullptr) {
      throw LaunchError(ExitCode::kUsage,
                        text("-x ", name,
                             ": expected a variable of the environment, got one that is unset; "
                             "export it, or give its value: -x ",
                             name, "=VALUE"));
    }
  }
}

void add_variables(const LaunchOptions& options, LaunchPlan& plan) {
  auto& variables = plan.variables;
  if (!plan.local_only)
    variables.emplace_back(kAddressesVariable, join_text(reachable_addresses(), ","));
  variables.emplace_back(kHostVariable, plan.hostname);
  variables.emplace_back(kBindVariable, text(effective_bind(plan)));
  variables.emplace_back(kControllerVariable, text(plan.controller.controller));
  if (!plan.exports.empty()) variables.emplace_back(kExportsVariable, join_text(plan.exports, ","));
  variables.emplace_back(kOutputTtyVariable, ::isatty(STDOUT_FILENO) == 1 ? "1" : "0");
  if (options.timeline) variables.emplace_back("HVD_TIMELINE", *options.timeline);
}

}  // namespace

LaunchPlan make_launch_plan(const LaunchOptions& options) {
  LaunchPlan plan;
  plan.hostname = own_hostname();
  plan.mpirun = mpirun_name();
  plan.mpirun_kind = kind_of_mpirun(plan.mpirun);
  plan.np = options.np;
  plan.hosts = options.hosts;
  plan.managed = options.hosts.empty() && !allocation().empty();
  plan.local_only = !plan.managed && all_local(options.hosts, plan.hostname);
  plan.bind = options.bind;
  plan.mpi_args = options.mpi_args;
  plan.controller = find_controller(options);
  require_hosts(plan);
  plan.remote_shell = options.remote_shell;
  if (plan.remote_shell.empty() && plan.controller.controller == Controller::kUcx)
    plan.remote_shell = {"ssh", "-x", "-T", "-o", "BatchMode=yes"};
  plan.hvdrun = own_executable();
  plan.program = options.program;
  plan.as_root = ::geteuid() == 0;
  plan.environment = current_environment();
  add_exports(options, plan);
  add_variables(options, plan);
  if (has_local_rank(plan)) check_program(options.program.front());
  return plan;
}

std::string mpirun_name() {
  const char* name = std::getenv("HVD_MPIRUN");
  if (name != nullptr && *name != '\0') return name;
  return !find_program("mpirun").found && find_program("mpiexec").executable ? "mpiexec" : "mpirun";
}

MpirunKind kind_of_mpirun(const std::string& mpirun) {
  std::error_code error;
  const auto program = std::filesystem::canonical(find_program(mpirun).path, error);
  if (error) return MpirunKind::kOpenMpi;
  // Debian installs Open MPI and MPICH in the same folder.
  const std::string name = program.filename();
  for (const char* const of_open_mpi : {"orterun", "prterun", "openmpi"})
    if (name.find(of_open_mpi) != std::string::npos) return MpirunKind::kOpenMpi;
  const auto has = [&](const char* file) {
    return std::filesystem::exists(program.parent_path() / file, error);
  };
  if (!has("hydra_pmi_proxy")) return MpirunKind::kOpenMpi;
  return has("impi_info") ? MpirunKind::kIntelMpi : MpirunKind::kMpich;
}

}  // namespace hvd::launcher
