#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "hvd/backend.h"

namespace hvd::shm {

struct ShmTuning {
  /// Of each member's part of the segment, of which there are two. A multiple of 64.
  std::size_t slot_bytes = 256 << 10;
  /// Up to this size every rank reduces all of an allreduce by itself, which saves a meeting.
  std::size_t direct_bytes = 4 << 10;
};

}  // namespace hvd::shm

namespace hvd {

/// Collectives of ranks that share a host, through memory that they share: copy in, reduce one's slice from all, copy out. See
/// docs/decisions/0009-shared-memory-rounds.md.
class ShmBackend final : public Backend {
 public:
  /// @param name begins the names of segments; the same on every rank of this host and of no other job: "/hvd-4711-d6c1"
  explicit ShmBackend(std::string name, const shm::ShmTuning& tuning = {});
  std::string_view name() const noexcept override { return "shm"; }
  /// All members share a host, and there are two or more.
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  const std::string name_;
  const shm::ShmTuning tuning_;
};

}  // namespace hvd
