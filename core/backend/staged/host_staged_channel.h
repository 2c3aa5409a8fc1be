#pragma once

#include <cstddef>
#include <memory>

#include "backend/backend.h"
#include "base/shared_arena.h"
#include "device/context.h"

namespace hvd::staged {

struct StagingOptions {
  /// Size in bytes of the pieces of an allreduce or broadcast. At the same time, one piece is
  /// copied from the device, one is exchanged between the ranks, and one is copied back. Must be
  /// equal on all ranks.
  std::size_t chunk_bytes = 4 << 20;
  /// Whether pinned memory is allocated when the channel opens instead of at its first use.
  bool allocates_in_advance = false;
};

/// Collectives on device memory through a channel for host memory: copy to pinned memory, exchange
/// between the ranks, copy back. Used for GPUs without NCCL, several ranks on one GPU, and
/// operations that NCCL does not have. The results are bit for bit those of the host's channel.
///
/// A Work is complete when its last copy to the device is queued. Adasum is computed from the host
/// channel's operations.
/// @param host a channel that was opened for these ranks and that only this channel uses
/// @param arena this rank's arena, for the pinned memory; may be null
std::unique_ptr<Channel> make_host_staged_channel(std::unique_ptr<Channel> host,
                                                  std::shared_ptr<device::Context>,
                                                  const ChannelSpec&,
                                                  std::shared_ptr<SharedArena> arena,
                                                  const StagingOptions& = {});

}  // namespace hvd::staged
