#include "control/schedule_replay.h"

#include <algorithm>
#include <utility>

#include "base/expect.h"

namespace hvd::control {
namespace {

constexpr std::uint64_t kStepsToLearn = 2;
constexpr std::uint64_t kShortReplay = 4;  // steps
constexpr std::uint64_t kMostPatience = 1024;

bool can_be_replayed(const wire::Request& request) {
  return request.process_set == 0 && request.kind != OpKind::kJoin &&
         request.kind != OpKind::kAddProcessSet && request.kind != OpKind::kRemoveProcessSet;
}

}  // namespace

void ScheduleReplay::enter(std::vector<AgreedBatch> schedule) {
  HVD_EXPECT(!replaying_, "the last schedule has been left");
  batches_.clear();
  places_.clear();
  unnamed_places_.clear();
  ++replays_;
  for (AgreedBatch& agreed : schedule) {
    for (std::size_t i = 0; i < agreed.operations.size(); ++i) {
      const SchedulePlace place{replays_, static_cast<std::uint32_t>(batches_.size()),
                                static_cast<std::uint32_t>(i)};
      if (agreed.operations[i].request.unnamed) {
        unnamed_places_.push_back(place);
      } else {
        places_.insert_or_assign(agreed.operations[i].request.name, place);
      }
    }
    const std::size_t operations = agreed.operations.size();
    batches_.push_back({std::move(agreed), std::vector<std::uint8_t>(operations), operations});
  }
  replaying_ = true;
  arrived_ = leaving_ = false;
  head_ = 0;
  batches_run_ = 0;
  ++position_;
}

const wire::Request& ScheduleReplay::planned(const SchedulePlace& place) const noexcept {
  return batches_[place.batch].agreed.operations[place.index].request;
}

// The cache tells unnamed operations apart by their parameters alone, and a schedule has nothing
// twice: so has the replay.
bool ScheduleReplay::find_unnamed(const wire::Request& request, SchedulePlace& known) const {
  wire::Request asked = request;
  for (const SchedulePlace& place : unnamed_places_) {
    asked.name = planned(place).name;
    asked.ordinal = planned(place).ordinal;
    if (asked == planned(place)) {
      known = place;
      return true;
    }
  }
  return false;
}

bool ScheduleReplay::find(const wire::Request& request, SchedulePlace& known) const {
  if (known.replay == replays_) return true;
  if (request.process_set != 0) return false;
  if (request.unnamed) return find_unnamed(request, known);
  const auto place = places_.find(request.name);
  if (place == places_.end() || !(planned(place->second) == request)) return false;
  known = place->second;
  return true;
}

bool ScheduleReplay::offer(const wire::Request& request, SchedulePlace& known) {
  if (!find(request, known) || batches_[known.batch].offered[known.index]) {
    leave_soon();
    return false;
  }
  Batch& batch = batches_[known.batch];
  batch.offered[known.index] = 1;
  --batch.missing;
  return true;
}

void ScheduleReplay::arrive(bool leaving) noexcept {
  arrived_ = true;
  flags_[own_]->arrived.store(position_ * 2 + (leaving ? 1 : 0), std::memory_order_seq_cst);
}

bool ScheduleReplay::asked_to_leave() const noexcept {
  const auto asks = [this](const ArrivalFlags* flags) {
    return flags->asked.load(std::memory_order_acquire) == position_;
  };
  return (remote_ != nullptr && asks(remote_)) || std::any_of(flags_.begin(), flags_.end(), asks);
}

ScheduleReplay::Advance ScheduleReplay::advance() {
  if (!replaying_) return {};
  const bool arrives = !arrived_;
  if (!arrived_) {
    leaving_ = leaving_ || asked_to_leave();
    if (leaving_ || batches_[head_].missing == 0) arrive(leaving_);
  }
  bool all_here = arrived_;
  bool somebody_leaves = arrived_ && arrives && leaving_;
  const auto look_at = [&](const ArrivalFlags& flags) {
    // Sequentially consistent with arrive(): of two ranks that arrive last at once, at least one
    // sees both, and rings.
    const std::uint64_t flag = flags.arrived.load(std::memory_order_seq_cst);
    if (flag / 2 < position_) all_here = false;
    if (flag == position_ * 2 + 1) somebody_leaves = true;
  };
  for (const ArrivalFlags* const flags : flags_) look_at(*flags);
  // Of this host, whose first rank tells the others.
  const bool ring = arrives && arrived_ && (all_here || somebody_leaves);
  if (remote_ != nullptr) look_at(*remote_);
  if (somebody_leaves) {
    replaying_ = false;
    return {Outcome::kLeft, 0, ring};
  }
  if (!all_here) return {Outcome::kNothing, 0, ring};
  const std::size_t run = head_;
  Batch& batch = batches_[run];
  batch.offered.assign(batch.offered.size(), 0);
  batch.missing = batch.offered.size();
  head_ = head_ + 1 == batches_.size() ? 0 : head_ + 1;
  ++position_;
  ++batches_run_;
  arrived_ = false;
  return {Outcome::kRun, run, ring};
}

void ScheduleReplay::ask_others_to_leave() noexcept {
  flags_[own_]->asked.store(position_, std::memory_order_release);
}

// Unnamed operations of a kind share a slot, so several that are under way at once may be fused.
bool StepLearner::repeats_itself(const wire::Batch& batch) {
  std::vector<std::uint32_t> slots;
  for (const wire::PlannedTensor& tensor : batch.tensors) slots.push_back(*tensor.slot);
  slots = sorted(std::move(slots));
  return std::adjacent_find(slots.begin(), slots.end()) != slots.end();
}

// All members of a group are ready in the same plan, and of one sort in the same batch.
bool StepLearner::splits_a_group(const wire::Plan& plan, const ResponseCache& cache) {
  std::unordered_map<std::string, const wire::Batch*> batch_of_group;
  for (const wire::Batch& batch : plan.batches) {
    for (const wire::PlannedTensor& tensor : batch.tensors) {
      if (cache.at(*tensor.slot).request.group_size < 2) continue;
      const wire::Request member = cache.expand(*tensor.slot, tensor.ordinal, 0);
      const auto [known, added] = batch_of_group.try_emplace(member.group_key(), &batch);
      if (!added && known->second != &batch) return true;
    }
  }
  return false;
}

bool StepLearner::learnable(const wire::Plan& plan, const ResponseCache& cache) const {
  if (plan.shutdown || !plan.errors.empty()) return false;
  const auto tensor_can_be_replayed = [&cache](const wire::PlannedTensor& tensor) {
    return tensor.slot && cache.holds(*tensor.slot) &&
           can_be_replayed(cache.at(*tensor.slot).request);
  };
  const auto batch_can_be_replayed = [&](const wire::Batch& batch) {
    return batch.absent.empty() &&
           std::all_of(batch.tensors.begin(), batch.tensors.end(), tensor_can_be_replayed) &&
           !repeats_itself(batch);
  };
  return std::all_of(plan.batches.begin(), plan.batches.end(), batch_can_be_replayed) &&
         !splits_a_group(plan, cache);
}

std::vector<std::uint32_t> StepLearner::sorted(std::vector<std::uint32_t> slots) {
  std::sort(slots.begin(), slots.end());
  return slots;
}

void StepLearner::begin_step() {
  for (const std::uint32_t slot : current_.slots) seen_[slot] = false;
  current_ = {};
}

void StepLearner::close_step() {
  std::vector<std::uint32_t> slots = sorted(current_.slots);
  equal_steps_ = slots == previous_ ? equal_steps_ + 1 : 1;
  previous_ = std::move(slots);
  begin_step();
}

void StepLearner::add(const wire::Batch& batch) {
  std::vector<std::uint32_t> slots;
  for (const wire::PlannedTensor& tensor : batch.tensors) slots.push_back(*tensor.slot);
  if (std::any_of(slots.begin(), slots.end(),
                  [this](std::uint32_t slot) { return in_current(slot); }))
    close_step();
  for (const std::uint32_t slot : slots) {
    if (slot >= seen_.size()) seen_.resize(slot + 1);
    seen_[slot] = true;
  }
  current_.slots.insert(current_.slots.end(), slots.begin(), slots.end());
  current_.batches.push_back(std::move(slots));
}

void StepLearner::forget() {
  begin_step();
  previous_.clear();
  equal_steps_ = 0;
}

bool StepLearner::observe(const wire::Plan& plan, const ResponseCache& cache) {
  if (!learnable(plan, cache)) {
    forget();
    return false;
  }
  for (const wire::Batch& batch : plan.batches) add(batch);
  const std::size_t size = current_.slots.size();
  if (size == 0 || (size != previous_.size() && size != last_schedule_.size())) return false;
  const std::vector<std::uint32_t> slots = sorted(current_.slots);
  const bool again = slots == previous_;
  const bool known = slots == last_schedule_;
  const std::uint64_t steps = 1 + (again ? equal_steps_ : 0);
  if ((!known && !again) || steps < std::max(backoff_, known ? 1 : kStepsToLearn)) return false;
  last_schedule_ = slots;
  last_schedule_batches_ = current_.batches.size();
  return true;
}

void StepLearner::note_left(std::uint64_t batches_run) {
  const bool short_lived = batches_run < kShortReplay * last_schedule_batches_;
  backoff_ = short_lived ? std::min(std::max<std::uint64_t>(2 * backoff_, 1), kMostPatience) : 0;
  forget();
}

}  // namespace hvd::control
