#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/segment/channel_segment.h"
#include "backend/shm/peer_arenas.h"
#include "backend/shm/shm_backend.h"

namespace hvd::shm {

/// What a channel and its Works share: the segment, in which a slot is as large for results as for
/// inputs, and the arenas of all members.
///
/// Not thread-safe: the thread that drives the engine.
class ChannelContext {
 public:
  /// What a member says of itself in the segment.
  struct Notes {
    /// Where in the member's arena the tensors of a collective begin; -1: they lie elsewhere. Valid
    /// once the collective's first round is filled. By the parity of that round, since others may
    /// look while the owner begins the next.
    std::int64_t input_at[2] = {};
    std::int64_t output_at[2] = {};
    std::uint64_t rounds_wanted[2] = {};  ///< alltoall: how many rounds this member's data takes
    ArenaAddress arena = {};              ///< written before the member counts as attached
    /// It has mapped every other member's arena; written before its first round.
    bool reaches_all = false;
  };

  static std::size_t segment_bytes(std::size_t members, const ShmTuning&) noexcept;

  ChannelContext(const std::string& prefix, const ChannelSpec&, Peers&, std::shared_ptr<PeerArenas>,
                 const ShmTuning&);

  std::size_t size() const noexcept { return segment_.size(); }
  std::size_t rank() const noexcept { return segment_.member(); }
  const ShmTuning& tuning() const noexcept { return tuning_; }
  /// Maps what the others share once all of them are here. False: try again later.
  bool ready();

  /// Its memory is there once this is ready(), as what is below.
  segment::ChannelSegment& segment() noexcept { return segment_; }
  Notes& notes(std::size_t member) noexcept { return segment_.notes<Notes>(member); }
  std::int64_t offset_of(const void* memory, std::size_t bytes) const noexcept {
    return arenas_->offset_of(memory, bytes);
  }
  /// @pre this member reaches all
  std::byte* in_arena(std::size_t member, std::int64_t offset) const noexcept {
    HVD_EXPECT(mapped_[member] != nullptr && offset >= 0, "the tensor is in an arena mapped here");
    return mapped_[member]->at(static_cast<std::uint64_t>(offset));
  }

  std::vector<const std::byte*> sources;  ///< one per member, for hvd::reduce()
  std::vector<std::byte*> destinations;   ///< one per member

 private:
  bool map_arenas();

  const ShmTuning tuning_;
  const std::shared_ptr<PeerArenas> arenas_;
  segment::ChannelSegment segment_;
  std::vector<std::shared_ptr<const PeerArena>> mapped_;  ///< per member
  bool ready_ = false;
};

}  // namespace hvd::shm
