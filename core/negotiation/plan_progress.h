#pragma once

#include <cstddef>
#include <cstdint>

#include "base/rank_map.h"
#include "base/rank_set.h"

namespace hvd::control {

/// Which plan each rank has applied last, as its reports say. Coordinator only; pure; not
/// thread-safe.
class PlanProgress {
 public:
  explicit PlanProgress(std::size_t ranks) : last_(ranks), ranks_at_lowest_(ranks) {}

  /// @throws hvd::Error when one of the ranks cannot have applied `sequence` last: a later one than
  /// `newest`, or an earlier one than it has said before.
  void check(RankSpan, std::uint64_t sequence, std::uint64_t newest) const;
  /// @pre check(). @return whether applied_by_all() has changed
  bool note(RankSpan, std::uint64_t sequence);
  /// The last plan that every rank has applied.
  std::uint64_t applied_by_all() const noexcept { return lowest_; }

 private:
  RankMap<std::uint64_t> last_;
  std::uint64_t lowest_ = 0;
  std::size_t ranks_at_lowest_;
};

}  // namespace hvd::control
