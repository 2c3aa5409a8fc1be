#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "negotiation/ready_table.h"

namespace hvd::control {

/// The cache slot of a rank's request, and the first dimensions in it.
struct CacheHit {
  std::uint32_t slot = 0;
  const std::vector<std::int64_t>* first_dims = nullptr;
};

/// A ready table to which one rank at a time submits requests, in the order of the calls.
class TableByRank : public ReadyTable {
 public:
  TableByRank(const ProcessSetTable& sets, int world_size)
      : ReadyTable(sets), asked_(static_cast<std::size_t>(world_size)) {}

  PendingRef add(int rank, wire::Request request, const std::optional<CacheHit>& hit,
                 TimePoint now) {
    const RankRange one{rank, rank};
    Submitters submitters{{&one, 1}, ++asked_[static_cast<std::size_t>(rank)]};
    if (hit) {
      submitters.first_dims_of_members = hit->first_dims;
      submitters.slot = hit->slot;
    }
    return ReadyTable::add(submitters, std::move(request), now);
  }
  bool add_hit(int rank, std::uint32_t slot) {
    const RankRange one{rank, rank};
    wire::Stamp& asked = asked_[static_cast<std::size_t>(rank)];
    const bool added = ReadyTable::add_hit({{&one, 1}, asked + 1, {}, nullptr, slot});
    if (added) ++asked;
    return added;
  }

 private:
  std::vector<wire::Stamp> asked_;  // per world rank
};

}  // namespace hvd::control
