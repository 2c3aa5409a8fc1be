#include "negotiation/blocked_ranks.h"

namespace hvd::control {

void BlockedRanks::note_change(TimePoint now) {
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
