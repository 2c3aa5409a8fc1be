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

/// Where batches run: the one place that tells the host's memory from a device's. All of it follows
/// from what the ranks have agreed on, so they open the same channels at the same point of the
/// plan. Used by the thread that drives the engine.
class QueueFactory {
 public:
  virtual ~QueueFactory() = default;
  /// The name of the queue, of those of its process set, in which the batch runs. @throws
  /// hvd::Error when no backend can run it
  virtual std::string choose(const Batch&) const = 0;
  /// Opens the queue that choose() has named. What it hands out does not outlive the factory.
  virtual ChannelQueue open(const Batch&) = 0;
  /// Only these will run from now on: frees the buffers that none of them needs.
  virtual void keep_buffers_for(std::span<const Batch* const>) = 0;
};

/// What the queues of one rank are made of.
struct QueueParts {
  const Topology& topology;
  Peers& peers;
  std::shared_ptr<SharedArena> arena = nullptr;       ///< of this rank
  std::shared_ptr<device::Context> device = nullptr;  ///< of this rank, if it has a GPU
  std::int64_t fusion_threshold = 0;                  ///< of the batches
};

/// Queues of these backends' channels: the best that can run a batch where its tensors are; for
/// tensors on a GPU that none can reduce there, a channel through the host's memory.
std::unique_ptr<QueueFactory> make_queue_factory(QueueParts, std::vector<std::shared_ptr<Backend>>,
                                                 std::optional<std::string> forced_backend);

}  // namespace hvd::runtime
