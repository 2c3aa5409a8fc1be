#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "base/shared_arena.h"

namespace hvd::shm {

struct ShmTuning {
  /// Size of an input or result buffer; half of it in a channel of many members. A member has two
  /// input buffers. A multiple of 64.
  std::size_t buffer_bytes = 256 << 10;
  /// In an allreduce of at most this many bytes every rank reduces the whole tensor, which saves
  /// one wait for the other ranks.
  std::size_t small_bytes = 4 << 10;
  /// The most bytes that a rank reads in a collective that is filled ahead (Work::fill_ahead()). In
  /// an allreduce these are the inputs of all other ranks.
  std::size_t ahead_bytes = 256 << 10;
  /// Approximate number of bytes that one call of Work::progress() reads or copies. May differ by
  /// rank.
  std::size_t call_bytes = kBytesPerCall;
  /// Streams all data to the other ranks, independently of their distance. For tests.
  bool always_streams = false;
};

class PeerArenas;

}  // namespace hvd::shm

namespace hvd {

/// Collectives of ranks that share a host. Each rank reduces its slice of all inputs. Tensors in
/// the ranks' arenas are read and written in place. Other tensors are copied through buffers in
/// shared memory. See docs/decisions/0009-shared-memory-rounds.md.
class ShmBackend final : public Backend {
 public:
  /// @param name prefix of the segments' names, for example "/hvd-4711-d6c1"; the same on every
  /// rank of this host, and different from the prefixes of other jobs
  /// @param arena this rank's arena; may be null
  /// @throws UsageError for an invalid tuning
  explicit ShmBackend(std::string name, std::shared_ptr<const SharedArena> arena = nullptr,
                      const shm::ShmTuning& tuning = {});
  ~ShmBackend() override;
  /// Bytes of /dev/shm that the channels of a job with this many local ranks need, for a few
  /// process sets.
  static std::size_t wanted_shared_memory(int local_size) noexcept;
  std::string_view name() const noexcept override { return "shm"; }
  /// Serves process sets of two or more ranks, all on one host.
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  const std::string name_;
  const shm::ShmTuning tuning_;
  const std::shared_ptr<shm::PeerArenas> arenas_;
};

}  // namespace hvd
