#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "backend/backend.h"
#include "base/cache_line.h"
#include "base/expect.h"
#include "base/shared_segment.h"

namespace hvd::segment {

/// The slots (bounce buffers) of a segment. The same on every member.
struct SlotLayout {
  std::size_t slot_bytes = 0;  ///< a multiple of kCacheLine
  std::uint64_t results = 0;   ///< rounds whose results are in memory at the same time
};

/// The slots of a set's channel for small operations are smaller, since the thread that drives the
/// engine reserves their pages: what the channel carries takes a few rounds.
/// @param slot_bytes of the set's own channel
/// @param least_bytes that a slot must have; a multiple of kCacheLine
constexpr std::size_t slot_bytes_for(int instance, std::size_t slot_bytes,
                                     std::size_t least_bytes) noexcept {
  constexpr std::size_t kRounds = 8;
  if (instance != kUrgentInstance) return slot_bytes;
  return std::min(slot_bytes, std::max(kMostUrgentBytes / kRounds, least_bytes));
}

/// The members of a channel that share a host, and this rank among them.
struct Membership {
  std::string name = {};        ///< of the segment in /dev/shm
  std::vector<int> ranks = {};  ///< world ranks, ascending
  std::size_t member = 0;       ///< this rank's position in `ranks`
};

/// The memory that the members of a channel on one host share: per member how far it has got and
/// what it has to say, its input, and the results.
///
/// Not thread-safe: the thread that drives the engine. The first member makes the segment, the
/// others find it when it is there, and the last of them removes its name. A member that is alone
/// shares nothing.
///
/// Layout: Header, a MemberState per member, kInputs buffers of a slot per member, and the slots
/// for results. A round uses them by its number, so rounds must be numbered on from one collective
/// to the next.
class ChannelSegment {
 public:
  /// Rounds whose inputs are in memory at the same time.
  static constexpr std::uint64_t kInputs = 2;

  using NoteBytes = std::array<std::byte, 96>;
  /// Written by its owner, read by all. Zero-filled memory is a valid beginning. The counters are
  /// of rounds that the owner has got through; they are never reset.
  struct alignas(kCacheLinePair) MemberState {
    std::atomic<std::uint64_t> filled;    ///< its input is in its slot
    std::atomic<std::uint64_t> reduced;   ///< it needs nothing of the members' slots any more
    std::atomic<std::uint64_t> settled;   ///< its share of the result is in the result's slot
    std::atomic<std::uint64_t> released;  ///< it needs nothing of the result's slot any more
    alignas(8) NoteBytes notes;           ///< the backend's; see notes()
  };
  static_assert(sizeof(MemberState) == kCacheLinePair);
  using Counter = std::atomic<std::uint64_t> MemberState::*;

  static std::size_t bytes(std::size_t members, const SlotLayout&) noexcept;
  /// The part of a segment's name that tells the channels of a job apart.
  static std::string suffix(const ChannelSpec&);

  /// @param notes this member's, which hold so much when it counts as attached
  /// @throws hvd::Error when /dev/shm has no room
  ChannelSegment(Membership, const SlotLayout&, Peers&, const NoteBytes& notes = {});

  /// Whether all members are here; maps what they share. False: try again later.
  bool ready();

  std::size_t size() const noexcept { return ranks_.size(); }
  std::size_t member() const noexcept { return member_; }

  /// @pre ready(), as for all below
  std::byte* input(std::uint64_t round, std::size_t member) noexcept {
    HVD_EXPECT(ready_, "all members are here");
    return slots_ + (round % kInputs * size() + member) * layout_.slot_bytes;
  }
  std::byte* result(std::uint64_t round) noexcept {
    HVD_EXPECT(ready_, "all members are here");
    return slots_ + (kInputs * size() + round % layout_.results) * layout_.slot_bytes;
  }
  /// What a member has to say besides its counters. Plain data without pointers; the backend sees
  /// to it that nobody reads what is being written.
  template <class Notes>
  Notes& notes(std::size_t member) noexcept {
    static_assert(sizeof(Notes) <= sizeof(NoteBytes) && alignof(Notes) <= 8);
    HVD_EXPECT(ready_, "all members are here");
    return *reinterpret_cast<Notes*>(states_[member].notes.data());
  }
  template <class Notes>
  static NoteBytes bytes_of(const Notes& notes) noexcept {
    static_assert(sizeof(Notes) <= sizeof(NoteBytes) && std::is_trivially_copyable_v<Notes>);
    NoteBytes bytes = {};
    std::memcpy(bytes.data(), &notes, sizeof(Notes));
    return bytes;
  }

  /// This member has got through so many rounds. Sequentially consistent, as all looks at counters
  /// are: see Note [Who rings] in pipeline.cpp.
  void publish(Counter counter, std::uint64_t rounds) noexcept {
    HVD_EXPECT(ready_, "all members are here");
    (states_[member_].*counter).store(rounds, std::memory_order_seq_cst);
  }
  /// Every member has got as far, this one included.
  bool all_reached(Counter, std::uint64_t rounds) const noexcept;
  /// Some other member has.
  bool other_reached(Counter, std::uint64_t rounds) const noexcept;
  void ring_others() noexcept;
  /// A carrier may write to it until the process ends: it stays mapped.
  void keep_mapped() noexcept;

  std::uint64_t next_round = 0;  ///< of the next collective

 private:
  struct alignas(kCacheLinePair) Header {
    std::atomic<std::uint32_t> attached;  ///< members that have mapped it
  };
  std::size_t bytes() const noexcept { return bytes(size(), layout_); }
  void adopt(std::unique_ptr<SharedSegment>) noexcept;

  const std::string name_;
  const std::vector<int> ranks_;
  const std::size_t member_;
  const SlotLayout layout_;
  Peers& peers_;
  const NoteBytes notes_;  ///< for when it is mapped
  std::unique_ptr<SharedSegment> segment_;
  Header* header_ = nullptr;
  MemberState* states_ = nullptr;
  std::byte* slots_ = nullptr;
  bool ready_ = false;
};

}  // namespace hvd::segment
