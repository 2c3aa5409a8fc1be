#pragma once

#include <optional>
#include <string>
#include <vector>

#include "command/rank_environment.h"

namespace hvd::launcher {

/// A core that this process may use.
struct Core {
  int numa = 0;           ///< its NUMA node
  std::vector<int> cpus;  ///< the numbers of its hardware threads that may be used
  bool operator==(const Core&) const = default;
};

/// The usable cores, with neighbouring cores next to each other. `allowed`: CPUs that may be used;
/// empty: all. `synthetic`: hwloc's description of a machine to use instead of this one. If hwloc
/// fails, each allowed CPU counts as a core.
std::vector<Core> usable_cores(const std::vector<int>& allowed,
                               const std::optional<std::string>& synthetic = std::nullopt);

/// The cores of the host that a rank may use.
struct CoreShare {
  std::vector<int> cpus;  ///< the rank is bound to these; empty: not bound
  int threads = 1;        ///< as many as it has cores; 0: OMP_NUM_THREADS stays as it is
};

/// Divides the cores equally. Each rank gets neighbouring cores, in one NUMA node if all ranks fit
/// into the nodes that way. With a `quota` (the CPUs that cgroups grant) below the number of cores,
/// only the number of threads is chosen, because the kernel grants the time on any core. If there
/// are more ranks than cores, they are not bound either.
CoreShare share_of(const std::vector<Core>& cores, int local_rank, int local_size,
                   std::optional<double> quota);

/// The share that mpirun's --bind-to chooses: one core for each rank (Bind::kCore), or all cores of
/// the NUMA node that its equal share begins in (Bind::kNuma). If there are more ranks than cores,
/// they are not bound.
CoreShare placed_share(Bind bind, const std::vector<Core>& cores, int local_rank, int local_size);

/// The share of each rank, according to HVD_LAUNCHER_BIND. Under Bind::kNone it is only a number of
/// threads. If OMP_NUM_THREADS is set, no share has a number of threads.
/// @param ranks of this host
/// @param under_mpirun the affinity mask is already the rank's share if mpirun binds the ranks
std::vector<CoreShare> find_shares(const std::vector<RankIdentity>& ranks, bool under_mpirun);

/// The affinity mask of this process.
std::vector<int> allowed_cpus();

}  // namespace hvd::launcher
