#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/rank_set.h"
#include "negotiation/messages.h"

namespace hvd::control {

/// Uses of operations that ended with an error before some ranks had asked for them. What such a
/// rank asks for before it has applied the plan with the error belongs to the failed use; what it
/// asks for afterwards does not. Coordinator only; pure; not thread-safe.
class FailedUses {
 public:
  /// @param plan with the error @param missing the ranks that had not asked
  void add(const wire::Request&, std::uint64_t plan, RankSet missing);
  /// Those of `ranks` that mean a failed use when they ask, having applied plan `as_of` last.
  RankSet find(const wire::Request&, RankSpan ranks, std::uint64_t as_of) const;
  /// The ranks will ask for nothing any more as of an earlier plan.
  void note_applied(RankSpan ranks, std::uint64_t plan);
  void drop_set(int process_set);
  bool empty() const noexcept { return uses_.empty(); }
  /// Counts a use once for each rank that may still mean it.
  std::size_t size() const noexcept;

 private:
  struct Use {
    std::uint64_t plan = 0;
    RankSet ranks = {};
  };
  std::unordered_map<std::string, std::vector<Use>> uses_;  // by tensor_key(); none empty
};

}  // namespace hvd::control
