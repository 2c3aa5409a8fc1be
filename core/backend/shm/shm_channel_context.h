#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/shm/peer_arenas.h"
#include "backend/shm/shm_backend.h"
#include "base/cache_line.h"
#include "base/shared_segment.h"

namespace hvd::shm {

/// The state that the members of a channel share: per member its progress in rounds, the addresses
/// of its tensors, and bounce buffers (slots).
///
/// Not thread-safe: the thread that drives the engine. The segment is made by the first member; the
/// others find it when it is there.
///
/// Layout: Header, a MemberState per member, then two buffers of a slot per member and one for the
/// result.
class ChannelContext {
 public:
  /// Where a collective's tensors lie in their rank's arena; -1: elsewhere.
  struct Place {
    std::int64_t in;
    std::int64_t out;
  };
  /// Written by its owner, read by all. Zero-filled memory is a valid beginning.
  struct alignas(kCacheLinePair) MemberState {
    std::atomic<std::uint64_t> filled;     ///< rounds whose input is in the slot
    std::atomic<std::uint64_t> processed;  ///< rounds whose inputs have been reduced, or copied out
    std::atomic<std::uint64_t> taken;      ///< rounds that this member needs nothing of any more
    /// Of the collective that begins with a round, valid once that round is filled. By the parity
    /// of that round, since others may look while the owner begins the next.
    Place place[2];
    std::uint64_t rounds_wanted[2];  ///< alltoall: how many rounds this member's data takes
    ArenaAddress arena;              ///< written before the member counts as attached
    bool reaches_all;  ///< it has mapped every other member's arena; written before its first round
  };

  static std::size_t segment_bytes(std::size_t members, const ShmTuning&) noexcept;

  ChannelContext(const std::string& prefix, const ChannelSpec&, Peers&, std::shared_ptr<PeerArenas>,
                 const ShmTuning&);

  int size() const noexcept { return static_cast<int>(ranks_.size()); }
  int rank() const noexcept { return rank_; }
  const ShmTuning& tuning() const noexcept { return tuning_; }
  /// Maps what the others share once all of them are here. False: try again later.
  bool ready();

  /// @pre ready(), as for all below
  MemberState& member_state(int member) noexcept { return member_states_[member]; }
  MemberState& own() noexcept { return member_states_[rank_]; }
  std::byte* slot(std::uint64_t round, int member) noexcept;
  std::byte* result(std::uint64_t round) noexcept { return slot(round, size()); }
  /// Every other member has got as far.
  bool all_reached(std::atomic<std::uint64_t> MemberState::*stage, std::uint64_t rounds) noexcept;
  /// Some other member has.
  bool any_reached(std::atomic<std::uint64_t> MemberState::*stage, std::uint64_t rounds) noexcept;
  void ring_others() noexcept;

  std::int64_t offset_of(const void* memory, std::size_t bytes) const noexcept {
    return arenas_->offset_of(memory, bytes);
  }
  /// Members can read and write each other's arenas. The same on every member, once all have filled
  /// a round.
  bool arenas_shared() noexcept;
  /// @pre arenas_shared()
  std::byte* in_arena(int member, std::int64_t offset) const noexcept {
    return mapped_[static_cast<std::size_t>(member)]->at(static_cast<std::uint64_t>(offset));
  }

  std::uint64_t next_round = 0;           ///< of the next collective
  std::vector<const std::byte*> sources;  ///< one per member, for hvd::reduce()
  std::vector<std::byte*> destinations;   ///< one per member

 private:
  struct alignas(kCacheLinePair) Header {
    std::atomic<std::uint32_t> attached;  ///< members that have mapped it
  };
  std::size_t segment_bytes() const noexcept { return segment_bytes(ranks_.size(), tuning_); }
  void adopt(std::unique_ptr<SharedSegment>) noexcept;
  bool map_arenas();

  const std::vector<int> ranks_;
  const int rank_;
  Peers& peers_;
  const ShmTuning tuning_;
  const std::string name_;
  const std::shared_ptr<PeerArenas> arenas_;
  std::vector<std::shared_ptr<const PeerArena>> mapped_;  ///< per member
  std::unique_ptr<SharedSegment> segment_;
  Header* header_ = nullptr;
  MemberState* member_states_ = nullptr;
  std::byte* slots_ = nullptr;
  bool ready_ = false;
  bool arenas_shared_ = false;
};

}  // namespace hvd::shm
