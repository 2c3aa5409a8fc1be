#include "command/mpirun_command.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <set>
#include <string_view>

#include "base/text.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

constexpr std::array<std::string_view, 6> kForwardedPrefixes = {"HVD_", "HOROVOD_", "NCCL_",
                                                                "OMP_", "MKL_",     "UCX_"};
constexpr std::array<std::string_view, 3> kForwardedNames = {"CUDA_VISIBLE_DEVICES",
                                                             "LD_LIBRARY_PATH", "PATH"};
constexpr std::string_view kSingleCopy = "btl_vader_single_copy_mechanism";

bool mentions(const std::vector<std::string>& words,
              std::initializer_list<std::string_view> options) {
  return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
    return std::find(options.begin(), options.end(), word) != options.end();
  });
}

void append(std::vector<std::string>& argv, std::initializer_list<std::string_view> words) {
  for (const std::string_view word : words) argv.emplace_back(word);
}

/// Whether the user has set this MCA parameter, in the environment or among the arguments for
/// mpirun.
bool user_chose(const LaunchPlan& plan, std::string_view parameter) {
  const std::string variable = "OMPI_MCA_" + std::string(parameter) + "=";
  return mentions(plan.mpi_args, {parameter}) ||
         std::any_of(plan.environment.begin(), plan.environment.end(),
                     [&](const std::string& entry) { return entry.starts_with(variable); });
}

bool user_maps(const LaunchPlan& plan) {
  return mentions(plan.mpi_args, {"--map-by", "-map-by", "--rank-by", "--rankfile", "-rf"});
}

void append_placement(const LaunchPlan& plan, std::vector<std::string>& argv) {
  if (!plan.hosts.empty()) {
    append(argv, {"-H", format_hosts(plan.hosts)});
  } else if (!plan.managed && !mentions(plan.mpi_args, {"--oversubscribe", "-oversubscribe"})) {
    // mpirun counts cores, not hyperthreads. On their own machine users may start more ranks than
    // cores.
    append(argv, {"--oversubscribe"});
  }
  if (!user_maps(plan)) append(argv, {"--map-by", "slot"});
  // By default mpirun binds each rank of a job of two, with all its threads, to one core.
  if (!mentions(plan.mpi_args, {"--bind-to", "-bind-to"}))
    append(argv, {"--bind-to", plan.bind == Bind::kAuto ? "none" : to_string(plan.bind)});
}

void append_parameters(const LaunchPlan& plan, std::vector<std::string>& argv) {
  // The supervisors stop the ranks, so mpirun need not wait when it ends a job.
  append(argv, {"--mca", "odls_base_sigkill_timeout", "0"});
  // Single-copy transfers (CMA) need a ptrace permission that containers lack, and are slower than
  // two copies here.
  if (!user_chose(plan, kSingleCopy)) append(argv, {"--mca", kSingleCopy, "none"});
  // Other transports are for networks, and trying them takes half of the time of MPI_Init.
  if (plan.local_only && !user_chose(plan, "pml") && !user_chose(plan, "mtl"))
    append(argv, {"--mca", "pml", "ob1"});
  if (!plan.remote_shell.empty() && !user_chose(plan, "plm_rsh_agent"))
    append(argv, {"--mca", "plm_rsh_agent", join_text(plan.remote_shell, " ")});
  // By default mpirun's daemon on a host that is cut off detects this only after 8 minutes.
  if (!plan.local_only && plan.silence_limit_s > 0 && !user_chose(plan, "oob_tcp_keepalive_time")) {
    const int third = std::max(1, plan.silence_limit_s / 3);
    append(argv,
           {"--mca", "oob_tcp_keepalive_time", text(third), "--mca", "oob_tcp_keepalive_intvl",
            text(third), "--mca", "oob_tcp_keepalive_probes", "2"});
  }
  // Several mpiruns that start or end at the same time interfere with each other in their shared
  // folder, /tmp/ompi.HOST.UID ("mkdir: File exists").
  const bool user_chose_folder =
      user_chose(plan, "orte_tmpdir_base") || user_chose(plan, "orte_local_tmpdir_base");
  if (!plan.session_folder.empty() && !user_chose_folder)
    append(argv, {"--mca", "orte_local_tmpdir_base", plan.session_folder});
}

/// Adds a variable for Intel MPI unless the user has set it.
void add_default(const LaunchPlan& plan, MpirunCommand& command, const std::string& name,
                 const std::string& value) {
  const auto is_it = [&](const std::string& entry) { return entry.starts_with(name + "="); };
  if (std::none_of(plan.environment.begin(), plan.environment.end(), is_it))
    command.added_variables.emplace_back(name, value);
}

void bind_by_hydra(const LaunchPlan& plan, MpirunCommand& command) {
  const bool binds = plan.bind == Bind::kCore || plan.bind == Bind::kNuma;
  if (plan.mpirun_kind == MpirunKind::kMpich) {
    // It binds ranks only on request.
    if (binds && !mentions(plan.mpi_args, {"-bind-to", "--bind-to"}))
      append(command.argv, {"-bind-to", to_string(plan.bind)});
    return;
  }
  add_default(plan, command, "I_MPI_PIN", binds ? "on" : "off");
  if (binds) add_default(plan, command, "I_MPI_PIN_DOMAIN", std::string(to_string(plan.bind)));
}

