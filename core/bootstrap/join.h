#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/shared_arena.h"
#include "device/context.h"
#include "engine/runtime_options.h"
#include "hvd/store.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// Everything that a process needs to take part in its job. The members that are listed last are
/// destroyed first.
struct JobConnection {
  std::string controller = "local";         ///< carries the messages: "mpi", "ucx", "local"
  std::string init_method = "local://";     ///< how the ranks have found each other
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

/// See hvd::use_agent_store(). Call it before join_job().
void open_agent_store_by(OpenAgentStore);

/// The ranks with which this rank will certainly exchange data: those with its local rank on the
/// previous and the next host (decision 13). At most two. The relation is symmetric. A rank
/// connects to any other rank when it first sends to it.
std::vector<int> data_neighbours(const Topology&);

}  // namespace hvd::runtime
