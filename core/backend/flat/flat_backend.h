#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "backend/backend.h"
#include "transport/carrier.h"

namespace hvd::flat {

/// Sizes of messages. Must be the same on every rank.
struct FlatTuning {
  /// The largest message of other collectives than allreduce, called a chunk.
  std::size_t chunk_bytes = 128 * 1024;
  /// The largest message of an allreduce in slices. Between two hosts MPI needs 0.8 to 0.9 of the
  /// time that slices of 128 KiB take, as each has a rendezvous.
  std::size_t slice_bytes = 512 * 1024;
  /// Allreduce: windows under way at the same time, 1 to 4. See allreduce.cpp.
  int windows = 4;
  /// Allreduce: each rank sends its whole tensor to every other rank if a rank then receives at
  /// most this many bytes. The exchange then takes one step instead of two.
  std::size_t direct_bytes = 64 * 1024;
  /// The same limit for two ranks, if it is larger than direct_bytes. Two ranks send the same
  /// number of bytes either way, but reduce twice as many if they send whole tensors.
  std::size_t direct_pair_bytes = 0;
  /// Other collectives: chunks under way with each peer.
  int outstanding_chunks = 2;
};

/// Collectives on CPU memory that send messages from rank to rank, on any hosts. The backend has
/// the name of its carrier, "mpi" or "ucx".
///
/// The backend calls no collectives of MPI: their order of additions depends on offset and size,
/// they block, and one call for a large tensor is slower than pieces that fit into the cache. The
/// backend reduces each element in rank order. Threading: see hvd::Backend.
class FlatBackend final : public Backend {
 public:
  /// @throws UsageError for an invalid tuning
  explicit FlatBackend(std::shared_ptr<message::Carrier>, const FlatTuning& tuning = {});

  std::string_view name() const noexcept override { return name_; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  std::shared_ptr<message::Carrier> carrier_;
  std::string_view name_;  ///< the carrier owns the text
  FlatTuning tuning_;
};

}  // namespace hvd::flat
