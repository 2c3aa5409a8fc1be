#pragma once

#include <memory>

#include "hvd/backend.h"
#include "mpi/mpi_world.h"
#include "mpi/tuning.h"

namespace hvd::mpi {

/// Collectives on CPU memory over MPI point-to-point messages.
///
/// Not MPI_Allreduce and its kin: the order in which those add depends on offset and size, they
/// block, and one call for a large tensor is slower than pieces that stay in the cache. Here every
/// element is reduced once, by one rank, in rank order. Threading: as hvd::Backend says. This
/// header does not need mpi.h.
class MpiBackend final : public Backend {
 public:
  /// @param cuda_aware every rank's MPI takes pointers to GPU memory
  explicit MpiBackend(std::shared_ptr<MpiWorld> world, const MpiTuning& tuning = {},
                      bool cuda_aware = false);

  std::string_view name() const noexcept override { return "mpi"; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;
  bool carries_memory_of(DeviceType type) const noexcept override {
    return type == DeviceType::kCuda && cuda_aware_;
  }

 private:
  std::shared_ptr<MpiWorld> world_;
  MpiTuning tuning_;
  bool cuda_aware_;
};

}  // namespace hvd::mpi
