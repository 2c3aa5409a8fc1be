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
bool user_chose(const LaunchSpec& spec, std::string_view parameter) {
  const std::string variable = "OMPI_MCA_" + std::string(parameter) + "=";
  return mentions(spec.mpi_args, {parameter}) ||
         std::any_of(spec.environment.begin(), spec.environment.end(),
                     [&](const std::string& entry) { return entry.starts_with(variable); });
}

bool user_maps(const LaunchSpec& spec) {
  return mentions(spec.mpi_args, {"--map-by", "-map-by", "--rank-by", "--rankfile", "-rf"});
}

void append_placement(const LaunchSpec& spec, std::vector<std::string>& argv) {
  if (!spec.hosts.empty()) {
    append(argv, {"-H", format_hosts(spec.hosts)});
  } else if (!spec.managed && !mentions(spec.mpi_args, {"--oversubscribe", "-oversubscribe"})) {
    // mpirun counts cores, not hyperthreads. On their own machine users may start more ranks than
    // cores.
    append(argv, {"--oversubscribe"});
  }
  if (!user_maps(spec)) append(argv, {"--map-by", "slot"});
  // mpirun's default binds each of two ranks to one core, and with it all threads of that rank.
  if (!mentions(spec.mpi_args, {"--bind-to", "-bind-to"}))
    append(argv, {"--bind-to", spec.bind == Bind::kAuto ? "none" : to_string(spec.bind)});
}

void append_parameters(const LaunchSpec& spec, std::vector<std::string>& argv) {
  // The supervisors stop the ranks, so mpirun need not wait when it ends a job.
  append(argv, {"--mca", "odls_base_sigkill_timeout", "0"});
  // Single-copy transfers (CMA) need a ptrace permission that containers lack, and are slower than
  // two copies here.
  if (!user_chose(spec, kSingleCopy)) append(argv, {"--mca", kSingleCopy, "none"});
  if (!spec.remote_shell.empty() && !user_chose(spec, "plm_rsh_agent"))
    append(argv, {"--mca", "plm_rsh_agent", join_text(spec.remote_shell, " ")});
  // By default mpirun's daemon on a host that is cut off detects this only after 8 minutes.
  if (!spec.local_only && spec.silence_limit_s > 0 && !user_chose(spec, "oob_tcp_keepalive_time")) {
    const int third = std::max(1, spec.silence_limit_s / 3);
    append(argv, {"--mca", "oob_tcp_keepalive_time", std::to_string(third), "--mca",
                  "oob_tcp_keepalive_intvl", std::to_string(third), "--mca",
                  "oob_tcp_keepalive_probes", "2"});
  }
  // mpiruns that start or end at the same time disturb each other in the folder that they share,
  // /tmp/ompi.HOST.UID ("mkdir: File exists").
  const bool user_chose_folder =
      user_chose(spec, "orte_tmpdir_base") || user_chose(spec, "orte_local_tmpdir_base");
  if (!spec.session_folder.empty() && !user_chose_folder)
    append(argv, {"--mca", "orte_local_tmpdir_base", spec.session_folder});
}

std::set<std::string> exported_names(const LaunchSpec& spec) {
  std::set<std::string> names(spec.exports.begin(), spec.exports.end());
  if (spec.local_only) return names;
  for (const std::string& variable : spec.environment) {
    std::string name = variable.substr(0, variable.find('='));
    if (is_forwarded(name)) names.insert(std::move(name));
  }
  for (const auto& [name, value] : spec.variables) names.insert(name);
  return names;
}

}  // namespace

bool is_forwarded(const std::string& name) {
  if (std::find(kForwardedNames.begin(), kForwardedNames.end(), name) != kForwardedNames.end())
    return true;
  return std::any_of(kForwardedPrefixes.begin(), kForwardedPrefixes.end(),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

MpirunCommand build_mpirun_command(const LaunchSpec& spec) {
  MpirunCommand command;
  command.added_variables = spec.variables;
  if (spec.as_root) {
    command.added_variables.emplace_back("OMPI_ALLOW_RUN_AS_ROOT", "1");
    command.added_variables.emplace_back("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  }
  auto& argv = command.argv;
  append(argv, {spec.mpirun, "-np", std::to_string(spec.np)});
  append_placement(spec, argv);
  append_parameters(spec, argv);
  for (const std::string& name : exported_names(spec)) append(argv, {"-x", name});
  argv.insert(argv.end(), spec.mpi_args.begin(), spec.mpi_args.end());
  append(argv, {spec.hvdrun, "--supervise", "--"});
  argv.insert(argv.end(), spec.program.begin(), spec.program.end());
  return command;
}

Bind effective_bind(const LaunchSpec& spec) {
  if (spec.bind != Bind::kAuto) return spec.bind;
  const auto& words = spec.mpi_args;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] != "--bind-to" && words[i] != "-bind-to") continue;
    if (i + 1 < words.size() && words[i + 1].starts_with("none")) return Bind::kNone;
    return i + 1 < words.size() && words[i + 1].starts_with("numa") ? Bind::kNuma : Bind::kCore;
  }
  const bool mpirun_places = mentions(words, {"--cpu-set", "-cpu-set", "--cpu-list", "-cpu-list",
                                              "--rankfile", "-rf", "--bind-to-core"});
  return mpirun_places ? Bind::kCore : Bind::kAuto;
}

std::string planned_host(const LaunchSpec& spec, int rank) {
  if (user_maps(spec)) return {};
  for (const Host& host : spec.hosts) {
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
