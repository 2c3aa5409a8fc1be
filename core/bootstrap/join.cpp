#include "bootstrap/join.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "backend/self/self_backend.h"
#include "base/config.h"
#include "base/mutex.h"
#include "base/text.h"
#include "bootstrap/agreement.h"
#include "bootstrap/backends.h"
#include "bootstrap/build_identity.h"
#include "bootstrap/gpu.h"
#include "bootstrap/init_method.h"
#include "bootstrap/mpi_module.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/world.h"
#include "hvd/error.h"
#include "transport/control_plane.h"

namespace hvd::runtime {
namespace {

/// The function that a framework has registered to open the store of torchrun's agent.
struct AgentStore {
  Mutex mutex;
  OpenAgentStore open HVD_GUARDED_BY(mutex);
};

AgentStore& agent_store() {
  static AgentStore store;
  return store;
}

/// Opens the store of torchrun's agent. The agent has the port, so rank 0 cannot serve it.
KeyValueStore open_agent_store(const InitMethod& method, std::chrono::milliseconds timeout) {
  OpenAgentStore open;
  {
    AgentStore& store = agent_store();
    const MutexLock lock(store.mutex);
    open = store.open;
  }
  if (open) return open(method.host, method.port, timeout);
  throw UsageError(text("hvd::init: torchrun's agent serves ", method.host, ":", method.port,
                        " (TORCHELASTIC_USE_AGENT_STORE=True), whose protocol a program without "
                        "hvd::torch does not speak; link hvd::torch, or set HVD_INIT_METHOD to "
                        "tcp://HOST:PORT with another port on the host of rank 0, or to "
                        "file:///path"));
}

MpiModule& require_mpi(const InitMethod& method) {
  std::string reason;
  if (MpiModule* const module = mpi_module(&reason)) return *module;
  throw UsageError(
      text("hvd::init: ", method.source,
           method.place == method.source ? "" : text(" asks for MPI (", method.place, ")"),
           ", but hvd's part for MPI cannot be loaded: ", reason,
           "; install the MPI that hvd was built with (HVD_WITH_MPI), or one that has "
           "libmpi_abi.so.1 and name that library with HVD_MPI_LIBRARY if it is not found, or "
           "start the ranks without MPI: 'hvdrun --controller ucx'"));
}

std::shared_ptr<World> join_over_mpi(const RuntimeOptions& options, const InitMethod& method) {
  using std::chrono::milliseconds;
  // At least a second, because a thread inside a call may have no core for a while.
  const Duration call_timeout =
      std::max<Duration>(options.peer_timeout / 2, std::chrono::seconds(1));
  MpiModule& mpi = require_mpi(method);
  if (!mpi.active()) {
    if (const auto text = contradiction_to_launcher(mpi.library_version())) throw UsageError(*text);
  }
  return mpi.join(std::chrono::duration_cast<milliseconds>(options.start_timeout),
                  std::chrono::duration_cast<milliseconds>(call_timeout));
}

std::shared_ptr<World> join_world(const RuntimeOptions& options, const InitMethod& method,
                                  std::optional<ProgramStore> store) {
  if (method.controller == Controller::kMpi) return join_over_mpi(options, method);
  const Deadline deadline =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::nanoseconds>(options.start_timeout);
  const rendezvous::RankInfo own{.job = env_string("JOB_NAME").value_or(""),
                                 .token = env_string("JOB_TOKEN").value_or(""),
                                 .build = build_identity(),
                                 .rank = method.rank,
                                 .size = method.size};
  if (store)
    return join_over_ucx(rendezvous::join_in_store(std::move(store->store), own, deadline),
                         deadline);
  if (method.agent_store) {
    const auto timeout =
        std::chrono::duration_cast<std::chrono::milliseconds>(options.start_timeout);
    return join_over_ucx(
        rendezvous::join_in_store(open_agent_store(method, timeout), own, deadline), deadline);
  }
  return join_over_ucx(rendezvous::join(method.place, own, deadline), deadline);
}

/// Finds this rank's GPU, and compares it and the settings with those of the other ranks. If a rank
/// cannot begin, all throw its reason and leave the job in order, so that no rank waits for another
/// one or reports it as lost.
Agreement agree_or_leave(JobConnection& job, World& world, const RuntimeOptions& options,
                         Gpu& gpu) {
  const Topology& topology = job.control->topology();
  RankStatement own = statement_of(options);
  std::exception_ptr failure;
  try {
    if (job.controller == name_of(Controller::kMpi)) {
      const MpiModule* const mpi = mpi_module();
      if (const auto text =
              contradiction_to_mpi(options, topology.rank, topology.size,
                                   mpi != nullptr ? mpi->library_version() : "unknown"))
        throw UsageError(*text);
    }
    gpu = find_gpu(options, topology.local_rank, own);
  } catch (const std::exception& error) {
    std::string_view(error.what()).copy(own.failure, sizeof own.failure - 1);
    failure = std::current_exception();
  }
  try {
    return agree(world, own);
  } catch (const UsageError&) {
    job.control->farewell();
    if (failure) std::rethrow_exception(failure);
    throw;
  }
}

/// Makes the control plane and the backends of a job whose ranks have found each other.
void make_connection(JobConnection& job, World& world, const RuntimeOptions& options,
                     std::shared_ptr<const SharedArena> arena) {
  const auto& carrier = world.carrier();
  const auto& node = world.node();
  const Topology& topology = node->topology();
  job.control = message::make_control_plane(carrier, node);
  Gpu gpu;
  const Agreement agreement = agree_or_leave(job, world, options, gpu);
  if (topology.rank == 0) report_unused_gpus(agreement, options);
  job.backends = make_host_backends(carrier, node, std::move(arena));
  job.device = gpu.device;
  if (auto nccl = make_nccl_backend(gpu, agreement, topology, job.backends, options))
    job.backends.push_back(std::move(nccl));
  for (const int rank : data_neighbours(topology)) carrier->connect(message::Plane::kData, rank);
  world.begun();
}

JobConnection job_of_one(const RuntimeOptions& options) {
  JobConnection job;
  job.control = control::make_self_control_plane();
  job.backends.push_back(std::make_shared<SelfBackend>());
  const Topology& topology = job.control->topology();
  RankStatement own = statement_of(options);
  const Gpu gpu = find_gpu(options, 0, own);
  job.device = gpu.device;
  if (auto nccl =
          make_nccl_backend(gpu, compare({&own, 1}, topology), topology, job.backends, options))
    job.backends.push_back(std::move(nccl));
  return job;
}

}  // namespace

JobConnection join_job(const RuntimeOptions& options, std::shared_ptr<const SharedArena> arena,
                       std::optional<ProgramStore> store) {
  const InitMethod method =
      store ? method_of_store(options, store->store.name, store->rank, store->size)
            : choose_init_method(options, mpi_is_active());
  check_backend_name(options, method);
  if (method.controller == Controller::kLocal) return job_of_one(options);
  const auto world = join_world(options, method, std::move(store));
  JobConnection job;
  job.world = world;
  job.controller = name_of(method.controller);
  job.init_method = world->init_method();
  try {
    make_connection(job, *world, options, std::move(arena));
  } catch (const std::exception& error) {
    world->abandon(error);
    throw;
  }
  return job;
}

void open_agent_store_by(OpenAgentStore open) {
  AgentStore& store = agent_store();
  const MutexLock lock(store.mutex);
  store.open = std::move(open);
}

std::vector<int> data_neighbours(const Topology& topology) {
  std::vector<int> neighbours;
  for (const int host : {topology.host_index() - 1, topology.host_index() + 1}) {
    int position = 0;
    for (int rank = 0; rank < topology.size; ++rank) {
      if (topology.host_of_rank[static_cast<std::size_t>(rank)] != host) continue;
      if (position++ == topology.local_rank) neighbours.push_back(rank);
    }
  }
  return neighbours;
}

}  // namespace hvd::runtime
