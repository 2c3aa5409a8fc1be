#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/expect.h"
#include "base/rank_set.h"

namespace hvd::control {

/// Identifies an operation within the job, since each process set has names of its own.
inline std::string tensor_key(int process_set, const std::string& name) {
  return std::to_string(process_set) + '/' + name;
}

/// World ranks of a set, ascending; a rank's position is its rank in the set.
using Members = std::shared_ptr<const std::vector<int>>;

/// Which ranks form which set. Equal on every rank: it changes only while a plan is applied. Not
/// thread-safe.
class ProcessSetTable {
 public:
  /// Set 0 is all ranks.
  explicit ProcessSetTable(int world_size);

  /// @param ranks world ranks, ascending. @return the new set's number; numbers are not used again.
  int add(std::vector<int> ranks);
  /// @pre contains(id) and id > 0
  void remove(int id);

  bool contains(int id) const noexcept { return sets_.contains(id); }
  /// Whether the set existed and was removed.
  bool was_removed(int id) const noexcept { return id > 0 && id < next_id_ && !contains(id); }
  /// World ranks, ascending. @pre contains(id) (checked by set())
  const std::vector<int>& ranks(int id) const { return *set(id).members; }
  /// The same, with shared ownership. @pre contains(id) (checked by set())
  const Members& members(int id) const { return set(id).members; }
  /// The same as a RankSet. @pre contains(id) (checked by set())
  const RankSet& rank_set(int id) const { return set(id).ranks; }
  /// Position of a world rank in the set, or -1. @pre contains(id)
  int position(int id, int world_rank) const;

 private:
  struct Set {
    Members members = {};
    RankSet ranks = {};
  };
  const Set& set(int id) const {
    HVD_EXPECT(contains(id), "the process set exists");
    return sets_.at(id);
  }
  std::map<int, Set> sets_;
  int next_id_ = 1;
};

}  // namespace hvd::control
