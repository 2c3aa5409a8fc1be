#include "sharded/shard_plan.h"

#include <algorithm>
#include <numeric>

namespace hvd::libtorch {

ElementRange range_of(const ShardUnit& unit, int ranks, int position) {
  if (unit.owner < 0) return rows_at(unit.elements, ranks, position);
  // Ranks before the owner have an empty range at the beginning, ranks after it at the end.
  const std::int64_t begin = position <= unit.owner ? 0 : unit.elements;
  return {begin, position < unit.owner ? 0 : unit.elements};
}

std::vector<ShardPiece> pieces_of(const ShardUnit& unit, std::span<const std::int64_t> sizes,
                                  int ranks, int position) {
  const ElementRange own = range_of(unit, ranks, position);
  std::vector<ShardPiece> pieces;
  for (std::size_t m = 0; m < unit.members.size(); ++m) {
    const std::int64_t first = unit.first[m];
    const std::int64_t begin = std::max(own.begin, first);
    const std::int64_t end = std::min(own.end, first + sizes[unit.members[m]]);
    if (begin >= end) continue;
    pieces.push_back(
        {.parameter = unit.members[m], .elements = {begin - first, end - first}, .place = begin});
  }
  return pieces;
}

std::vector<int> assign_owners(std::span<const std::size_t> bytes, int ranks) {
  std::vector<std::size_t> by_size(bytes.size());
  std::iota(by_size.begin(), by_size.end(), std::size_t{0});
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](std::size_t a, std::size_t b) { return bytes[a] > bytes[b]; });
  std::vector<std::size_t> load(static_cast<std::size_t>(ranks), 0);
  std::vector<int> owners(bytes.size(), 0);
  // Assigns the largest parameters first, each to the rank with the fewest bytes.
  for (const std::size_t parameter : by_size) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += bytes[parameter];
    owners[parameter] = static_cast<int>(least - load.begin());
  }
  return owners;
}

}  // namespace hvd::libtorch
