#include "negotiation/replays.h"

#include <algorithm>
#include <optional>
#include <variant>

#include "negotiation/aggregator.h"

namespace hvd::control {
namespace {

/// The set of a batch; no value if the slot was displaced within the plan.
std::optional<int> set_of(const wire::Batch& batch, const ResponseCache& cache) {
  const wire::PlannedTensor& first = batch.tensors.front();
  if (const auto* const response = std::get_if<wire::Response>(&first))
    return response->request.process_set;
  const std::uint32_t slot = std::get<wire::SlotUse>(first).slot;
  return cache.holds(slot) ? std::optional(cache.at(slot).request.process_set) : std::nullopt;
}

bool is_in_sequence(const std::vector<wire::SlotBundle>& schedule, const ResponseCache& cache) {
  return std::ranges::all_of(schedule, [&](const wire::SlotBundle& bundle) {
    return std::ranges::all_of(bundle, [&](const std::vector<std::uint32_t>& batch) {
      return std::ranges::all_of(batch, [&](std::uint32_t slot) {
        return cache.holds(slot) && cache.at(slot).request.in_sequence;
      });
    });
  });
}

}  // namespace

bool Replays::Learner::observe(const wire::Plan& plan, const ResponseCache& cache) {
  const bool step = steps.observe(plan, cache);
  if (sequence.observe(plan, cache)) return in_sequence = true;
  if (!step || is_in_sequence(steps.schedule(), cache)) return false;
  in_sequence = false;
  return true;
}

// Each learner observes the part of the plan that belongs to its set. Parts that belong to no
// existing set, such as the creation of a set, count for the set of all ranks.
std::vector<int> Replays::observe(const wire::Plan& plan, const ResponseCache& cache,
                                  const ProcessSetTable& sets) {
  std::vector<int> due;
  const auto observe_part = [&](int process_set, const wire::Plan& part) {
    Learner& learner = learners_.try_emplace(process_set, process_set).first->second;
    if (learner.observe(part, cache)) due.push_back(process_set);
  };
  if (!each_set_) {
    observe_part(0, plan);
    return due;
  }
  const auto existing = [&sets](int process_set) {
    return sets.contains(process_set) ? process_set : 0;
  };
  std::map<int, wire::Plan> parts;
  for (const wire::Batch& batch : plan.batches) {
    const auto process_set = set_of(batch, cache);
    if (!process_set) {
      forget_steps(plan, cache);
      return {};
    }
    parts[existing(*process_set)].batches.push_back(batch);
  }
  for (const wire::ErrorEntry& error : plan.errors)
    parts[existing(error.process_set)].errors.push_back(error);
  for (auto& [process_set, part] : parts) {
    part.shutdown = plan.shutdown;
    observe_part(process_set, part);
  }
  return due;
}

// The plan cannot be learnt, so every learner starts from the beginning.
void Replays::forget_steps(const wire::Plan& plan, const ResponseCache& cache) {
  for (auto& [process_set, learner] : learners_) learner.observe(plan, cache);
}

bool Replays::may_stay_pending(const wire::Request& request, int replayed_set) const noexcept {
  if (request.process_set == replayed_set || ends_all_replays(request)) return false;
  return each_set_ && (replayed_set != 0 || request.device == DeviceType::kCpu);
}

void Replays::begin(int process_set, std::uint64_t plan) {
  last_ = plan;
  (process_set == 0 ? last_of_all_ranks_ : plans_[process_set]) = plan;
}

void Replays::end(int process_set, std::uint64_t batches_run) {
  const auto found = learners_.find(process_set);
  if (found == learners_.end()) return;
  Learner& learner = found->second;
  if (learner.in_sequence) {
    learner.sequence.end_replay(batches_run);
  } else {
    learner.steps.end_replay(batches_run);
  }
}

void Replays::drop_set(int process_set) {
  learners_.erase(process_set);
  plans_.erase(process_set);
}

bool Replays::withdrawn(const wire::Request& request, RankSpan ranks, std::uint64_t as_of,
                        const ProcessSetTable& sets) const {
  if (as_of >= last_) return false;
  return std::ranges::any_of(plans_, [&](const auto& replay) {
    return as_of < replay.second && withdrawn_by_replay(request, replay.first) &&
           intersects(sets.rank_set(replay.first), ranks);
  });
}

RankSet Replays::leaving(const wire::Report& report, const ProcessSetTable& sets) const {
  RankSet leaving = leaving_since(report, last_of_all_ranks_);
  for (const auto& [process_set, plan] : plans_) {
    if (leaving.empty()) break;
    for (const auto& applied : report.applied) {
      if (applied.last_applied < plan)
        leaving.remove(intersection(applied.ranks, sets.rank_set(process_set)));
    }
  }
  return leaving;
}

}  // namespace hvd::control
