#pragma once

#include <optional>
#include <string>
#include <vector>

#include "command/rank_environment.h"

namespace hvd::launcher {

/// A core that this process may use.
struct Core {
  int numa = 0;           ///< which node it belongs to
  std::vector<int> cpus;  ///< the numbers of its hardware threads that may be used
  bool operator==(const Core&) const = default;
};

/// Neighbours stand side by side. `synthetic` describes a machine as hwloc does, instead of this
/// one. `allowed`: CPUs that may be used; empty: all. When hwloc cannot tell, each CPU that is
/// allowed counts as a core.
std::vector<Core> usable_cores(const std::vector<int>& allowed,
                               const std::optional<std::string>& synthetic = std::nullopt);

/// The cores of the host that a rank may use.
struct CoreShare {
  std::vector<int> cpus;  ///< to be bound to; empty: not bound
  int threads = 1;        ///< as many as it has cores
};

/// As many cores for each rank, side by side, and in one NUMA node where that many ranks fit into
/// nodes. With a `quota` below the cores (what cgroups grant, in CPUs) only the number of threads
/// is chosen: the kernel takes the time from any core. More ranks than cores are not bound either.
CoreShare share_of(const std::vector<Core>& cores, int local_rank, int local_size,
                   std::optional<double> quota);

/// As mpirun binds with --bind-to: one core for each rank (Bind::kCore), or all cores of the NUMA
/// node that its equal share begins in (Bind::kNuma). More ranks than cores are not bound.
CoreShare placed_share(Bind bind, const std::vector<Core>& cores, int local_rank, int local_size);

/// The affinity mask of this process.
std::vector<int> allowed_cpus();

}  // namespace hvd::launcher
