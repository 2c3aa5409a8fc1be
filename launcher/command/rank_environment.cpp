#include "command/rank_environment.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <initializer_list>
#include <utility>

#include "base/text.h"
#include "system/process.h"

namespace hvd::launcher {
namespace {

constexpr std::array<std::string_view, 4> kBindNames = {"auto", "none", "core", "numa"};

int first_number(const Lookup& variable, std::initializer_list<const char*> names, int otherwise) {
  for (const char* name : names) {
    const auto digits = variable(name);
    const auto value = digits ? parse_number<int>(*digits) : std::nullopt;
    if (value && *value >= 0) return *value;
  }
  return otherwise;
}

std::optional<std::string> value_in(const std::vector<std::string>& environment,
                                    const std::string& name) {
  for (const std::string& variable : environment)
    if (variable.starts_with(name + "=")) return variable.substr(name.size() + 1);
  return std::nullopt;
}

bool is_set(const std::vector<std::string>& environment, const std::string& name) {
  return value_in(environment, name).has_value();
}

}  // namespace

std::string_view to_string(Bind bind) { return kBindNames[static_cast<std::size_t>(bind)]; }

std::optional<Bind> parse_bind(std::string_view name) {
  const auto found = std::find(kBindNames.begin(), kBindNames.end(), name);
  if (found == kBindNames.end()) return std::nullopt;
  return static_cast<Bind>(found - kBindNames.begin());
}

int silence_limit_ms(const std::optional<std::string>& peer_timeout) {
  constexpr double kDefault = 30, kMaxSeconds = 1e6;
  const double seconds = peer_timeout ? std::strtod(peer_timeout->c_str(), nullptr) : kDefault;
  return static_cast<int>(1000 * (seconds > 0 ? std::clamp(seconds, 1.0, kMaxSeconds) : kDefault));
}

RankIdentity identify_rank(const Lookup& variable) {
  RankIdentity identity;
  identity.rank = first_number(variable, {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}, 0);
  identity.size = first_number(variable, {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}, 1);
  identity.local_rank =
      first_number(variable, {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"}, 0);
  identity.local_size =
      first_number(variable, {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}, 1);
  return identity;
}

bool is_set_by_hvdrun(std::string_view name) {
  constexpr std::array kNames = {"HVD_RANK",           "HVD_SIZE",           "HVD_LOCAL_RANK",
                                 "HVD_LOCAL_SIZE",     "HOROVOD_RANK",       "HOROVOD_SIZE",
                                 "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "RANK",
                                 "WORLD_SIZE",         "LOCAL_RANK",         "LOCAL_WORLD_SIZE"};
  return name.starts_with(kInternalPrefix) ||
         std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

int default_omp_threads(Bind bind, int allowed_cores, int online_cores, int local_size) {
  if (bind == Bind::kCore) return std::max(1, allowed_cores);
  const int cores = bind == Bind::kNuma ? online_cores : allowed_cores;
  return std::max(1, cores / std::max(1, local_size));
}

void put_segments_into(std::vector<std::string>& environment, const std::string& folder) {
  // The parameters' names in Open MPI 4 and 5.
  for (const char* name :
       {"OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory",
        "OMPI_MCA_osc_sm_backing_directory"}) {
    if (!is_set(environment, name)) set_variable(environment, name, folder);
  }
}

std::vector<std::string> rank_environment(std::vector<std::string> environment,
                                          const RankIdentity& identity, int omp_threads) {
  const auto run_id = value_in(environment, kRunIdVariable);
  const auto role = value_in(environment, kRoleVariable);
  const auto number = [&](const char* name, int otherwise) {
    const auto digits = value_in(environment, name);
    return digits ? parse_number<int>(*digits).value_or(otherwise) : otherwise;
  };
  const std::string rank = text(identity.rank + number(kFirstRankVariable, 0));
  const std::string size = text(number(kWorldSizeVariable, identity.size));
  const std::string restarts = text(number(kRestartCountVariable, 0));
  const std::string max_restarts = text(number(kMaxRestartsVariable, 0));
  std::erase_if(environment,
                [](const std::string& variable) { return variable.starts_with(kInternalPrefix); });
  // hvdrun passes this folder to mpirun. mpirun passes on both the parameter and the path that it
  // derives from it, and MPI_Init reports these two as a contradiction.
  set_variable(environment, "OMPI_MCA_orte_local_tmpdir_base", std::nullopt);
  // hvdrun may itself run under torchrun, whose agent does not serve these ranks.
  std::erase_if(environment,
                [](const std::string& variable) { return variable.starts_with("TORCHELASTIC_"); });
  // Open MPI's handlers print a backtrace on every abort(), which pushes the program's last lines
  // off the screen.
  const std::string backtrace_signals = "OMPI_MCA_opal_signal";
  if (!is_set(environment, backtrace_signals)) set_variable(environment, backtrace_signals, "");
  for (const std::string prefix : {"HVD_", "HOROVOD_"}) {
    set_variable(environment, prefix + "RANK", rank);
    set_variable(environment, prefix + "SIZE", size);
    set_variable(environment, prefix + "LOCAL_RANK", text(identity.local_rank));
    set_variable(environment, prefix + "LOCAL_SIZE", text(identity.local_size));
  }
  set_variable(environment, "RANK", rank);
  set_variable(environment, "WORLD_SIZE", size);
  set_variable(environment, "LOCAL_RANK", text(identity.local_rank));
  set_variable(environment, "LOCAL_WORLD_SIZE", text(identity.local_size));
  if (run_id) {
    for (const auto& [name, value] :
         {std::pair("ROLE_RANK", rank), std::pair("ROLE_WORLD_SIZE", size),
          std::pair("ROLE_NAME", role.value_or("")), std::pair("TORCHELASTIC_RUN_ID", *run_id),
          std::pair("TORCHELASTIC_RESTART_COUNT", restarts),
          std::pair("TORCHELASTIC_MAX_RESTARTS", max_restarts),
          std::pair("TORCHELASTIC_USE_AGENT_STORE", std::string("False"))})
      set_variable(environment, name, value);
    if (!is_set(environment, "TORCH_NCCL_ASYNC_ERROR_HANDLING"))
      set_variable(environment, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  }
  if (omp_threads > 0) set_variable(environment, "OMP_NUM_THREADS", text(omp_threads));
  return environment;
}

}  // namespace hvd::launcher