void append_remote_shell(const LaunchPlan& plan, MpirunCommand& command) {
  if (plan.remote_shell.empty() || mentions(plan.mpi_args, {"-launcher-exec", "-launcher"})) return;
  append(command.argv, {"-launcher", "ssh", "-launcher-exec", plan.remote_shell.front()});
  if (plan.remote_shell.size() == 1) return;
  const bool intel = plan.mpirun_kind == MpirunKind::kIntelMpi;
  add_default(plan, command,
              intel ? "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS" : "HYDRA_LAUNCHER_EXTRA_ARGS",
              join_text(std::vector(plan.remote_shell.begin() + 1, plan.remote_shell.end()), " "));
}

void append_supervisor(const LaunchPlan& plan, std::vector<std::string>& argv) {
  append(argv, {plan.hvdrun, "--supervise", "--"});
  argv.insert(argv.end(), plan.program.begin(), plan.program.end());
}

void append_program(const LaunchPlan& plan, std::vector<std::string>& argv) {
  argv.insert(argv.end(), plan.mpi_args.begin(), plan.mpi_args.end());
  append_supervisor(plan, argv);
}

/// One argument set per host, for Intel MPI, which ignores the slots of -hosts.
void append_argument_sets(const LaunchPlan& plan, std::vector<std::string>& argv) {
  argv.insert(argv.end(), plan.mpi_args.begin(), plan.mpi_args.end());
  int left = plan.np;
  for (const Host& host : plan.hosts) {
    const int ranks = std::min(left, host.slots);
    if (ranks == 0) return;
    if (left < plan.np) append(argv, {":"});
    append(argv, {"-host", host.name, "-n", text(ranks)});
    append_supervisor(plan, argv);
    left -= ranks;
  }
}

/// For Hydra, the launcher of MPICH and Intel MPI. It passes all variables of hvdrun to the ranks,
/// on other hosts too, through its own connections.
MpirunCommand build_hydra_command(const LaunchPlan& plan) {
  MpirunCommand command;
  command.added_variables = plan.variables;
  const bool sets = plan.mpirun_kind == MpirunKind::kIntelMpi && !plan.hosts.empty();
  append(command.argv, {plan.mpirun});
  if (!sets) append(command.argv, {"-n", text(plan.np)});
  if (!sets && !plan.hosts.empty()) append(command.argv, {"-hosts", format_hosts(plan.hosts)});
  bind_by_hydra(plan, command);
  append_remote_shell(plan, command);
  sets ? append_argument_sets(plan, command.argv) : append_program(plan, command.argv);
  return command;
}

std::set<std::string> exported_names(const LaunchPlan& plan) {
  std::set<std::string> names(plan.exports.begin(), plan.exports.end());
  if (plan.local_only) return names;
  for (const std::string& variable : plan.environment) {
    std::string name = variable.substr(0, variable.find('='));
    if (is_forwarded(name)) names.insert(std::move(name));
  }
  for (const auto& [name, value] : plan.variables) names.insert(name);
  return names;
}

}  // namespace

bool is_forwarded(const std::string& name) {
  if (std::find(kForwardedNames.begin(), kForwardedNames.end(), name) != kForwardedNames.end())
    return true;
  return std::any_of(kForwardedPrefixes.begin(), kForwardedPrefixes.end(),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

MpirunCommand build_mpirun_command(const LaunchPlan& plan) {
  if (plan.mpirun_kind != MpirunKind::kOpenMpi) return build_hydra_command(plan);
  MpirunCommand command;
  command.added_variables = plan.variables;
  if (plan.as_root) {
    command.added_variables.emplace_back("OMPI_ALLOW_RUN_AS_ROOT", "1");
    command.added_variables.emplace_back("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  }
  auto& argv = command.argv;
  append(argv, {plan.mpirun, "-np", text(plan.np)});
  append_placement(plan, argv);
  append_parameters(plan, argv);
  for (const std::string& name : exported_names(plan)) append(argv, {"-x", name});
  append_program(plan, argv);
  return command;
}

Bind effective_bind(const LaunchPlan& plan) {
  if (plan.bind != Bind::kAuto) return plan.bind;
  const auto& words = plan.mpi_args;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] != "--bind-to" && words[i] != "-bind-to") continue;
    if (i + 1 < words.size() && words[i + 1].starts_with("none")) return Bind::kNone;
    return i + 1 < words.size() && words[i + 1].starts_with("numa") ? Bind::kNuma : Bind::kCore;
  }
  const bool mpirun_places = mentions(words, {"--cpu-set", "-cpu-set", "--cpu-list", "-cpu-list",
                                              "--rankfile", "-rf", "--bind-to-core"});
  return mpirun_places ? Bind::kCore : Bind::kAuto;
}

std::string planned_host(const LaunchPlan& plan, int rank) {
  if (user_maps(plan)) return {};
  for (const Host& host : plan.hosts) {
    if (rank < host.slots) return host.name;
    rank -= host.slots;
  }
  return {};
}

std::string format_command(const MpirunCommand& command) {
  std::vector<std::string> words;
  for (const auto& [name, value] : command.added_variables) {
    if (!name.starts_with(kInternalPrefix)) words.push_back(name + "=" + shell_quote(value));
  }
  for (const std::string& word : command.argv) words.push_back(shell_quote(word));
  return join_text(words, " ");
}

}  // namespace hvd::launcher
