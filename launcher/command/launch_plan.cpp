#include "command/launch_plan.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <system_error>

#include "base/text.h"
#include "command/mpirun_command.h"
#include "command/probes.h"
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
                   [](const char* name) { return environment_variable(name).has_value(); });
  return found == kBatchSystems.end() ? "" : *found;
}

std::string named_mpirun() { return environment_variable("HVD_MPIRUN").value_or(""); }

/// An elastic job runs without MPI, and needs UCX.
ControllerChoice controller_of_elastic(const std::string& needs_mpi) {
  if (!needs_mpi.empty()) {
    throw LaunchError(ExitCode::kUsage, text("an elastic job runs without MPI, but ", needs_mpi,
                                             "; remove --min-np, --max-np, --spares and "
                                             "--reset-limit"));
  }
  if (const std::string problem = ucx_problem(); !problem.empty()) {
    throw LaunchError(ExitCode::kUsage,
                      text("an elastic job needs UCX, but ", problem,
                           "; install it (libucx0), or remove --min-np, --max-np, --spares and "
                           "--reset-limit"));
  }
  return {Controller::kUcx, "the job is elastic"};
}

ControllerChoice find_controller(const LaunchOptions& options) {
  const std::string needs_mpi = program_that_needs_mpi(options.program);
  if (options.elastic) return controller_of_elastic(needs_mpi);
  if (options.node && options.node->nodes > 1) {
    if (needs_mpi.empty()) return {Controller::kUcx, "--nnodes is given"};
    throw LaunchError(ExitCode::kUsage, text("--nnodes starts the ranks without mpirun, but ",
                                             needs_mpi, "; use -np N -H h1:2,h2:2"));
  }
  ControllerFacts facts;
  if (!options.node) facts.batch_system = allocation();
  facts.mpi_args = !options.mpi_args.empty();
  facts.names_mpirun = !named_mpirun().empty();
  facts.needs_mpi = needs_mpi;
  facts.has_mpirun = find_program(mpirun_name()).executable;
  facts.ucx_problem = ucx_problem;
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
                     [&](const Host& host) { return all_local({host}, plan.hostname); });
}

/// Refuses hosts that mpirun's -H cannot express.
void check_hosts_for_mpirun(const LaunchPlan& plan) {
  if (plan.controller.controller != Controller::kMpi) return;
  for (const Host& host : plan.hosts) {
    if (host.user.empty() && host.name.find(':') == std::string::npos) continue;
    throw LaunchError(
        ExitCode::kUsage,
        text("-H ", format_hosts({host}),
             ": mpirun takes neither users nor IPv6 addresses; name the host, and give "
             "the user in ~/.ssh/config, or use --controller ucx"));
  }
}

/// Adds a variable of hvdrun's, unless -x sets it.
void add_own(LaunchPlan& plan, const std::string& name, const std::string& value) {
  if (std::find(plan.exports.begin(), plan.exports.end(), name) != plan.exports.end()) return;
  plan.exports.push_back(name);
  plan.variables.emplace_back(name, value);
}

/// The variables of a job with torchrun's options. The ranks of several nodes find each other at
/// the master's port, which rank 0 serves; those of one node find each other through hvdrun.
void add_node(const NodeOptions& node, LaunchPlan& plan) {
  if (node.is_elastic()) {
    plan.variables.emplace_back(kRunIdVariable, node.run_id);
    plan.variables.emplace_back(kRoleVariable, node.role);
    return;
  }
  plan.first_rank = node.first_rank();
  plan.world_size = node.world_size();
  if (plan.controller.controller != Controller::kUcx) return;
  plan.variables.emplace_back(kFirstRankVariable, text(plan.first_rank));
  plan.variables.emplace_back(kWorldSizeVariable, text(plan.world_size));
  plan.variables.emplace_back(kRunIdVariable, node.run_id);
  plan.variables.emplace_back(kRoleVariable, node.role);
  if (!node.master_address.empty()) {
    add_own(plan, "MASTER_ADDR", node.master_address);
    add_own(plan, "MASTER_PORT", text(node.master_port));
  }
  if (node.nodes == 1) return;
  for (const char* const name : {"GROUP_RANK", "HOROVOD_CROSS_RANK"})
    add_own(plan, name, text(node.rank.value_or(0)));
  for (const char* const name : {"GROUP_WORLD_SIZE", "HOROVOD_CROSS_SIZE"})
    add_own(plan, name, text(node.nodes));
  const bool ipv6 = node.master_address.find(':') != std::string::npos;
  add_own(
      plan, "HVD_INIT_METHOD",
      text("tcp://", ipv6 ? "[" : "", node.master_address, ipv6 ? "]:" : ":", node.master_port));
  const std::string job = environment_variable("HVD_JOB_NAME").value_or("");
  add_own(plan, "HVD_JOB_NAME", job.empty() ? node.run_id : job);
  // The nodes do not share a secret from hvdrun, so the ranks keep the user's token.
  plan.exports.emplace_back("HVD_JOB_TOKEN");
}

