#include "negotiation/rank_records.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/expect.h"
#include "base/text.h"
#include "hvd/error.h"
#include "negotiation/process_set_table.h"

namespace hvd::control {

void PlanProgress::check(RankSpan ranks, std::uint64_t sequence, std::uint64_t newest) const {
  last_.for_each(ranks, [&](RankRange range, std::uint64_t before) {
    if (sequence >= before && sequence <= newest) return;
    throw Error(text("rank ", range.first, " reports that it applied plan ", sequence,
                     "; expected ", before, " to ", newest));
  });
}

bool PlanProgress::record(RankSpan ranks, std::uint64_t sequence) {
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

void FailedUses::add(const wire::Request& request, std::uint64_t plan, RankSet missing) {
  if (missing.empty()) return;
  uses_[tensor_key(request.process_set, request.name)].push_back({plan, std::move(missing)});
}

RankSet FailedUses::find(const wire::Request& request, RankSpan ranks, std::uint64_t as_of) const {
  RankSet found;
  if (uses_.empty()) return found;
  const auto uses = uses_.find(tensor_key(request.process_set, request.name));
  if (uses == uses_.end()) return found;
  for (const Use& use : uses->second) {
    if (use.plan > as_of) found.add(intersection(use.ranks, ranks));
  }
  return found;
}

void FailedUses::record_applied(RankSpan ranks, std::uint64_t plan) {
  for (auto& [key, uses] : uses_) {
    for (Use& use : uses) {
      if (use.plan <= plan) use.ranks.remove(ranks);
    }
    std::erase_if(uses, [](const Use& use) { return use.ranks.empty(); });
  }
  std::erase_if(uses_, [](const auto& uses) { return uses.second.empty(); });
}

void FailedUses::drop_set(int process_set) {
  const std::string prefix = tensor_key(process_set, "");
  std::erase_if(uses_, [&](const auto& uses) { return uses.first.starts_with(prefix); });
}

std::size_t FailedUses::size() const noexcept {
  std::size_t ranks = 0;
  for (const auto& [key, uses] : uses_) {
    for (const Use& use : uses) ranks += static_cast<std::size_t>(count(use.ranks));
  }
  return ranks;
}

void BlockedRanks::record_change(TimePoint now) {
  changed_at_ = now;
  blocked_.clear();
}

std::optional<Duration> BlockedRanks::deadlocked_for(const RankSet& departed, TimePoint now) const {
  const Duration quiet = now - changed_at_;
  if (limit_ == Duration::zero() || blocked_.empty() || quiet < limit_) return std::nullopt;
  RankSet waiting = blocked_;
  waiting.add(departed);
  if (static_cast<std::size_t>(count(waiting)) < ranks_in_job_) return std::nullopt;
  return quiet;
}

}  // namespace hvd::control
