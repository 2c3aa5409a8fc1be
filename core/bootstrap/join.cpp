#include "bootstrap/join.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "backend/self/self_backend.h"
#include "base/config.h"
#include "base/expect.h"
#include "base/limits.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "bootstrap/agreement.h"
#include "bootstrap/backends.h"
#include "bootstrap/build_identity.h"
#include "bootstrap/gpu.h"
#include "bootstrap/init_method.h"
#include "bootstrap/mpi_module.h"
#include "bootstrap/open_store.h"
#include "bootstrap/program_store.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/world.h"
#include "hvd/error.h"
#include "transport/control_plane.h"
#include "transport/ucx/worker.h"

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

/// Opens the store of torchrun's agent. The agent uses the port, so rank 0 cannot serve a store
/// there.
std::unique_ptr<rendezvous::Store> open_agent_store(const RuntimeOptions& options,
                                                    const InitMethod& method, Deadline deadline) {
  OpenAgentStore open;
  {
    AgentStore& store = agent_store();
    const MutexLock lock(store.mutex);
    open = store.open;
  }
  if (!open) {
    throw UsageError(
        text("hvd::init: torchrun's agent serves ", method.host, ":", method.port,
             " (TORCHELASTIC_USE_AGENT_STORE=True) in PyTorch's protocol, which only "
             "programs with hvd::torch support; link hvd::torch, or set HVD_INIT_METHOD to "
             "tcp://HOST:PORT with another port on the host of rank 0, or to "
             "file:///path"));
  }
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.start_timeout);
  return rendezvous::open_program_store(
      [open, host = method.host, port = method.port, timeout] { return open(host, port, timeout); },
      text("store://", method.host, ":", method.port), deadline);
}

MpiModule& require_mpi(const InitMethod& method) {
  std::string reason;
  if (MpiModule* const module = mpi_module(&reason)) return *module;
  throw UsageError(
      text("hvd::init: ", method.source,
           method.url == method.source ? "" : text(" selects MPI (", method.url, ")"),
           ", but hvd's part for MPI cannot be loaded: ", reason,
           "; install the MPI that hvd was built with (HVD_WITH_MPI), or one that has "
           "libmpi_abi.so.1 and name that library with HVD_MPI_LIBRARY if it is not found, or "
           "start the ranks without MPI: 'hvdrun --controller ucx'"));
}

