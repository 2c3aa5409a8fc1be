#pragma once

#include <cstddef>
#include <optional>

#include "base/clock.h"
#include "base/rank_set.h"

namespace hvd::control {

/// Finds out that no rank will ask for anything any more, as each waits for another: all have said
/// that they are blocked, and nothing has happened for a while. Coordinator only; pure; not
/// thread-safe.
class BlockedRanks {
 public:
  /// @param limit how long nothing must have happened, as another thread of some rank might still
  /// ask for what is missing; zero: no deadlock is ever found
  BlockedRanks(std::size_t ranks, Duration limit) noexcept : ranks_in_job_(ranks), limit_(limit) {}

  /// Something was asked for or decided: every rank may have something to go on with.
  void note_change(TimePoint now);
  /// The rank waits for others, and knows of the last change.
  void add(int rank) { blocked_.add(RankSet(rank)); }
  /// @param departed ranks that ask for nothing more
  /// @return for how long nothing has happened; nothing, unless that is a deadlock
  std::optional<Duration> deadlocked_for(const RankSet& departed, TimePoint now) const;

 private:
  const std::size_t ranks_in_job_;
  const Duration limit_;
  RankSet blocked_;  // since changed_at_
  TimePoint changed_at_{};
};

}  // namespace hvd::control
