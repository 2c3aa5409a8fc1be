#pragma once

#include <memory>
#include <string_view>

#include "backend/backend.h"
#include "backend/flat/tuning.h"
#include "transport/carrier.h"

namespace hvd::flat {

/// Collectives on CPU memory over messages from rank to rank, whatever hosts they are on. It is
/// called after their carrier, "mpi" or "ucx".
///
/// Not MPI_Allreduce and its kin: the order in which those add depends on offset and size, they
/// block, and one call for a large tensor is slower than pieces that stay in the cache. Here every
/// element is reduced once, by one rank, in rank order. Threading: as hvd::Backend says.
class FlatBackend final : public Backend {
 public:
  explicit FlatBackend(std::shared_ptr<message::Carrier>, const FlatTuning& tuning = {});

  std::string_view name() const noexcept override { return name_; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  std::shared_ptr<message::Carrier> carrier_;
  std::string_view name_;  ///< the carrier's
  FlatTuning tuning_;
};

}  // namespace hvd::flat