std::shared_ptr<MpiJob> join_over_mpi(const RuntimeOptions& options, const InitMethod& method) {
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

/// Finds this rank's GPU, and compares it and the settings with those of the other ranks. If a rank
/// cannot begin, all ranks throw its reason and leave the job in order, so that no rank waits for
/// another or reports it as lost.
Agreement agree_or_leave(JobConnection& job, MpiJob& world, const RuntimeOptions& options,
                         Gpu& gpu) {
  const Topology& topology = job.control->topology();
  RankStatement own = statement_of(options);
  std::exception_ptr failure;
  try {
    const MpiModule* const mpi = mpi_module();
    if (const auto text = contradiction_to_mpi(options, topology.rank, topology.size,
                                               mpi != nullptr ? mpi->library_version() : "unknown"))
      throw UsageError(*text);
    gpu = find_gpu(options, topology.local_rank, own);
  } catch (const std::exception& error) {
    record_failure(own, error);
    failure = std::current_exception();
  }
  try {
    std::vector<RankStatement> statements(static_cast<std::size_t>(topology.size));
    world.allgather(&own, statements.data(), sizeof own);
    return compare(statements, topology);
  } catch (const UsageError&) {
    job.control->farewell();
    if (failure) std::rethrow_exception(failure);
    throw;
  }
}

rendezvous::RankInfo rank_info(int rank, int size) {
  return {.job = job_name(),
          .token = env_string("JOB_TOKEN").value_or(""),
          .build = build_identity(),
          .rank = rank,
          .size = size};
}

/// The program or hvdrun has selected the ranks, which may come from several runs of a launcher, so
/// the job's name does not contain a run.
rendezvous::RankInfo generation_rank_info(int rank, int size) {
  rendezvous::RankInfo info = rank_info(rank, size);
  info.job = env_string("JOB_NAME").value_or("hvd");
  return info;
}

using OpenStore = std::function<std::unique_ptr<rendezvous::Store>()>;

/// Joins the other ranks in the store that `open` opens.
/// @param joined called when all ranks have joined; may be empty
JoinRanks joining_in(OpenStore open, const rendezvous::RankInfo& own, const RuntimeOptions& options,
                     Deadline deadline, std::function<void()> joined = {}) {
  return [open = std::move(open), own, deadline, limit = options.start_timeout,
          joined = std::move(joined)](std::span<const std::byte> payload) {
    return rendezvous::Rendezvous::join(open(), own, payload, deadline, limit, joined);
  };
}

/// Opens the store in which the ranks find each other, and joins the ranks there.
JoinRanks joining(const RuntimeOptions& options, const InitMethod& method,
                  std::optional<ProgramStore> store, Deadline deadline) {
  const rendezvous::RankInfo own = rank_info(method.rank, method.size);
  rendezvous::check(own);
  OpenStore open;
  if (store) {
    open = [functions = std::move(store->store), deadline] {
      return rendezvous::open_program_store([functions] { return functions; }, functions.name,
                                            deadline);
    };
  } else if (method.agent_store) {
    open = [&options, &method, deadline] { return open_agent_store(options, method, deadline); };
  } else {
    open = [&method, own, deadline] { return rendezvous::open_store(method.url, own, deadline); };
  }
  return joining_in(std::move(open), own, options, deadline);
}

/// Makes the backends of a job whose ranks have agreed, and ends its start.
void make_backends(JobConnection& job, World& world, const RuntimeOptions& options,
                   std::shared_ptr<const SharedArena> arena, const Gpu& gpu,
                   const Agreement& agreement) {
  const auto& carrier = world.carrier();
  const auto& node = world.node();
  const Topology& topology = node->topology();
  if (topology.rank == 0) report_unused_gpus(agreement, options);
  job.backends = make_host_backends(carrier, node, std::move(arena));
  job.device = gpu.device;
  if (auto nccl = make_nccl_backend(gpu, agreement, topology, job.backends, options))
    job.backends.push_back(std::move(nccl));
  for (const int rank : data_neighbours(topology)) carrier->connect(message::Plane::kData, rank);
  world.begun();
}

Deadline start_deadline(const RuntimeOptions& options) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::nanoseconds>(options.start_timeout);
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

/// Connects this rank with the others, over MPI or UCX.
/// @param joining_by how the ranks find each other in a job over UCX
/// @param grace time beyond the start's limit, once all ranks have joined
JobConnection connect(const RuntimeOptions& options, const InitMethod& method,
                      std::shared_ptr<const SharedArena> arena,
                      const std::function<JoinRanks(Deadline)>& joining_by,
                      std::chrono::seconds grace = std::chrono::seconds(0)) {
  JobConnection job;
  job.controller = name_of(method.controller);
  Gpu gpu;
  Agreement agreement;
  std::shared_ptr<World> world;
  std::shared_ptr<MpiJob> over_mpi;
  if (method.controller == Controller::kMpi) {
    world = over_mpi = join_over_mpi(options, method);
  } else {
    const Deadline deadline = start_deadline(options);
    world = join_over_ucx(
        method.url, joining_by(deadline), method.rank, method.size, statement_of(options),
        [&](RankStatement& own, const Topology& topology) {
          gpu = find_gpu(options, topology.local_rank, own);
        },
        agreement, deadline + grace);
  }
  job.world = world;
  job.init_method = world->init_method();
  job.neighbours = world->node()->control_segment().other_processes();
  try {
    job.control = message::make_control_plane(world->carrier(), world->node());
    if (over_mpi) agreement = agree_or_leave(job, *over_mpi, options, gpu);
    make_backends(job, *world, options, std::move(arena), gpu, agreement);
  } catch (const std::exception& error) {
    release_descriptors();
    world->abandon(error);
    throw;
  }
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
  const auto warning = warning_for_single_rank_mpi(method, mpi_is_active());
  if (warning && method.rank == 0) {
    HVD_LOG(kWarning) << *warning;
  }
  return connect(options, method, std::move(arena), [&](Deadline deadline) {
    return joining(options, method, std::move(store), deadline);
  });
}

rendezvous::StoreServer::Options generation_server(const std::string& name, int max_unadmitted) {
  const rendezvous::RankInfo own = generation_rank_info(0, 1);
  return {.name = name,
          .job = own.job,
          .token = own.token,
          .max_unadmitted = static_cast<std::size_t>(max_unadmitted)};
}

void prepare_generation() { ucx::prepare_workers(); }

JobConnection join_generation(const RuntimeOptions& options,
                              std::shared_ptr<const SharedArena> arena,
                              const GenerationEndpoint& endpoint) {
  HVD_EXPECT(!endpoint.hosts.empty() && endpoint.rank < endpoint.size,
             "the rank is one of the generation");
  const InitMethod method{.controller = endpoint.size > 1 ? Controller::kUcx : Controller::kLocal,
                          .url = text("tcp://", endpoint.hosts.front(), ":", endpoint.port),
                          .source = endpoint.source,
                          .rank = endpoint.rank,
                          .size = endpoint.size};
  check_backend_name(options, method);
  if (endpoint.size == 1) {
    if (endpoint.arrived) endpoint.arrived();
    return job_of_one(options);
  }
  const auto joining_by = [&](Deadline deadline) -> JoinRanks {
    const rendezvous::RankInfo of_server = generation_rank_info(endpoint.rank, endpoint.size);
    rendezvous::RankInfo own = of_server;
    own.job += endpoint.instance;
    const auto open = [&endpoint, of_server, deadline] {
      return rendezvous::open_served_store(endpoint.hosts, endpoint.port, of_server, deadline,
                                           endpoint.interruption);
    };
    return joining_in(open, own, options, deadline, endpoint.arrived);
  };
  return connect(options, method, std::move(arena), joining_by, endpoint.grace);
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
