#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "base/shared_arena.h"

namespace hvd::shm {

struct ShmTuning {
  /// Of each member's part of the segment, of which there are two. A multiple of 64.
  std::size_t slot_bytes = 128 << 10;
  /// Up to this size every rank reduces all of an allreduce by itself, which saves a meeting.
  std::size_t small_bytes = 4 << 10;
  /// Approximate bytes that one call of Work::progress() reads or copies. May differ by rank.
  std::size_t call_bytes = kBytesPerCall;
};

class PeerArenas;

}  // namespace hvd::shm

namespace hvd {

/// Collectives of ranks that share a host: each reduces its slice from all. Tensors that lie in the
/// ranks' arenas are read and written where they are; others are copied through slots in shared
/// memory. See docs/decisions/0009-shared-memory-rounds.md.
class ShmBackend final : public Backend {
 public:
  /// @param name begins the names of segments; the same on every rank of this host and of no other
  /// job: "/hvd-4711-d6c1"
  /// @param arena this rank's; may be null
  explicit ShmBackend(std::string name, std::shared_ptr<const SharedArena> arena = nullptr,
                      const shm::ShmTuning& tuning = {});
  ~ShmBackend() override;
  /// What the channels of a job of this many local ranks take of /dev/shm, with room for some
  /// process sets.
  static std::size_t wanted_shared_memory(int local_size) noexcept;
  std::string_view name() const noexcept override { return "shm"; }
  /// All members share a host, and there are two or more.
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  const std::string name_;
  const shm::ShmTuning tuning_;
  const std::shared_ptr<shm::PeerArenas> arenas_;
};

}  // namespace hvd
