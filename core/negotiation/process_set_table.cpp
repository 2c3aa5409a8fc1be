#include "negotiation/process_set_table.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace hvd::control {

ProcessSetTable::ProcessSetTable(int world_size) {
  std::vector<int> all(static_cast<std::size_t>(world_size));
  std::iota(all.begin(), all.end(), 0);
  RankSet ranks = RankSet::of(all);
  sets_.emplace(0, Set{std::make_shared<const std::vector<int>>(std::move(all)), std::move(ranks)});
}

int ProcessSetTable::add(std::vector<int> ranks) {
  const int id = next_id_++;
  RankSet set = RankSet::of(ranks);
  sets_.emplace(id,
                Set{std::make_shared<const std::vector<int>>(std::move(ranks)), std::move(set)});
  return id;
}

void ProcessSetTable::remove(int id) {
  HVD_EXPECT(contains(id) && id > 0, "the process set exists, and is not that of all ranks");
  sets_.erase(id);
}

int ProcessSetTable::position(int id, int world_rank) const {
  HVD_EXPECT(contains(id), "the process set exists");
  const auto& members = ranks(id);
  if (id == 0) {
    return world_rank >= 0 && static_cast<std::size_t>(world_rank) < members.size() ? world_rank
                                                                                    : -1;
  }
  const auto found = std::lower_bound(members.begin(), members.end(), world_rank);
  return found != members.end() && *found == world_rank ? static_cast<int>(found - members.begin())
                                                        : -1;
}

}  // namespace hvd::control
