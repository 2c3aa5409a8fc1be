#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/segment/channel_segment.h"
#include "backend/shm/shm_backend.h"
#include "base/shared_arena.h"

namespace hvd::shm {

/// This rank's arena and those of its peers. All channels use the same mapping of an arena.
///
/// Not thread-safe: only the thread that drives the engine uses it.
class PeerArenas {
 public:
  /// @param own may be null
  explicit PeerArenas(std::shared_ptr<const SharedArena> own) : own_(std::move(own)) {}

  ArenaAddress own_address() const noexcept { return own_ ? own_->address() : ArenaAddress{}; }
  /// Returns the offset of the memory in this rank's arena; -1 if it is not entirely in the arena.
  std::int64_t offset_of(const void* memory, std::size_t bytes) const noexcept {
    const auto offset = own_ ? own_->offset_of(memory, bytes) : std::nullopt;
    return offset ? static_cast<std::int64_t>(*offset) : -1;
  }
  /// Maps the arena of a peer, or returns an existing mapping. Null if the arena cannot be mapped.
  std::shared_ptr<const PeerArena> map(const ArenaAddress& address) {
    std::weak_ptr<const PeerArena>& known = mapped_[address.identity];
    std::shared_ptr<const PeerArena> arena = known.lock();
    if (!arena) known = arena = PeerArena::map(address);
    return arena;
  }

 private:
  const std::shared_ptr<const SharedArena> own_;
  std::map<std::uint64_t, std::weak_ptr<const PeerArena>> mapped_;  // by identity
};

inline segment::BufferLayout buffer_layout(const ShmTuning& tuning) noexcept {
  return {.buffer_bytes = tuning.buffer_bytes, .results = segment::ChannelSegment::kInputs};
}

/// State that a channel shares with its Works: the segment, whose input and result buffers have the
/// same size, and the arenas of all members.
///
/// Not thread-safe: only the thread that drives the engine uses it.
class ShmChannelState {
 public:
  /// A member's data in the segment.
  struct MemberInfo {
    /// Offsets of a collective's tensors in the member's arena; -1: the tensor is outside the
    /// arena; see also PipelinedWork::Offer. Valid once the collective's first round is filled.
    /// Indexed by the parity of that round, because others may still read while the owner begins
    /// the next collective.
    std::int64_t input_at[2] = {};
    std::int64_t output_at[2] = {};
    /// Alltoall: rounds that this member's data needs, and whether it is too large to be filled
    /// ahead.
    std::uint64_t rounds_wanted[2] = {};
    ArenaAddress arena = {};  ///< valid once the member has attached
    /// Whether the member has mapped the arena of every other member. Written before its first
    /// round.
    bool reaches_all = false;
  };

  /// The size of the segment of a channel.
  static std::size_t segment_bytes(std::size_t members, const ShmTuning&) noexcept;

  ShmChannelState(const std::string& prefix, const ChannelSpec&, Peers&,
                  std::shared_ptr<PeerArenas>, const ShmTuning&);

  std::size_t size() const noexcept { return segment_.size(); }
  std::size_t rank() const noexcept { return segment_.member(); }
  const ShmTuning& tuning() const noexcept { return tuning_; }
  /// Maps the segment and the arenas. True once all members have mapped the segment; false: call
  /// again later.
  bool ready();

  // The functions below access the segment's memory. @pre ready()
  segment::ChannelSegment& segment() noexcept { return segment_; }
  MemberInfo& info(std::size_t member) noexcept { return segment_.info<MemberInfo>(member); }
  std::int64_t offset_of(const void* memory, std::size_t bytes) const noexcept {
    return arenas_->offset_of(memory, bytes);
  }
  /// @pre info(rank()).reaches_all
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

inline ShmChannelState::ShmChannelState(const std::string& prefix, const ChannelSpec& spec,
                                        Peers& peers, std::shared_ptr<PeerArenas> arenas,
                                        const ShmTuning& tuning)
    : sources(spec.ranks.size()),
      destinations(spec.ranks.size()),
      tuning_(tuning),
      arenas_(std::move(arenas)),
      segment_({.name = prefix + segment::ChannelSegment::suffix(spec),
                .ranks = spec.ranks,
                .member = static_cast<std::size_t>(spec.set_rank)},
               buffer_layout(tuning), peers,
               segment::ChannelSegment::bytes_of(MemberInfo{.arena = arenas_->own_address()})) {
  if (tuning.always_streams) segment_.always_stream();
}

inline std::size_t ShmChannelState::segment_bytes(std::size_t members,
                                                  const ShmTuning& tuning) noexcept {
  return segment::ChannelSegment::bytes(members, buffer_layout(tuning));
}

inline bool ShmChannelState::ready() {
  if (ready_) return true;
  if (!segment_.ready()) return false;
  info(rank()).reaches_all = map_arenas();
  return ready_ = true;
}

inline bool ShmChannelState::map_arenas() {
  for (std::size_t member = 0; member < size(); ++member) {
    mapped_.push_back(arenas_->map(info(member).arena));
    if (!mapped_.back()) return false;
  }
  return true;
}

}  // namespace hvd::shm
