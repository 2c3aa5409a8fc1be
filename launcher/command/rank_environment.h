#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

/// How ranks are bound to cores. kAuto: each agent binds its ranks to a share of the host's
/// cores. kCore, kNuma: mpirun binds the ranks if it starts them.
enum class Bind { kAuto, kNone, kCore, kNuma };
std::string_view to_string(Bind bind);
std::optional<Bind> parse_bind(std::string_view name);

/// Variables from hvdrun for the agents, which remove them from the program's environment,
/// because the program must not see the token.
inline constexpr const char* kInternalPrefix = "HVD_LAUNCHER_";
inline constexpr const char* kAddressesVariable = "HVD_LAUNCHER_ADDRESSES";
inline constexpr const char* kPortVariable = "HVD_LAUNCHER_PORT";
inline constexpr const char* kTokenVariable = "HVD_LAUNCHER_TOKEN";
inline constexpr const char* kHostVariable = "HVD_LAUNCHER_HOST";
inline constexpr const char* kBindVariable = "HVD_LAUNCHER_BIND";
/// The controller that has started the agent, as to_string(Controller).
inline constexpr const char* kControllerVariable = "HVD_LAUNCHER_CONTROLLER";
/// Set for a job with torchrun's options: the number that is added to the rank among the ranks of
/// this hvdrun, the number of the ranks of all nodes, --rdzv-id and --role.
inline constexpr const char* kFirstRankVariable = "HVD_LAUNCHER_FIRST_RANK";
inline constexpr const char* kWorldSizeVariable = "HVD_LAUNCHER_WORLD_SIZE";
inline constexpr const char* kRunIdVariable = "HVD_LAUNCHER_RUN_ID";
inline constexpr const char* kRoleVariable = "HVD_LAUNCHER_ROLE";
/// Set for a job that may be restarted: --max-restarts, and the number of restarts so far.
inline constexpr const char* kMaxRestartsVariable = "HVD_LAUNCHER_MAX_RESTARTS";
inline constexpr const char* kRestartCountVariable = "HVD_LAUNCHER_RESTART_COUNT";
/// Names that -x has set, which stay as they are.
inline constexpr const char* kExportsVariable = "HVD_LAUNCHER_EXPORTS";
/// For the program, unlike the variables above: the address at which its agent receives notices.
inline constexpr const char* kNoticeVariable = "HVD_LAUNCHER_NOTICES";
inline constexpr const char* kPeerVariable = "HVD_LAUNCHER_PEER";
inline constexpr const char* kOutputTtyVariable = "HVD_OUTPUT_TTY";

/// How long hvd and hvdrun wait for a sign of life.
inline constexpr const char* kPeerTimeoutVariable = "HVD_PEER_TIMEOUT";
/// The variable's value in milliseconds. The default if the variable is unset or not a number above
/// zero, for which the ranks log a warning.
int silence_limit_ms(const std::optional<std::string>& peer_timeout);

struct RankIdentity {
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  bool operator==(const RankIdentity&) const = default;
};

/// The value of a variable, if it is set.
using Lookup = std::function<std::optional<std::string>(const char* name)>;

/// This process's identity as set by mpirun, else rank 0 of 1.
RankIdentity identify_rank(const Lookup& variable);

/// Whether hvdrun sets this variable for each rank, regardless of the user's environment.
bool is_set_by_hvdrun(std::string_view name);

/// OpenMP threads per rank when mpirun binds: the host's cores, divided among its ranks.
/// `allowed_cores` counts the cores in the affinity mask of this process; under Bind::kCore they
/// are already its share.
int default_omp_threads(Bind bind, int allowed_cores, int online_cores, int local_size);

/// Makes Open MPI put its shared-memory segments into `folder`, which is removed with the job,
/// unless the user has chosen another folder.
void put_segments_into(std::vector<std::string>& environment, const std::string& folder);

/// The program's environment: `environment` without hvdrun's own variables, but with the variables
/// of this rank for hvd, torchrun and Horovod. Sets OMP_NUM_THREADS if `omp_threads` is above zero.
/// @param identity among the ranks that this hvdrun starts
std::vector<std::string> rank_environment(std::vector<std::string> environment,
                                          const RankIdentity& identity, int omp_threads);

}  // namespace hvd::launcher
