#pragma once

#include <cstddef>
#include <utility>

#include "base/rank_set.h"

namespace hvd::control {

/// Which ranks ask for nothing more: they have called shutdown(), or end without. Coordinator only;
/// pure; not thread-safe.
class Departures {
 public:
  explicit Departures(std::size_t ranks) noexcept : ranks_in_job_(ranks) {}

  void add(RankSpan ranks) { left_.add(ranks); }
  /// Those of them that have not called shutdown().
  void add_ended(RankSpan ranks) { ended_.add(ranks); }

  const RankSet& ranks() const noexcept { return left_; }
  bool none() const noexcept { return left_.empty(); }
  bool all() const noexcept { return static_cast<std::size_t>(count(left_)) == ranks_in_job_; }
  /// The rank has left without calling shutdown().
  bool ended(int rank) const noexcept { return contains(ended_, rank); }
  /// True once, when all have left: for the plan that says so.
  bool take_end() noexcept { return all() && !std::exchange(end_taken_, true); }

 private:
  const std::size_t ranks_in_job_;
  RankSet left_;
  RankSet ended_;
  bool end_taken_ = false;
};

}  // namespace hvd::control
