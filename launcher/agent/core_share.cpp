#include "agent/core_share.h"

#include <hwloc.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "base/cpu_quota.h"
#include "system/process.h"

namespace hvd::launcher {
namespace {

/// Loads no plugins of hwloc, unless the user has named a folder for them. They detect devices,
/// load libraries of X11 and OpenCL, and would take half of the start time of a short job.
int init_without_plugins(hwloc_topology_t* topology) {
  constexpr const char* kPluginsPath = "HWLOC_PLUGINS_PATH";
  const bool named = environment_variable(kPluginsPath).has_value();
  if (!named) ::setenv(kPluginsPath, "/dev/null", 1);
  const int error = ::hwloc_topology_init(topology);
  if (!named) ::unsetenv(kPluginsPath);
  return error;
}

/// hwloc's view of a machine; null if hwloc cannot load it.
std::shared_ptr<hwloc_topology> load_topology(const std::optional<std::string>& synthetic) {
  hwloc_topology_t made = nullptr;
  if (init_without_plugins(&made) != 0) return nullptr;
  std::shared_ptr<hwloc_topology> topology(made, ::hwloc_topology_destroy);
  const bool chosen = !synthetic || ::hwloc_topology_set_synthetic(made, synthetic->c_str()) == 0;
  return chosen && ::hwloc_topology_load(made) == 0 ? topology : nullptr;
}

std::vector<int> cpus_of(hwloc_obj_t object, const std::vector<int>& allowed) {
  std::vector<int> cpus;
  for (int cpu = ::hwloc_bitmap_first(object->cpuset); cpu >= 0;
       cpu = ::hwloc_bitmap_next(object->cpuset, cpu)) {
    if (allowed.empty() || std::find(allowed.begin(), allowed.end(), cpu) != allowed.end())
      cpus.push_back(cpu);
  }
  return cpus;
}

/// Index of each rank's first core; nullopt when whole shares do not fit into the nodes.
std::optional<std::vector<std::size_t>> starts_within_nodes(const std::vector<Core>& cores,
                                                            std::size_t share, std::size_t ranks) {
  std::vector<std::size_t> starts;
  for (std::size_t begin = 0; begin < cores.size();) {
    std::size_t end = begin;
    while (end < cores.size() && cores[end].numa == cores[begin].numa) ++end;
    for (std::size_t at = begin; at + share <= end && starts.size() < ranks; at += share)
      starts.push_back(at);
    begin = end;
  }
  if (starts.size() < ranks) return std::nullopt;
  return starts;
}

}  // namespace

std::vector<Core> usable_cores(const std::vector<int>& allowed,
                               const std::optional<std::string>& synthetic) {
  const auto machine = load_topology(synthetic);
  std::vector<Core> cores;
  if (!machine) {
    for (const int cpu : allowed) cores.push_back({0, {cpu}});
    return cores;
  }
  const int count = ::hwloc_get_nbobjs_by_type(machine.get(), HWLOC_OBJ_CORE);
  for (int i = 0; i < count; ++i) {
    const hwloc_obj_t object =
        ::hwloc_get_obj_by_type(machine.get(), HWLOC_OBJ_CORE, static_cast<unsigned>(i));
    Core core;
    core.cpus = cpus_of(object, allowed);
    core.numa = object->nodeset != nullptr ? ::hwloc_bitmap_first(object->nodeset) : 0;
    if (!core.cpus.empty()) cores.push_back(std::move(core));
  }
  // Some machines number the cores of their nodes alternately.
  std::stable_sort(cores.begin(), cores.end(),
                   [](const Core& a, const Core& b) { return a.numa < b.numa; });
  return cores;
}

CoreShare share_of(const std::vector<Core>& cores, int local_rank, int local_size,
                   std::optional<double> quota) {
  CoreShare result;
  const auto ranks = static_cast<std::size_t>(std::max(1, local_size));
  const std::size_t share = cores.size() / ranks;
  double cpus = 0;
  for (const Core& core : cores) cpus += static_cast<double>(core.cpus.size());
  if (quota && *quota < cpus) {
    const double granted = std::min(*quota, static_cast<double>(cores.size()));
    result.threads = std::max(1, static_cast<int>(granted / static_cast<double>(ranks)));
    return result;
  }
  result.threads = std::max<int>(1, static_cast<int>(share));
  if (share == 0 || local_rank < 0 || local_rank >= local_size) return result;
  const auto index = static_cast<std::size_t>(local_rank);
  const auto starts = starts_within_nodes(cores, share, ranks);
  const std::size_t begin = starts ? (*starts)[index] : index * share;
  for (std::size_t i = begin; i < begin + share; ++i)
    result.cpus.insert(result.cpus.end(), cores[i].cpus.begin(), cores[i].cpus.end());
  return result;
}

CoreShare placed_share(Bind bind, const std::vector<Core>& cores, int local_rank, int local_size) {
  CoreShare result;
  const auto ranks = static_cast<std::size_t>(std::max(1, local_size));
  if (local_rank < 0 || local_rank >= local_size || ranks > cores.size()) return result;
  const auto index = static_cast<std::size_t>(local_rank);
  if (bind == Bind::kCore) {
    result.cpus = cores[index].cpus;
    return result;
  }
  const int node = cores[index * cores.size() / ranks].numa;
  std::size_t cores_of_node = 0;
  for (const Core& core : cores) {
    if (core.numa != node) continue;
    ++cores_of_node;
    result.cpus.insert(result.cpus.end(), core.cpus.begin(), core.cpus.end());
  }
  // The ranks of one node share its cores.
  std::size_t sharing = 0;
  for (std::size_t other = 0; other < ranks; ++other)
    sharing += cores[other * cores.size() / ranks].numa == node ? 1 : 0;
  result.threads = std::max<int>(1, static_cast<int>(cores_of_node / sharing));
  return result;
}

std::vector<CoreShare> find_shares(const std::vector<RankIdentity>& ranks, bool under_mpirun) {
  const Bind bind =
      parse_bind(environment_variable(kBindVariable).value_or("none")).value_or(Bind::kNone);
  const bool binds = bind == Bind::kAuto || (bind != Bind::kNone && !under_mpirun);
  const bool threads_are_set = environment_variable("OMP_NUM_THREADS").has_value();
  std::vector<CoreShare> shares(ranks.size(), CoreShare{.cpus = {}, .threads = 0});
  if (!binds && threads_are_set) return shares;
  const std::vector<Core> cores = usable_cores(allowed_cpus());
  const auto quota = cpu_quota();
  for (std::size_t i = 0; i < shares.size(); ++i) {
    const auto& [rank, size, local_rank, local_size] = ranks[i];
    if (bind == Bind::kAuto || bind == Bind::kNone) {
      shares[i] = share_of(cores, local_rank, local_size, quota);
      if (bind == Bind::kNone) shares[i].cpus.clear();
    } else if (!under_mpirun) {
      shares[i] = placed_share(bind, cores, local_rank, local_size);
    } else {
      shares[i].threads =
          default_omp_threads(bind, static_cast<int>(cores.size()),
                              static_cast<int>(usable_cores({}).size()), local_size);
    }
    if (threads_are_set) shares[i].threads = 0;
  }
  return shares;
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  // The mask must have room for all CPUs that the kernel was built for.
  for (int size = 1024; size <= 1 << 20; size *= 2) {
    cpu_set_t* const set = CPU_ALLOC(static_cast<std::size_t>(size));
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(size));
    const bool known = set != nullptr && ::sched_getaffinity(0, bytes, set) == 0;
    const bool too_small = !known && errno == EINVAL;
    for (int cpu = 0; known && cpu < size; ++cpu) {
      if (CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (!too_small) break;
  }
  return cpus;
}

}  // namespace hvd::launcher
