#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/shared_arena.h"
#include "base/topology.h"
#include "device/context.h"
#include "engine/batch.h"
#include "engine/queue.h"

namespace hvd::runtime {

/// Decides where batches run, and opens the queues. Only this class distinguishes the host's memory
/// from a device's. The choice depends only on facts that the ranks have agreed on, so they open
/// the same channels at the same point of the plan. Used by the thread that drives the engine.
class QueueFactory {
 public:
  virtual ~QueueFactory() = default;
  /// The name of the queue, within its process set, in which the batch runs. @throws hvd::Error
  /// when no backend can run it
  virtual std::string choose(const Batch&) const = 0;
  /// Opens the queue that choose() has named. The factory must outlive it.
  virtual ChannelQueue open(const Batch&) = 0;
  /// Frees the buffers that these batches do not need. Called when no other batch will run from now
  /// on.
  virtual void keep_buffers_for(std::span<const Batch* const>) = 0;
};

/// The parts of the queues of one rank.
struct QueueParts {
  const Topology& topology;
  Peers& peers;
  std::shared_ptr<SharedArena> arena = nullptr;       ///< of this rank
  std::shared_ptr<device::Context> device = nullptr;  ///< of this rank, if it has a GPU
  std::int64_t fusion_threshold = 0;                  ///< of the batches
};

/// Makes queues from these backends' channels. A batch uses the backend with the highest score for
/// it and for its tensors' device. If no backend supports tensors on a GPU, they are staged through
/// a channel for the host's memory.
std::unique_ptr<QueueFactory> make_queue_factory(QueueParts, std::vector<std::shared_ptr<Backend>>,
                                                 std::optional<std::string> forced_backend);

}  // namespace hvd::runtime
