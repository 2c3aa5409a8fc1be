#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/shm/shm_backend.h"
#include "backend/shm/shm_segment.h"

namespace hvd::shm {

/// What the members of a channel share: per member the number of rounds it has got through, and memory.
///
/// Not thread-safe: the thread that drives the engine. The segment is made by the first member; the others find it when it is there.
///
/// Layout: Header, a Party per member, then two buffers of a slot per member and one for the result.
class Lane {
 public:
  /// Written by its owner, read by all. Zero-filled memory is a valid beginning.
  struct alignas(128) Party {
    std::atomic<std::uint64_t> filled;     ///< rounds whose input is in the slot
    std::atomic<std::uint64_t> processed;  ///< rounds whose inputs have been reduced, or copied out
    std::atomic<std::uint64_t> taken;      ///< rounds that this member needs nothing of any more
    /// Alltoall: how many rounds this member's data takes, valid once its first round is filled. By the parity of that round, since
    /// others may look while the owner begins the next.
    std::uint64_t rounds_wanted[2];
  };

  Lane(const std::string& prefix, const ChannelSpec&, Peers&, const ShmTuning&);

  int size() const noexcept { return static_cast<int>(ranks_.size()); }
  int rank() const noexcept { return rank_; }
  const ShmTuning& tuning() const noexcept { return tuning_; }
  /// Maps the segment if it is there by now. False: try again later.
  bool ready();

  /// @pre ready()
  Party& party(int member) noexcept { return parties_[member]; }
  Party& own() noexcept { return parties_[rank_]; }
  std::byte* slot(std::uint64_t round, int member) noexcept;
  std::byte* result(std::uint64_t round) noexcept { return slot(round, size()); }
  /// Every other member has got as far.
  bool all_reached(std::atomic<std::uint64_t> Party::*stage, std::uint64_t rounds) noexcept;
  void ring_others() noexcept;

  std::uint64_t next_round = 0;            ///< of the next collective
  std::vector<const std::byte*> sources;   ///< one per member, for hvd::reduce()

 private:
  struct alignas(128) Header {
    std::atomic<std::uint32_t> attached;  ///< members that have mapped it
  };
  std::size_t segment_bytes() const noexcept;
  void adopt(std::unique_ptr<Segment>) noexcept;

  const std::vector<int> ranks_;
  const int rank_;
  Peers& peers_;
  const ShmTuning tuning_;
  const std::string name_;
  std::unique_ptr<Segment> segment_;
  Header* header_ = nullptr;
  Party* parties_ = nullptr;
  std::byte* slots_ = nullptr;
};

}  // namespace hvd::shm
