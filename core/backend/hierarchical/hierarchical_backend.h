#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "backend/backend.h"

namespace hvd::host {
class Node;
}
namespace hvd::message {
class Carrier;
}

namespace hvd::hierarchical {

/// Sizes of buffers and messages. Must be the same on every rank, except for call_bytes.
struct HierarchicalTuning {
  /// Size of an input or result buffer in the host's segment, which limits the data of a round. A
  /// multiple of 64.
  std::size_t buffer_bytes = 256 << 10;
  /// An allreduce in which a member receives at most this many bytes is sent whole, and every
  /// member reduces it. At most half a buffer.
  std::size_t small_bytes = 64 << 10;
  /// A host has at most as many drivers as a buffer has slices of this size. For smaller slices the
  /// messages cost more than the additional drivers save.
  std::size_t smallest_slice = 16 << 10;
  /// Approximate number of bytes that one call of Work::progress() reads or copies.
  std::size_t call_bytes = kBytesPerCall;
};

/// Collectives of ranks on several hosts. They use shared memory inside a host, and send each byte
/// between hosts once per host instead of once per rank. Each element is reduced once, in the order
/// of the hosts and then of the ranks. If the ranks of every host are consecutive, this is rank
/// order, and the results have the same bits as those of the other backends. See
/// docs/decisions/0013-hierarchical.md. Threading: see hvd::Backend.
class HierarchicalBackend final : public Backend {
 public:
  /// @param node of a job in which the ranks of every host share memory
  /// @throws UsageError for an invalid tuning
  HierarchicalBackend(std::shared_ptr<message::Carrier>, std::shared_ptr<const host::Node> node,
                      const HierarchicalTuning& tuning = {});
  /// Bytes of /dev/shm that the channels of a job with this many ranks on a host need, for a few
  /// process sets.
  static std::size_t wanted_shared_memory(int local_size) noexcept;

  std::string_view name() const noexcept override { return "hierarchical"; }
  /// Serves allreduce, allgather and broadcast of members on two or more hosts, if at least two
  /// members share a host.
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  const std::shared_ptr<message::Carrier> carrier_;
  const std::shared_ptr<const host::Node> node_;
  const HierarchicalTuning tuning_;
};

}  // namespace hvd::hierarchical
