#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/process_watch.h"
#include "base/shared_arena.h"
#include "bootstrap/socket_store.h"
#include "bootstrap/store_server.h"
#include "device/context.h"
#include "engine/runtime_options.h"
#include "hvd/store.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// Everything that a process needs to take part in its job. The members are destroyed in reverse
/// order.
struct JobConnection {
  std::string controller = "local";      ///< carries the messages: "mpi", "ucx", "local"
  std::string init_method = "local://";  ///< how the ranks have found each other
  /// The other ranks of this host, with which this process shares memory.
  std::vector<ProcessIdentity> neighbours;
  std::shared_ptr<void> world;              ///< keeps objects of `control` and `backends` alive
  std::shared_ptr<device::Context> device;  ///< this rank's GPU, if it has one
  std::vector<std::shared_ptr<Backend>> backends;
  std::unique_ptr<control::ControlPlane> control;
};

/// A store that the program provides, and this process's rank and the number of ranks.
struct ProgramStore {
  KeyValueStore store;
  int rank = 0;
  int size = 1;
};

/// Joins the job this process was launched into, or makes a job of one rank. Collective.
/// @param arena of this process; may be null
/// @param store the ranks find each other in it; without one the options and the environment
/// determine the init method
/// @throws UsageError when program and environment contradict each other, or name several ranks
/// without a way to find each other; PeerLostError when a rank does not join in time
JobConnection join_job(const RuntimeOptions&, std::shared_ptr<const SharedArena> arena,
                       std::optional<ProgramStore> store = {});

/// The address at which the ranks of a generation find each other: a store that the process of rank
/// 0 has served since before the generation began.
struct GenerationEndpoint {
  std::vector<std::string> hosts = {};  ///< addresses of rank 0's host, to be tried in turn
  std::uint16_t port = 0;
  int rank = 0;
  int size = 1;
  std::shared_ptr<rendezvous::Interruption> interruption = {};  ///< ends the call
  std::string source = "hvdrun";  ///< selects the members; for error texts
  std::string instance = {};      ///< ranks with different instances do not find each other
  /// Called when all ranks have joined, before any part of the job is made. May be empty.
  std::function<void()> arrived = {};
  std::chrono::seconds grace{0};  ///< time beyond the start's limit, once all ranks have joined
};
/// The settings of that store's server.
/// @param max_unadmitted connections of processes that have not proved themselves
rendezvous::StoreServer::Options generation_server(const std::string& name, int max_unadmitted);
/// Joins the generation. Collective. The server must exist until the call has ended.
/// @pre there is an address, and the rank is below the size
/// @throws as join_job()
JobConnection join_generation(const RuntimeOptions&, std::shared_ptr<const SharedArena> arena,
                              const GenerationEndpoint&);

/// Prepares objects that the next join_generation() of this process will use. Thread-safe, also
/// while the process is in a job. @throws hvd::Error when the system refuses it
void prepare_generation();

/// See hvd::use_agent_store(). Call it before join_job().
void open_agent_store_by(OpenAgentStore);

/// The ranks with which this rank will certainly exchange data: those with its local rank on the
/// previous and the next host (decision 13). At most two. The relation is symmetric. Connections to
/// other ranks are made when a rank first sends to them.
std::vector<int> data_neighbours(const Topology&);

}  // namespace hvd::runtime
