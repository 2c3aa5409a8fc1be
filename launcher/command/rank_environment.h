#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

/// kAuto: the supervisors bind, each its rank to its share of the host's cores. kCore, kNuma:
/// mpirun does, where it starts them.
enum class Bind { kAuto, kNone, kCore, kNuma };
std::string_view to_string(Bind bind);
std::optional<Bind> parse_bind(std::string_view name);

/// Variables from hvdrun for the supervisors, which remove them from the program's environment,
/// because the program must not see the token.
inline constexpr const char* kInternalPrefix = "HVD_LAUNCHER_";
inline constexpr const char* kAddressesVariable = "HVD_LAUNCHER_ADDRESSES";
inline constexpr const char* kPortVariable = "HVD_LAUNCHER_PORT";
inline constexpr const char* kTokenVariable = "HVD_LAUNCHER_TOKEN";
inline constexpr const char* kHostVariable = "HVD_LAUNCHER_HOST";
inline constexpr const char* kBindVariable = "HVD_LAUNCHER_BIND";
/// The starter of the supervisor: to_string(Controller).
inline constexpr const char* kControllerVariable = "HVD_LAUNCHER_CONTROLLER";
/// The identity of the rank, if mpirun does not set it.
inline constexpr const char* kRankVariable = "HVD_LAUNCHER_RANK";
inline constexpr const char* kSizeVariable = "HVD_LAUNCHER_SIZE";
inline constexpr const char* kLocalRankVariable = "HVD_LAUNCHER_LOCAL_RANK";
inline constexpr const char* kLocalSizeVariable = "HVD_LAUNCHER_LOCAL_SIZE";
/// Names that -x has set, which stay as they are.
inline constexpr const char* kExportsVariable = "HVD_LAUNCHER_EXPORTS";
/// Unlike the rest, for the program: the address at which its supervisor receives notices.
inline constexpr const char* kNoticeVariable = "HVD_LAUNCHER_NOTICES";
inline constexpr const char* kOutputTtyVariable = "HVD_OUTPUT_TTY";

/// How long hvd, and with it hvdrun, waits for a sign of life.
inline constexpr const char* kPeerTimeoutVariable = "HVD_PEER_TIMEOUT";
/// Its value in milliseconds; its default when it is unset or no number above zero, for which the
/// ranks log a warning.
int silence_limit_ms(const std::optional<std::string>& peer_timeout);

struct RankIdentity {
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  bool operator==(const RankIdentity&) const = default;
};

/// The value of a variable, if it is set.
using Lookup = std::function<std::optional<std::string>(const char* name)>;

/// This process's identity as set by hvdrun, else by mpirun, else rank 0 of 1.
RankIdentity identify_rank(const Lookup& variable);

/// Whether hvdrun sets this variable for each rank, regardless of the user's environment.
bool is_set_by_hvdrun(std::string_view name);

/// OpenMP threads per rank when mpirun binds: the host's cores shared out. `allowed_cores` are
/// those of the affinity mask of this process, which under Bind::kCore is its own share already.
int default_omp_threads(Bind bind, int allowed_cores, int online_cores, int local_size);

/// Open MPI's segments of shared memory lie in a folder that is removed with the job, unless the
/// user has chosen another.
void put_segments_into(std::vector<std::string>& environment, const std::string& folder);

/// The program's environment: `environment` with the variables of this rank, hvd's, torchrun's and
/// Horovod's, without hvdrun's own; OMP_NUM_THREADS when `omp_threads` is above zero.
std::vector<std::string> rank_environment(std::vector<std::string> environment,
                                          const RankIdentity& identity, int omp_threads);

}  // namespace hvd::launcher
