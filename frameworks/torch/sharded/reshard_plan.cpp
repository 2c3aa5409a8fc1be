#include "sharded/reshard_plan.h"

#include <algorithm>
#include <map>

namespace hvd::libtorch {
namespace {

/// The suppliers of each division's parts, -1 for a part that no rank has.
std::map<std::uint64_t, std::vector<int>> suppliers_of(
    std::span<const std::vector<HeldPart>> held) {
  std::map<std::uint64_t, std::vector<int>> divisions;
  for (std::size_t rank = 0; rank < held.size(); ++rank) {
    for (const HeldPart& one : held[rank]) {
      std::vector<int>& suppliers = divisions[one.generation];
      suppliers.resize(static_cast<std::size_t>(one.ranks), -1);
      int& supplier = suppliers[static_cast<std::size_t>(one.part)];
      if (supplier < 0) supplier = static_cast<int>(rank);
    }
  }
  return divisions;
}

}  // namespace

std::vector<int> replica_holders(std::span<const int> hosts) {
  const int ranks = static_cast<int>(hosts.size());
  if (ranks < 2) return {};
  std::vector<int> holders;
  for (int begin = 0; begin < ranks;) {
    int end = begin;
    while (end < ranks &&
           hosts[static_cast<std::size_t>(end)] == hosts[static_cast<std::size_t>(begin)])
      ++end;
    const int others = ranks - (end - begin);
    for (int rank = begin; rank < end; ++rank) {
      // With one host the next rank, otherwise the ranks behind the host, one after the other.
      const int steps = others == 0 ? rank + 1 : end + (rank - begin) % others;
      holders.push_back(steps % ranks);
    }
    begin = end;
  }
  return holders;
}

std::vector<std::vector<int>> holders_without(std::span<const int> hosts,
                                              std::span<const int> leaving, bool replicas) {
  std::vector<int> staying;
  std::vector<int> hosts_of_staying;
  std::vector<std::vector<int>> holders(hosts.size());
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    if (std::binary_search(leaving.begin(), leaving.end(), static_cast<int>(rank))) continue;
    staying.push_back(static_cast<int>(rank));
    hosts_of_staying.push_back(hosts[rank]);
  }
  const std::vector<int> second = replicas ? replica_holders(hosts_of_staying) : std::vector<int>();
  for (std::size_t i = 0; i < second.size(); ++i)
    holders[static_cast<std::size_t>(staying[i])] = {staying[static_cast<std::size_t>(second[i])]};
  std::size_t next = 0;
  for (const int rank : leaving) {
    if (staying.empty()) break;
    const std::size_t i = next++ % staying.size();
    std::vector<int>& own = holders[static_cast<std::size_t>(rank)];
    own = {staying[i]};
    if (!second.empty()) own.push_back(staying[static_cast<std::size_t>(second[i])]);
  }
  return holders;
}

std::optional<Division> complete_division(std::span<const std::vector<HeldPart>> held) {
  const auto divisions = suppliers_of(held);
  for (auto division = divisions.rbegin(); division != divisions.rend(); ++division) {
    const std::vector<int>& suppliers = division->second;
    if (std::find(suppliers.begin(), suppliers.end(), -1) == suppliers.end())
      return Division{.generation = division->first, .suppliers = suppliers};
  }
  return std::nullopt;
}

std::vector<int> missing_parts(std::span<const std::vector<HeldPart>> held) {
  const auto divisions = suppliers_of(held);
  std::vector<int> missing;
  if (divisions.empty()) return missing;
  const std::vector<int>& suppliers = divisions.rbegin()->second;
  for (std::size_t part = 0; part < suppliers.size(); ++part)
    if (suppliers[part] < 0) missing.push_back(static_cast<int>(part));
  return missing;
}

std::vector<Transfer> transfers_to(int rank, int ranks, std::span<const ShardUnit> units,
                                   std::span<const SuppliedPiece> pieces) {
  std::vector<Transfer> transfers;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const ElementRange own = range_of(units[pieces[i].parameter], ranks, rank);
    const ElementRange elements{std::max(own.begin, pieces[i].elements.begin),
                                std::min(own.end, pieces[i].elements.end)};
    if (elements.begin < elements.end) transfers.push_back({.piece = i, .elements = elements});
  }
  return transfers;
}

}  // namespace hvd::libtorch
