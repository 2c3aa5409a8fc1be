// The one file that knows at compile time what is in the build.
#include "runtime/builtin_backends.h"

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "backend/local/local_backend.h"
#include "backend/shm/shm_backend.h"
#include "base/log.h"
#include "hvd/error.h"
#include "local/local_network.h"

#if HVD_HAVE_MPI
#include "backend/hierarchical/hierarchical_backend.h"
#include "backend/mpi/mpi_backend.h"
#include "mpi/environment.h"
#include "mpi/mpi_control_plane.h"
#include "mpi/mpi_world.h"
#endif

namespace hvd::runtime {
namespace {

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

/// Set by the launchers that MPI can meet its peers through: mpirun, srun --mpi=pmix or pmi2, MPICH's mpiexec.
const char* mpi_launcher_variable() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"}) {
    if (variable(name) != nullptr) return name;
  }
  return nullptr;
}

// Several ranks were started, but not so that they can meet: rather an error than as many jobs of one.
void refuse_ranks_without_mpi() {
  for (const char* name : {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const char* value = variable(name);
    if (value == nullptr || std::atoi(value) <= 1) continue;
    throw UsageError(std::string("hvd::init: the environment says ") + name + "=" + value +
                     ", but this process was not started by an MPI launcher, so the ranks cannot find each other; start it "
                     "with 'hvdrun -np N program', mpirun, or srun --mpi=pmix (or unset " +
                     name + " to run alone)");
  }
}

JobConnection job_of_one() {
  static const SteadyClock clock;
  JobConnection job;
  job.control = local::LocalNetwork::create({.size = 1}, clock)->plane(0);
  job.backends.push_back(std::make_shared<LocalBackend>(std::make_shared<LocalWorld>(1)));
  return job;
}

}  // namespace

#if HVD_HAVE_MPI

namespace {

/// The ranks of a host decide the same, as they look at the same numbers.
bool room_for_shm(const mpi::MpiWorld& world) {
  const Topology& topology = world.topology();
  const std::size_t wanted = ShmBackend::wanted_shared_memory(topology.local_size);
  const std::uint64_t free = world.shared_memory_free(topology.rank);
  if (topology.local_size < 2 || free >= wanted) return true;
  if (topology.local_rank == 0) {
    HVD_LOG(kWarning) << "/dev/shm has " << free << " bytes left, expected " << wanted
                      << " for the shm backend; using MPI between the ranks of this host, which is slower (docker: --shm-size)";
  }
  return false;
}

/// All ranks decide the same, as they look at the same numbers: one host without room is enough to do without.
bool room_for_hierarchical(const mpi::MpiWorld& world) {
  const Topology& topology = world.topology();
  if (topology.host_names.size() < 2 || !world.all_boards_shared()) return false;
  std::vector<int> ranks_of_host(topology.host_names.size(), 0);
  for (const int host : topology.host_of_rank) ++ranks_of_host[static_cast<std::size_t>(host)];
  for (int rank = 0; rank < topology.size; ++rank) {
    const int local_size = ranks_of_host[static_cast<std::size_t>(topology.host_of_rank[static_cast<std::size_t>(rank)])];
    if (local_size < 2) continue;
    const std::size_t wanted = ShmBackend::wanted_shared_memory(local_size) + hierarchical::HierarchicalBackend::wanted_shared_memory(local_size);
    if (world.shared_memory_free(rank) >= wanted) continue;
    if (topology.rank == 0) {
      HVD_LOG(kWarning) << "/dev/shm of " << topology.host_name(rank) << " has " << world.shared_memory_free(rank) << " bytes left, expected "
                        << wanted << " for the hierarchical backend; using MPI between all ranks of process sets on several hosts, "
                        << "which is slower (docker: --shm-size)";
    }
    return false;
  }
  return true;
}

}  // namespace

JobConnection join_job(const RuntimeOptions& options, std::shared_ptr<const SharedArena> arena) {
  if (!mpi::is_active() && mpi_launcher_variable() == nullptr) {
    refuse_ranks_without_mpi();
    return job_of_one();
  }
  mpi::WorldOptions world_options;
  world_options.start_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.start_timeout);
  const auto world = mpi::MpiWorld::join(world_options);
  JobConnection job;
  job.world = world;
  job.control = mpi::make_mpi_control_plane(world);
  job.backends.push_back(std::make_shared<mpi::MpiBackend>(world));
  if (world->board_shared() && room_for_shm(*world)) job.backends.push_back(std::make_shared<ShmBackend>(world->host_name_prefix(), std::move(arena)));
  if (room_for_hierarchical(*world)) job.backends.push_back(std::make_shared<hierarchical::HierarchicalBackend>(world));
  // For process sets of one rank, whatever the size of the job.
  job.backends.push_back(std::make_shared<LocalBackend>(std::make_shared<LocalWorld>(1)));
  return job;
}

bool mpi_threads_multiple() { return !mpi::is_active() || mpi::threads_multiple(); }

void forget_job_peers() noexcept { mpi::mark_failed(); }

#else

JobConnection join_job(const RuntimeOptions&, std::shared_ptr<const SharedArena>) {
  if (const char* name = mpi_launcher_variable()) {
    throw UsageError(std::string("hvd::init: ") + name + " is set, so an MPI launcher started this process, but this hvd was built "
                     "without MPI (HVD_WITH_MPI=OFF)");
  }
  refuse_ranks_without_mpi();
  return job_of_one();
}

bool mpi_threads_multiple() { return true; }
void forget_job_peers() noexcept {}

#endif

std::vector<std::string_view> backend_names() {
  return {
      "local",
      "shm",
#if HVD_HAVE_MPI
      "mpi",
      "hierarchical",
#endif
  };
}

std::vector<Component> optional_components() {
  return {
#if HVD_HAVE_MPI
      {"MPI", true, mpi::library_version()},
#else
      {"MPI", false, "HVD_WITH_MPI=OFF"},
#endif
      {"shared memory", true, "POSIX shared memory"},
      {"CUDA", false, "this version has no GPU backend"},
      {"NCCL", false, "this version has no GPU backend"},
  };
}

}  // namespace hvd::runtime
