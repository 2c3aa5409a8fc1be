#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"
#include "negotiation/messages.h"

/// The coordinator's records about each rank. Pure; not thread-safe.
namespace hvd::control {

/// The last plan that each rank has applied, according to its reports.
class PlanProgress {
 public:
  explicit PlanProgress(std::size_t ranks) : last_(ranks), ranks_at_lowest_(ranks) {}

  /// @throws hvd::Error when `sequence` is later than `newest`, or earlier than in a former report
  /// of one of the ranks
  void check(RankSpan, std::uint64_t sequence, std::uint64_t newest) const;
  /// @pre check(). @return whether applied_by_all() has changed
  bool record(RankSpan, std::uint64_t sequence);
  /// The last plan that every rank has applied.
  std::uint64_t applied_by_all() const noexcept { return lowest_; }

 private:
  RankMap<std::uint64_t> last_;
  std::uint64_t lowest_ = 0;
  std::size_t ranks_at_lowest_;
};

/// Uses of operations that ended with an error before some ranks had submitted them. If such a rank
/// made its request before it applied the plan with the error, the request belongs to the failed
/// use; otherwise it does not.
class FailedUses {
 public:
  /// @param plan with the error @param missing the ranks that had not submitted the operation
  void add(const wire::Request&, std::uint64_t plan, RankSet missing);
  /// The ranks among `ranks` whose request, made after they had applied plan `as_of`, belongs to a
  /// failed use.
  RankSet find(const wire::Request&, RankSpan ranks, std::uint64_t as_of) const;
  /// Forgets the failed uses that requests of these ranks can no longer belong to, because the
  /// ranks have applied this plan.
  void record_applied(RankSpan ranks, std::uint64_t plan);
  void drop_set(int process_set);
  bool empty() const noexcept { return uses_.empty(); }
  /// The number of failed uses, each counted once per rank whose request may still belong to it.
  std::size_t size() const noexcept;

 private:
  struct Use {
    std::uint64_t plan = 0;
    RankSet ranks = {};
  };
  std::unordered_map<std::string, std::vector<Use>> uses_;  // by tensor_key(); no entry is empty
};

/// Detects that every rank waits for another: all ranks have reported that they are blocked, and
/// for a while no report has arrived and no plan was decided.
class BlockedRanks {
 public:
  /// @param limit how long the job must have been quiet before it counts as deadlocked, because
  /// another thread of some rank might still submit the missing operation; zero: no deadlock is
  /// ever found
  BlockedRanks(std::size_t ranks, Duration limit) noexcept : ranks_in_job_(ranks), limit_(limit) {}

  /// Call this when a report has arrived or a plan was decided: no rank counts as blocked any
  /// more.
  void record_change(TimePoint now);
  /// Records that the rank is blocked and has applied the last plan.
  void add(int rank) { blocked_.add(RankSet(rank)); }
  /// @param departed ranks that submit no more operations
  /// @return how long the job has been quiet, if that is a deadlock
  std::optional<Duration> deadlocked_for(const RankSet& departed, TimePoint now) const;

 private:
  const std::size_t ranks_in_job_;
  const Duration limit_;
  RankSet blocked_;  // since changed_at_
  TimePoint changed_at_{};
};

/// The ranks that submit no more operations, because they have called shutdown() or end without
/// calling it.
class Departures {
 public:
  explicit Departures(std::size_t ranks) noexcept : ranks_in_job_(ranks) {}

  void add(RankSpan ranks) { left_.add(ranks); }
  /// Records ranks that leave without calling shutdown().
  void add_ended(RankSpan ranks) { ended_.add(ranks); }

  const RankSet& ranks() const noexcept { return left_; }
  bool none() const noexcept { return left_.empty(); }
  bool all() const noexcept { return static_cast<std::size_t>(count(left_)) == ranks_in_job_; }
  /// Whether the rank has left without calling shutdown().
  bool ended(int rank) const noexcept { return contains(ended_, rank); }
  /// Returns true once after all ranks have left, for the last plan.
  bool announce_end() noexcept { return all() && !std::exchange(end_taken_, true); }

 private:
  const std::size_t ranks_in_job_;
  RankSet left_;
  RankSet ended_;
  bool end_taken_ = false;
};

}  // namespace hvd::control
