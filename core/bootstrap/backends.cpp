#include "bootstrap/backends.h"

#include <utility>

#include "backend/flat/flat_backend.h"
#include "backend/hierarchical/hierarchical_backend.h"
#include "backend/self/self_backend.h"
#include "backend/shm/shm_backend.h"
#include "base/log.h"
#include "base/text.h"
#include "bootstrap/mpi_module.h"
#include "hvd/error.h"
#include "transport/ucx/worker.h"

#if HVD_HAVE_CUDA
#include "device/cuda/cuda_api.h"
#endif
#if HVD_HAVE_NCCL
#include "backend/nccl/library.h"
#endif

namespace hvd::runtime {
namespace {

/// Whether /dev/shm has room for the shm backend. The ranks of a host reach the same decision,
/// because they compare the same numbers.
bool room_for_shm(const host::Node& node) {
  const Topology& topology = node.topology();
  const std::size_t wanted = ShmBackend::wanted_shared_memory(topology.local_size);
  const std::uint64_t free = node.shared_memory_free(topology.rank);
  if (topology.local_size < 2 || free >= wanted) return true;
  if (topology.local_rank == 0) {
    HVD_LOG(kWarning)
        << "/dev/shm has " << free << " bytes left, expected " << wanted
        << " for the shm backend; using messages between the ranks of this host, which "
           "is slower (docker: --shm-size)";
  }
  return false;
}

/// Whether every host has room for the hierarchical backend. All ranks reach the same decision,
/// because they compare the same numbers.
bool room_for_hierarchical(const host::Node& node) {
  const Topology& topology = node.topology();
  if (topology.host_names.size() < 2 || !node.all_control_segments_shared()) return false;
  std::vector<int> ranks_of_host(topology.host_names.size(), 0);
  for (const int host : topology.host_of_rank) ++ranks_of_host[static_cast<std::size_t>(host)];
  for (int rank = 0; rank < topology.size; ++rank) {
    const int local_size = ranks_of_host[static_cast<std::size_t>(
        topology.host_of_rank[static_cast<std::size_t>(rank)])];
    if (local_size < 2) continue;
    const std::size_t wanted = ShmBackend::wanted_shared_memory(local_size) +
                               hierarchical::HierarchicalBackend::wanted_shared_memory(local_size);
    if (node.shared_memory_free(rank) >= wanted) continue;
    if (topology.rank == 0) {
      HVD_LOG(kWarning) << "/dev/shm of " << topology.host_name(rank) << " has "
                        << node.shared_memory_free(rank) << " bytes left, expected " << wanted
                        << " for the hierarchical backend; using messages between all ranks of "
                           "process sets on several hosts, "
                        << "which is slower (docker: --shm-size)";
    }
    return false;
  }
  return true;
}

/// If two ranks send each other the whole tensor, an allreduce of 128 KiB over UCX between two
/// hosts takes 0.9 of the time, one of 256 KiB as long as in slices, and a larger one longer. Over
/// MPI it takes longer: by a tenth between two hosts and by a sixth on one host.
flat::FlatTuning tuning_for(const message::Carrier& carrier) {
  flat::FlatTuning tuning;
  if (carrier.name() == name_of(Controller::kUcx)) tuning.direct_pair_bytes = 256 * 1024;
  return tuning;
}

std::vector<Component> mpi_components() {
  std::string reason;
  const MpiModule* const mpi = mpi_module(&reason);
  if (mpi == nullptr) return {{"MPI", false, reason}};
  return {{"MPI", true, mpi->library_version()}};
}

}  // namespace

std::vector<std::string_view> backend_names() {
  return {
      "self", "shm", "hierarchical", "mpi",
#if HVD_HAVE_UCX
      "ucx",
#endif
#if HVD_HAVE_NCCL
      "nccl",
#endif
  };
}

void check_backend_name(const RuntimeOptions& options, const InitMethod& method) {
  if (!options.backend) return;
  const std::string own = name_of(method.controller);
  const bool carriers = *options.backend == "mpi" || *options.backend == "ucx";
  if (carriers && method.controller != Controller::kLocal && *options.backend != own) {
    throw UsageError(text("hvd::init: backend (HVD_BACKEND): '", *options.backend,
                          "' in a job whose messages travel over ", own, " (init method ",
                          method.url, "); ask for '", own,
                          "', leave it unset, or start the ranks with 'hvdrun --controller ",
                          *options.backend, "'"));
  }
  const auto known = backend_names();
  for (const std::string_view name : known)
    if (name == *options.backend) return;
  throw UsageError(text("hvd::init: backend (HVD_BACKEND): expected one of '",
                        join_text(known, "', '"), "', got '", *options.backend, "'"));
}

std::vector<std::shared_ptr<Backend>> make_host_backends(
    const std::shared_ptr<message::Carrier>& carrier, const std::shared_ptr<host::Node>& node,
    std::shared_ptr<const SharedArena> arena) {
  std::vector<std::shared_ptr<Backend>> backends;
  backends.push_back(std::make_shared<flat::FlatBackend>(carrier, tuning_for(*carrier)));
  if (node->control_segment_shared() && room_for_shm(*node))
    backends.push_back(std::make_shared<ShmBackend>(node->name_prefix(), std::move(arena)));
  if (room_for_hierarchical(*node))
    backends.push_back(std::make_shared<hierarchical::HierarchicalBackend>(carrier, node));
  backends.push_back(std::make_shared<SelfBackend>());  // for process sets of one rank
  return backends;
}

std::vector<Component> optional_components() {
  std::vector<Component> components = mpi_components();
  components.insert(components.end(), {
#if HVD_HAVE_UCX
                                          {"UCX", true, ucx::describe_library()},
#else
                                          {"UCX", false, "HVD_WITH_UCX=OFF, or there was no ucp.h"},
#endif
                                          {"shared memory", true, "POSIX shared memory"},
#if HVD_HAVE_CUDA
                                          {"CUDA", true, device::describe_cuda()},
#else
                                          {"CUDA", false,
                                           "HVD_WITH_CUDA=OFF, or there was no nvcc"},
#endif
#if HVD_HAVE_NCCL
                                          {"NCCL", true, nccl::describe_library()},
#else
                                          {"NCCL", false, "HVD_WITH_NCCL=OFF, or there was none"},
#endif
                                      });
  return components;
}

}  // namespace hvd::runtime
