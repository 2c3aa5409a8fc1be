#pragma once

#include <map>
#include <vector>

namespace hvd::control {

/// Which ranks form which set. Equal on every rank: it changes only while a plan is applied. Not
/// thread-safe.
class ProcessSetTable {
 public:
  /// Set 0 is all ranks.
  explicit ProcessSetTable(int world_size);

  bool contains(int id) const noexcept { return sets_.contains(id); }
  /// World ranks, ascending. @pre contains(id)
  const std::vector<int>& ranks(int id) const { return sets_.at(id); }
  /// Position of a world rank in the set, or -1. @pre contains(id)
  int position(int id, int world_rank) const;

 private:
  std::map<int, std::vector<int>> sets_;
};

}  // namespace hvd::control
