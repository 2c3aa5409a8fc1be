#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "reducer/bucket_plan.h"

namespace hvd::libtorch {

/// Parameters whose elements are shared out among the ranks together, one behind the other.
struct ShardUnit {
  std::vector<std::size_t> members;  ///< parameters
  std::vector<std::int64_t> first;   ///< of each member, the position of its first element
  std::int64_t elements = 0;         ///< with what lies between the members
  int owner = -1;  ///< the member of the set that has all of it; -1: each has its rows_at()
  friend bool operator==(const ShardUnit&, const ShardUnit&) = default;
};

/// Elements of one parameter that one rank updates.
struct ShardPiece {
  std::size_t parameter = 0;
  ElementRange elements;   ///< of the parameter
  std::int64_t place = 0;  ///< of the first of them in the unit
};

/// What a member of the set has of a unit.
ElementRange range_of(const ShardUnit& unit, int ranks, int position);
/// @param sizes of all parameters, in elements  @return at most one piece of each member, in order
std::vector<ShardPiece> pieces_of(const ShardUnit& unit, std::span<const std::int64_t> sizes,
                                  int ranks, int position);

/// Who has which whole parameter, so that shares are about equal. @param bytes of each parameter
std::vector<int> share_out(std::span<const std::size_t> bytes, int ranks);

}  // namespace hvd::libtorch
