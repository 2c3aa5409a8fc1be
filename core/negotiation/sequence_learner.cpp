#include "negotiation/sequence_learner.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "negotiation/schedule_replay.h"

namespace hvd::control {
namespace {

constexpr std::size_t kLongestPeriod = 2048;
constexpr std::size_t kMaxHistory = 3 * kLongestPeriod;
constexpr std::size_t kMaxEarly = 1024;
constexpr std::uint64_t kFewPeriods = 4;
constexpr std::size_t kShortRepetition = 256;  // operations, which may be one operation repeated

}  // namespace

// Adds the operations of the plan. @return whether all of them belong to the sequence
bool SequenceLearner::add_operations(const wire::Plan& plan, const ResponseCache& cache) {
  if (plan.shutdown || !plan.errors.empty()) return false;
  for (const wire::Batch& batch : plan.batches) {
    if (!batch.absent.empty()) return false;
    ++batches_seen_;
    for (const wire::PlannedTensor& tensor : batch.tensors) {
      const auto* const use = std::get_if<wire::SlotUse>(&tensor);
      if (use == nullptr || !cache.holds(use->slot)) return false;
      const wire::Request& request = cache.at(use->slot).request;
      if (!request.in_sequence || !can_be_replayed(request, set_)) return false;
      const bool continues_group = request.group_size > 1 && request.group_index > 0;
      if (!early_.try_emplace(use->ordinal, Entry{use->slot, batches_seen_, continues_group})
               .second)
        return false;
    }
  }
  return true;
}

bool SequenceLearner::observe(const wire::Plan& plan, const ResponseCache& cache) {
  if (!add_operations(plan, cache) || early_.empty() || early_.size() > kMaxEarly) {
    forget();
    return false;
  }
  if (!next_) next_ = early_.begin()->first;
  while (!early_.empty() && early_.begin()->first == *next_) {
    append(early_.begin()->second);
    early_.erase(early_.begin());
    ++*next_;
  }
  if (!early_.empty()) {
    // The sequence began earlier than assumed, or restarts after a join.
    if (early_.begin()->first < *next_) forget();
    return false;
  }
  const auto found = period();
  if (found) choose(*found);
  return found.has_value();
}

void SequenceLearner::append(const Entry& entry) {
  history_.push_back(entry);
  if (history_.size() > kMaxHistory)
    history_.erase(history_.begin(), history_.begin() + kLongestPeriod);
  const std::size_t last = history_.size() - 1;
  repeats_.resize(std::max(repeats_.size(), std::min(last, kLongestPeriod) + 1));
  for (std::size_t distance = 1; distance <= std::min(last, kLongestPeriod); ++distance) {
    std::size_t& repeats = repeats_[distance];
    repeats = history_[last - distance].slot == entry.slot ? repeats + 1 : 0;
  }
  // Lowers the requirement over time, so that a program with short periods can replay again.
  if (++since_end_ >= 4 * wanted_) {
    wanted_ /= 2;
    since_end_ = 0;
  }
}

// The shortest length for which the last two periods are equal and which does not begin inside a
// group.
std::optional<std::size_t> SequenceLearner::period() const {
  for (std::size_t length = 1; length < repeats_.size(); ++length) {
    if (repeats_[length] < length || repeats_[length] + length < wanted_) continue;
    if (history_[history_.size() - length].continues_group) continue;
    return length;
  }
  return std::nullopt;
}

// Fusion depends on timing, so of the last two periods the one with fewer batches is chosen. After
// a replay that ended early the latest period is chosen, because the program may need the larger
// number.
void SequenceLearner::choose(std::size_t period) {
  const auto count = [](const std::vector<wire::SlotBundle>& bundles) {
    std::size_t batches = 0;
    for (const wire::SlotBundle& bundle : bundles) batches += bundle.size();
    return batches;
  };
  schedule_ = bundles(history_.size() - period, period);
  schedule_batches_ = count(schedule_);
  if (wanted_ <= 2 * schedule_period_ && history_.size() >= 2 * period) {
    std::vector<wire::SlotBundle> before = bundles(history_.size() - 2 * period, period);
    if (const std::size_t batches = count(before); batches < schedule_batches_) {
      schedule_ = std::move(before);
      schedule_batches_ = batches;
    }
  }
  schedule_period_ = period;
  learnt_from_ = repeats_[period] + period;
}

std::vector<wire::SlotBundle> SequenceLearner::bundles(std::size_t first, std::size_t count) const {
  std::vector<wire::SlotBundle> bundles;
  for (std::size_t i = first; i < first + count; ++i) {
    const Entry& entry = history_[i];
    const bool shares_batch = i > first && entry.batch == history_[i - 1].batch;
    if (i == first || (!shares_batch && !entry.continues_group)) {
      bundles.push_back({{entry.slot}});
    } else if (shares_batch) {
      bundles.back().back().push_back(entry.slot);
    } else {
      bundles.back().push_back({entry.slot});
    }
  }
  return bundles;
}

void SequenceLearner::end_replay(std::uint64_t batches_run) {
  if (schedule_batches_ == 0) return;
  const std::uint64_t periods = batches_run / schedule_batches_;
  const std::uint64_t lasted =
      std::min<std::uint64_t>(learnt_from_ + periods * schedule_period_, 2 * kLongestPeriod);
  const bool short_lived = periods < kFewPeriods || lasted < kShortRepetition;
  // The replay may have ended inside a period, so one more period is counted.
  const std::size_t at_least = short_lived
                                   ? 2 * (static_cast<std::size_t>(lasted) + schedule_period_)
                                   : 2 * schedule_period_;
  wanted_ = std::min(at_least, 2 * kLongestPeriod);
  since_end_ = 0;
  forget();
}

void SequenceLearner::forget() {
  history_.clear();
  repeats_.clear();
  early_.clear();
  next_.reset();
}

}  // namespace hvd::control
