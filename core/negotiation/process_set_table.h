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

/// Names the ranks of a set within the name of an operation: "[0,2]". A long list is shortened and
/// followed by its digest, so that different lists have different texts. Has no spaces.
std::string members_text(const std::vector<int>& ranks);

/// The name on the wire of an add_process_set that only the members submit: it contains the ranks,
/// so that sets with different ranks do not match even if they have the same name. @param name
/// given by the program; may be empty
std::string name_by_members(const std::string& name, const std::vector<int>& ranks);

/// World ranks of a set, ascending; a rank's position is its rank in the set.
using Members = std::shared_ptr<const std::vector<int>>;

/// Which ranks form which set. Equal on every rank: it changes only while a plan is applied. Not
/// thread-safe.
class ProcessSetTable {
 public:
  /// Set 0 is all ranks.
  explicit ProcessSetTable(int world_size);

  /// @param ranks world ranks, ascending
  /// @param by_members whether the members alone made it, and alone remove it
  /// @return the new set's number; numbers are not used again.
  int add(std::vector<int> ranks, bool by_members = false);
  /// @pre contains(id) and id > 0
  void remove(int id);

  bool contains(int id) const noexcept { return sets_.contains(id); }
  /// Whether the set existed and was removed.
  bool was_removed(int id) const noexcept { return id > 0 && id < next_id_ && !contains(id); }
  /// Whether the members alone made it. @pre contains(id) (checked by set())
  bool by_members(int id) const { return set(id).by_members; }
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
    bool by_members = false;
  };
  const Set& set(int id) const {
    HVD_EXPECT(contains(id), "the process set exists");
    return sets_.at(id);
  }
  std::map<int, Set> sets_;
  int next_id_ = 1;
};

}  // namespace hvd::control
