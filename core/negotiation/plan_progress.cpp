#include "negotiation/plan_progress.h"

#include <algorithm>
#include <string>

#include "base/expect.h"
#include "hvd/error.h"

namespace hvd::control {

void PlanProgress::check(RankSpan ranks, std::uint64_t sequence, std::uint64_t newest) const {
  last_.for_each(ranks, [&](RankRange range, std::uint64_t before) {
    if (sequence >= before && sequence <= newest) return;
    throw Error("rank " + std::to_string(range.first) + " says it applied plan " +
                std::to_string(sequence) + "; expected " + std::to_string(before) + " to " +
                std::to_string(newest));
  });
}

bool PlanProgress::note(RankSpan ranks, std::uint64_t sequence) {
  std::size_t left_lowest = 0;
  last_.for_each(ranks, [&](RankRange range, std::uint64_t before) {
    HVD_EXPECT(sequence >= before, "no rank goes back");
    if (before == lowest_ && sequence > before)
      left_lowest += static_cast<std::size_t>(count({&range, 1}));
  });
  last_.assign(ranks, sequence);
  ranks_at_lowest_ -= left_lowest;
  if (left_lowest == 0 || ranks_at_lowest_ > 0) return false;
  lowest_ = sequence;
  for (const auto& entry : last_.entries()) lowest_ = std::min(lowest_, entry.value);
  for (const auto& entry : last_.entries()) {
    if (entry.value == lowest_)
      ranks_at_lowest_ += static_cast<std::size_t>(count({&entry.ranks, 1}));
  }
  return true;
}

}  // namespace hvd::control
