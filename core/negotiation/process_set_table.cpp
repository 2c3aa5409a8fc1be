#include "negotiation/process_set_table.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/sha256.h"
#include "base/text.h"
#include "hvd/types.h"

namespace hvd::control {

std::string members_text(const std::vector<int>& ranks) {
  constexpr std::size_t kMaxShown = 32;
  const auto list_text = [](std::vector<int>::const_iterator begin,
                            std::vector<int>::const_iterator end) {
    return shape_to_string(std::vector<std::int64_t>(begin, end));
  };
  if (ranks.size() <= kMaxShown) return list_text(ranks.begin(), ranks.end());
  const std::string all = list_text(ranks.begin(), ranks.end());
  std::string digits;
  for (const char byte : sha256(all)) {
    constexpr std::string_view kHex = "0123456789abcdef";
    digits += kHex[static_cast<unsigned char>(byte) >> 4];
    digits += kHex[static_cast<unsigned char>(byte) & 15];
  }
  std::string shown = list_text(ranks.begin(), ranks.begin() + 4);
  shown.back() = ',';
  return text(shown, "...,", ranks.back(), "]#", ranks.size(), "#", digits);
}

std::string name_by_members(const std::string& name, const std::vector<int>& ranks) {
  return text(name, name.empty() ? "" : " ", members_text(ranks));
}

ProcessSetTable::ProcessSetTable(int world_size) {
  std::vector<int> all(static_cast<std::size_t>(world_size));
  std::iota(all.begin(), all.end(), 0);
  RankSet ranks = RankSet::of(all);
  sets_.emplace(0, Set{std::make_shared<const std::vector<int>>(std::move(all)), std::move(ranks)});
}

int ProcessSetTable::add(std::vector<int> ranks, bool by_members) {
  const int id = next_id_++;
  RankSet set = RankSet::of(ranks);
  sets_.emplace(id, Set{std::make_shared<const std::vector<int>>(std::move(ranks)), std::move(set),
                        by_members});
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