/// The ranks of a job that may be restarted, or are elastic, have torchrun's variables, which count
/// the restarts.
void add_restarts(const LaunchOptions& options, LaunchPlan& plan) {
  const bool elastic = options.elastic.has_value();
  if (options.max_restarts == 0 && !elastic) return;
  const bool unlimited = elastic && !options.elastic->replacements;
  plan.variables.emplace_back(kMaxRestartsVariable, text(unlimited ? std::numeric_limits<int>::max()
                                                                   : options.max_restarts));
  if (options.node) return;
  const NodeOptions defaults;
  plan.variables.emplace_back(kRunIdVariable, defaults.run_id);
  plan.variables.emplace_back(kRoleVariable, defaults.role);
}

void add_exports(const LaunchOptions& options, LaunchPlan& plan) {
  for (const auto& [name, value] : options.exports) {
    plan.exports.push_back(name);
    if (value) {
      plan.variables.emplace_back(name, *value);
    } else if (!environment_variable(name.c_str())) {
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
  plan.np = plan.world_size = options.np;
  plan.hosts = options.hosts;
  if (!plan.hosts.empty()) mark_local_hosts(plan.hosts, own_names());
  const bool joined_by_nodes = options.node && options.node->is_elastic();
  const bool grows = joined_by_nodes || (options.elastic && !options.elastic->discovery.empty());
  if (joined_by_nodes) plan.np = plan.world_size = options.node->processes;
  plan.managed = plan.hosts.empty() && !options.node && !grows && !allocation().empty();
  plan.local_only = !plan.managed && !grows && all_local(plan.hosts, plan.hostname);
  if (options.logs.any() && !plan.local_only) {
    throw LaunchError(ExitCode::kUsage,
                      "--log-dir, --redirects, --tee and --local-ranks-filter concern the ranks of "
                      "one host; with the hosts of a batch system use --output-filename");
  }
  plan.bind = options.bind;
  plan.mpi_args = options.mpi_args;
  plan.controller = find_controller(options);
  // In an allocation mpirun would spread the ranks over its hosts.
  if (options.node && plan.controller.controller == Controller::kMpi && !allocation().empty())
    plan.hosts = {{.name = "localhost", .slots = options.np, .local = true}};
  if (options.max_restarts > 0 && plan.controller.controller == Controller::kMpi) {
    throw LaunchError(
        ExitCode::kUsage,
        text("--max-restarts is for ranks that hvdrun starts itself, but mpirun starts "
             "these: ",
             plan.controller.reason, "; remove it, or use --controller ucx"));
  }
  require_hosts(plan);
  check_hosts_for_mpirun(plan);
  plan.remote_shell = options.remote_shell;
  if (plan.remote_shell.empty() && plan.controller.controller == Controller::kUcx)
    plan.remote_shell = {"ssh", "-x", "-T", "-o", "BatchMode=yes"};
  plan.hvdrun = own_executable();
  plan.program = options.program;
  plan.as_root = ::geteuid() == 0;
  plan.environment = current_environment();
  add_exports(options, plan);
  if (options.node) add_node(*options.node, plan);
  add_restarts(options, plan);
  add_variables(options, plan);
  if (options.node || has_local_rank(plan)) check_program(options.program.front());
  return plan;
}

std::optional<std::string> exported(const LaunchPlan& plan, const std::string& name) {
  const auto& variables = plan.variables;
  const auto given = std::find_if(variables.rbegin(), variables.rend(),
                                  [&](const auto& variable) { return variable.first == name; });
  if (given != variables.rend()) return given->second;
  const auto& exports = plan.exports;
  const bool passed_on = std::find(exports.begin(), exports.end(), name) != exports.end();
  return passed_on ? environment_variable(name.c_str()) : std::nullopt;
}

std::optional<std::string> value_for_ranks(const LaunchPlan& plan, const std::string& name) {
  const auto given = exported(plan, name);
  return given ? given : environment_variable(name.c_str());
}

std::string mpirun_name() {
  if (std::string name = named_mpirun(); !name.empty()) return name;
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
