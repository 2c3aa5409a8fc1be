#pragma once

#include <optional>

#include "member/messages.h"

namespace hvd::elastic {

/// The values that an agent has passed to this process, which it has started as a worker of an
/// elastic job.
struct WorkerIdentity {
  member::WorkerId id = 0;
  int socket = -1;
};

/// Empty in other processes. The first call removes HVD_WORKER_ID and HVD_MEMBER_SOCKET from the
/// environment, so that children of this process are not mistaken for the worker.
const std::optional<WorkerIdentity>& worker_identity() noexcept;
/// Returns true to the first caller, which becomes the worker.
bool claim_worker() noexcept;
/// The permanent slot of this process on its host: LOCAL_RANK, if that is a number.
std::optional<int> device_slot();

}  // namespace hvd::elastic
