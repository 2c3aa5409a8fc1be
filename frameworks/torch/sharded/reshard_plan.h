#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "reducer/bucket_plan.h"
#include "sharded/shard_plan.h"

// Which rank restores which part of a state that was distributed over other ranks. See
// docs/decisions/0055-shards-of-elastic-jobs.md. Pure functions, without LibTorch.

namespace hvd::libtorch {

/// The rank that keeps a copy of each rank's part, on another host where there is one; empty for
/// one rank. @param hosts the number of each rank's host; the ranks of a host are contiguous
std::vector<int> replica_holders(std::span<const int> hosts);

/// The ranks that keep copies of each rank's part at a commit after which the ranks `leaving` leave
/// the job. No other rank leaves. Each part is then on two of the ranks that stay, on two hosts if
/// there are two; without replicas, or if only one rank stays, it is on one rank.
/// @param hosts as above @param leaving in ascending order
std::vector<std::vector<int>> holders_without(std::span<const int> hosts,
                                              std::span<const int> leaving, bool replicas);

/// A part of a state that a rank has at a commit: its own, or a copy.
struct HeldPart {
  std::uint64_t generation = 0;  ///< the generation that made this division
  int ranks = 0;                 ///< the number of ranks over which the state was divided
  int part = 0;                  ///< the rank that owned the part in that division
  friend bool operator==(const HeldPart&, const HeldPart&) = default;
};

/// A complete division of a state, and the rank that supplies each part.
struct Division {
  std::uint64_t generation = 0;
  std::vector<int> suppliers;  ///< by part
};

/// The newest division of which each part is held. @param held the parts of each rank
std::optional<Division> complete_division(std::span<const std::vector<HeldPart>> held);
/// The parts that no rank has, of the newest division that any rank has a part of.
std::vector<int> missing_parts(std::span<const std::vector<HeldPart>> held);

/// Elements of a parameter whose state a rank supplies.
struct SuppliedPiece {
  std::size_t parameter = 0;
  ElementRange elements;
  friend bool operator==(const SuppliedPiece&, const SuppliedPiece&) = default;
};

/// Elements of a supplied piece that a rank gets.
struct Transfer {
  std::size_t piece = 0;  ///< its position among those of the supplier
  ElementRange elements;  ///< of the parameter
  friend bool operator==(const Transfer&, const Transfer&) = default;
};

/// The elements of a supplier's pieces that belong to a rank in the new division, in the order of
/// the pieces. @param units one for each parameter, in order
std::vector<Transfer> transfers_to(int rank, int ranks, std::span<const ShardUnit> units,
                                   std::span<const SuppliedPiece> pieces);

}  // namespace hvd::libtorch
