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

/// How tensors are cut. Must be the same on every rank.
struct HierarchicalTuning {
  /// Of each member's part of its host's segment: what a round moves at most. A multiple of 64.
  std::size_t slot_bytes = 256 << 10;
  /// An allreduce is shared as it is, and reduced by every member, while a member gets no more than
  /// this. At most half a slot.
  std::size_t small_bytes = 64 << 10;
  /// There are no more drivers than slices of this size in a slot: below it messages cost more than
  /// they bring.
  std::size_t smallest_slice = 16 << 10;
  /// Approximate bytes that one call of Work::progress() reads or copies. May differ by rank.
  std::size_t call_bytes = kBytesPerCall;
};

/// Collectives of ranks on several hosts: shared memory inside a host, and between hosts
/// messages of each byte once per host instead of once per rank. Each element is reduced once, in
/// the order of the hosts and then of the ranks; where the ranks of every host are consecutive that
/// is rank order, and the bits are those of the other backends. See
/// docs/decisions/0013-hierarchical.md. Threading: as hvd::Backend says.
class HierarchicalBackend final : public Backend {
 public:
  /// @param node of a job whose hosts all share memory among their ranks
  HierarchicalBackend(std::shared_ptr<message::Carrier>, std::shared_ptr<const host::Node> node,
                      const HierarchicalTuning& tuning = {});
  /// What the channels of a job with this many ranks on a host take of its /dev/shm, with room for
  /// some process sets.
  static std::size_t wanted_shared_memory(int local_size) noexcept;

  std::string_view name() const noexcept override { return "hierarchical"; }
  /// Allreduce, allgather and broadcast of members on two or more hosts, of which two or more share
  /// one.
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  const std::shared_ptr<message::Carrier> carrier_;
  const std::shared_ptr<const host::Node> node_;
  const HierarchicalTuning tuning_;
};

}  // namespace hvd::hierarchical
