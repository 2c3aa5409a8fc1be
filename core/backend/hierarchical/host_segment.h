#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/cache_line.h"
#include "base/shared_segment.h"
#include "hvd/backend.h"

namespace hvd::hierarchical {

/// What the members of a set on one host share: per member how far it has got, its input, and the
/// results.
///
/// Not thread-safe: the thread that drives the engine. The first member of the host makes the
/// segment, the others find it when it is there.
///
/// Layout: Header, a MemberState per member, kInputs buffers of a slot per member, kResults slots.
class HostSegment {
 public:
  /// Rounds whose inputs, and whose results, are in memory at the same time.
  static constexpr std::uint64_t kInputs = 2;
  static constexpr std::uint64_t kResults = 4;

  /// Rounds that its owner has got through, of each stage; never reset. Zero-filled memory is a
  /// valid beginning.
  struct alignas(kCacheLinePair) MemberState {
    std::atomic<std::uint64_t> filled;    ///< its input is in its slot
    std::atomic<std::uint64_t> reduced;   ///< it needs nothing of the members' slots any more
    std::atomic<std::uint64_t> settled;   ///< its share of the result is in the result's slot
    std::atomic<std::uint64_t> released;  ///< it needs nothing of the result's slot any more, and
                                          ///< none of its messages comes from there
  };
  using Stage = std::atomic<std::uint64_t> MemberState::*;

  static std::size_t bytes(std::size_t members, std::size_t slot_bytes) noexcept;

  /// @param local world ranks of the members on this host, ascending
  /// @param name of the segment in /dev/shm; a member that is alone on its host shares nothing
  /// @throws hvd::Error when /dev/shm has no room
  HostSegment(std::string name, std::vector<int> local, int index, std::size_t slot_bytes, Peers&);

  /// Maps what the others share once all of them are here. False: try again later.
  bool ready();

  /// @pre ready(), as for all below
  std::byte* input(std::uint64_t round, int index) noexcept;
  std::byte* result(std::uint64_t round) noexcept;
  void reach(Stage stage, std::uint64_t rounds) noexcept {
    (member_states_[index_].*stage).store(rounds, std::memory_order_seq_cst);
  }
  /// Every other member of the host has got as far.
  bool others_reached(Stage, std::uint64_t rounds) const noexcept;
  void ring_others() noexcept;
  /// A carrier may write to it until the process ends: it stays mapped.
  void keep_mapped() noexcept;

  std::uint64_t next_round = 0;  ///< of the next collective

 private:
  struct alignas(kCacheLinePair) Header {
    std::atomic<std::uint32_t> attached;  ///< members that have mapped it
  };
  void adopt(std::unique_ptr<SharedSegment>) noexcept;

  const std::string name_;
  const std::vector<int> local_;
  const int index_;
  const std::size_t slot_bytes_;
  Peers& peers_;
  std::unique_ptr<SharedSegment> segment_;
  Header* header_ = nullptr;
  MemberState* member_states_ = nullptr;
  std::byte* slots_ = nullptr;
  bool ready_ = false;
};

}  // namespace hvd::hierarchical
