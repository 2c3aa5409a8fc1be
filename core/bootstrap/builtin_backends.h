#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "base/shared_arena.h"
#include "device/context.h"
#include "engine/runtime_options.h"
#include "hvd/store.h"
#include "transport/control_plane.h"

namespace hvd::nccl {
class Library;
}

namespace hvd::runtime {

/// What a process needs to take part in its job. The members that are listed last are destroyed
/// first.
struct JobConnection {
  std::string controller = "local";         ///< what carries the messages: "mpi", "ucx", "local"
  std::string init_method = "local://";     ///< how the ranks have met
  std::shared_ptr<void> world;              ///< keeps alive what plane and backends share
  std::shared_ptr<device::Context> device;  ///< this rank's GPU, if it has one
  std::vector<std::shared_ptr<Backend>> backends;
  std::unique_ptr<control::ControlPlane> control;
};

/// A store that the program has, and who it says that this process is.
struct ProgramStore {
  KeyValueStore store;
  int rank = 0;
  int size = 1;
};

/// Joins the job this process was launched into, or makes a job of one. Collective.
/// @param arena of this process; may be null
/// @param store to meet in; without one the options and the environment say how
/// @throws UsageError when program and environment contradict each other or speak of several ranks
/// without saying how they meet; PeerLostError when a rank does not come in time
JobConnection join_job(const RuntimeOptions&, std::shared_ptr<const SharedArena> arena,
                       std::optional<ProgramStore> store = {});

/// Before join_job(): see hvd::use_agent_store().
void open_agent_store_by(OpenAgentStore);

/// Before join_job(): see hvd::use_device_memory().
void use_device_memory(DeviceMemory);

/// For tests, before join_job(): a simulated device in place of CUDA's, which only the host's
/// backends serve if there is no simulated NCCL too. Null: CUDA's again.
void use_device_api(std::shared_ptr<device::Api>);
/// For tests: NCCL on that device. In a build without NCCL it is not used.
void use_nccl_library(std::shared_ptr<nccl::Library>);

/// The names that a backend can be chosen by; a job has one of "mpi" and "ucx".
std::vector<std::string_view> backend_names();

struct Component {
  const char* name;
  bool built;
  std::string detail;  ///< a version, or why it was left out
};
/// Everything optional, for build_info() and `hvdrun --check-build`.
std::vector<Component> optional_components();

/// NCCL can be loaded, and there is a GPU.
bool nccl_usable() noexcept;
/// MPI runs with MPI_THREAD_MULTIPLE, or is not in use.
bool mpi_threads_multiple();
/// MPI runs in this process, started by the program or by hvd.
bool mpi_is_active() noexcept;
/// The job has failed: nobody waits for its peers any more, not even at process exit.
void forget_job_peers() noexcept;

}  // namespace hvd::runtime
