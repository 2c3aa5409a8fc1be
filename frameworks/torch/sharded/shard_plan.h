#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "reducer/bucket_plan.h"

namespace hvd::libtorch {

/// Parameters that are laid out one after the other and distributed over the ranks together.
struct ShardUnit {
  std::vector<std::size_t> members;  ///< numbers of parameters
  std::vector<std::int64_t> first;   ///< position of each member's first element
  std::int64_t elements = 0;         ///< size, including gaps between members
  int owner = -1;  ///< position in the set of the rank that has the whole unit; -1: each rank has
                   ///< its rows_at()
  friend bool operator==(const ShardUnit&, const ShardUnit&) = default;
};

/// Elements of one parameter that one rank updates.
struct ShardPiece {
  std::size_t parameter = 0;
  ElementRange elements;   ///< of the parameter
  std::int64_t place = 0;  ///< position of the first of them in the unit
};

/// The elements of a unit that a member of the set has.
ElementRange range_of(const ShardUnit& unit, int ranks, int position);
/// @param sizes of all parameters, in elements  @return at most one piece for each member, in order
std::vector<ShardPiece> pieces_of(const ShardUnit& unit, std::span<const std::int64_t> sizes,
                                  int ranks, int position);

/// Distributes whole parameters, so that shares are about equal. @param bytes of each parameter
/// @return the owner of each parameter, as a position in the set
std::vector<int> assign_owners(std::span<const std::size_t> bytes, int ranks);

}  // namespace hvd::libtorch
