#pragma once

#include <cstddef>
#include <memory>

#include "hvd/backend.h"
#include "mpi/mpi_world.h"

namespace hvd::mpi {

/// How messages are cut. Must be the same on every rank.
struct MpiTuning {
  /// Largest message. Small enough that what was received is still in the L2 cache when it is reduced.
  std::size_t chunk_bytes = 128 * 1024;
  /// Allreduce: pieces of the tensor under way at the same time, 1 to 4.
  int windows = 4;
  /// Allreduce: a tensor is sent whole to every rank, which saves a step, while a rank receives no more than this.
  std::size_t direct_bytes = 64 * 1024;
  /// Other collectives: chunks under way with each peer.
  int outstanding_chunks = 2;
};

/// Collectives on CPU memory over MPI point-to-point messages.
///
/// Not MPI_Allreduce and its kin: the order in which those add depends on offset and size, they block, and one call for a large tensor
/// is slower than pieces that stay in the cache. Here every element is reduced once, by one rank, in rank order.
/// Threading: as hvd::Backend says. This header does not need mpi.h.
class MpiBackend final : public Backend {
 public:
  explicit MpiBackend(std::shared_ptr<MpiWorld> world, const MpiTuning& tuning = {});

  std::string_view name() const noexcept override { return "mpi"; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  std::shared_ptr<MpiWorld> world_;
  MpiTuning tuning_;
};

}  // namespace hvd::mpi
