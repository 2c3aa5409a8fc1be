#pragma once

#include <cstddef>
#include <memory>

#include "backend/backend.h"
#include "base/shared_arena.h"
#include "device/context.h"

namespace hvd::staged {

struct StagingOptions {
  /// An allreduce or broadcast is cut into so much, of which one piece comes from the device, one
  /// is on its way between the ranks and one goes back, all at the same time. Equal on all ranks.
  std::size_t chunk_bytes = 4 << 20;
  /// Pinned memory for the pieces is made when the channel is opened, and not when a collective
  /// first needs it.
  bool makes_memory_beforehand = false;
};

/// Collectives on a device's memory through a channel for the host's: into pinned memory, between
/// the ranks, and back. For GPUs without NCCL, several ranks on one GPU, and what NCCL does not
/// compute; results are those of the host's channel, bit for bit.
///
/// A Work is complete when its last copy to the device is queued. Adasum is made of the host's
/// operations here.
/// @param host opened for these ranks, and used by this channel only
/// @param arena of this rank, for the pinned memory; may be null
std::unique_ptr<Channel> make_host_staged_channel(std::unique_ptr<Channel> host,
                                                  std::shared_ptr<device::Context>,
                                                  const ChannelSpec&,
                                                  std::shared_ptr<SharedArena> arena,
                                                  const StagingOptions& = {});

}  // namespace hvd::staged
