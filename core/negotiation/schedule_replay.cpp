#include "negotiation/schedule_replay.h"

#include <algorithm>
#include <utility>

#include "base/expect.h"

namespace hvd::control {
namespace {

constexpr std::uint64_t kStepsToLearn = 2;
constexpr std::uint64_t kStepsToCompare = 4;
constexpr std::uint64_t kShortReplay = 4;  // steps
constexpr std::uint64_t kMaxBackoff = 1024;

// Returns the batches of a plan in bundles. Batches that share a group are in one bundle; all
// members of a group are ready in the same plan. A bundle has the position of its last batch,
// because it waits for that batch.
std::vector<wire::SlotBundle> bundles_of(const wire::Plan& plan, const ResponseCache& cache) {
  std::vector<std::size_t> tied_to(plan.batches.size());  // an earlier batch, or itself
  const auto root = [&](std::size_t batch) {
    while (tied_to[batch] != batch) batch = tied_to[batch];
    return batch;
  };
  std::unordered_map<std::string, std::size_t> batch_of_group;
  for (std::size_t i = 0; i < plan.batches.size(); ++i) {
    tied_to[i] = i;
    for (const wire::PlannedTensor& tensor : plan.batches[i].tensors) {
      const auto& [slot, ordinal] = std::get<wire::SlotUse>(tensor);
      if (cache.at(slot).request.group_size < 2) continue;
      const wire::Request member = cache.expand(slot, ordinal, 0);
      const std::size_t other =
          root(batch_of_group.try_emplace(member.group_key(), i).first->second);
      const std::size_t own = root(i);
      tied_to[std::max(own, other)] = std::min(own, other);
    }
  }
  std::vector<std::size_t> last(plan.batches.size());  // the last batch of a bundle, by its root
  for (std::size_t i = 0; i < plan.batches.size(); ++i) last[root(i)] = i;
  std::vector<wire::SlotBundle> gathered(plan.batches.size()), bundles;
  for (std::size_t i = 0; i < plan.batches.size(); ++i) {
    auto& slots = gathered[root(i)].emplace_back();
    for (const wire::PlannedTensor& tensor : plan.batches[i].tensors)
      slots.push_back(std::get<wire::SlotUse>(tensor).slot);
    if (last[root(i)] == i) bundles.push_back(std::move(gathered[root(i)]));
  }
  return bundles;
}

std::vector<std::uint32_t> slots_of(const wire::SlotBundle& bundle) {
  std::vector<std::uint32_t> slots;
  for (const auto& batch : bundle) slots.insert(slots.end(), batch.begin(), batch.end());
  return slots;
}

bool all_in_sequence(const std::vector<AgreedBundle>& schedule) {
  return std::ranges::all_of(schedule, [](const AgreedBundle& bundle) {
    return std::ranges::all_of(bundle, [](const AgreedBatch& batch) {
      return std::ranges::all_of(batch.operations, [](const wire::Response& operation) {
        return operation.request.in_sequence;
      });
    });
  });
}

/// Sets with higher numbers are not replayed: their positions would overflow.
constexpr int kMaxReplayedSet = 1 << 22;

}  // namespace

bool ends_all_replays(const wire::Request& request) noexcept {
  return request.kind == OpKind::kJoin || request.kind == OpKind::kAddProcessSet ||
         request.kind == OpKind::kRemoveProcessSet;
}

bool withdrawn_by_replay(const wire::Request& request, int process_set) noexcept {
  return process_set == 0 || request.process_set == process_set || ends_all_replays(request);
}

bool can_be_replayed(const wire::Request& request, int process_set) noexcept {
  return request.process_set == process_set && !ends_all_replays(request) &&
         (process_set == 0 || request.device == DeviceType::kCpu);
}

bool may_replay(const ProcessSetTable& sets, int process_set) {
  if (process_set > kMaxReplayedSet || !sets.contains(process_set)) return false;
  for (int other = process_set - kArrivalFlags; other >= 0; other -= kArrivalFlags) {
    if (sets.contains(other)) return false;
  }
  return true;
}

void ScheduleReplay::enter(std::vector<AgreedBundle> schedule) {
  HVD_EXPECT(!replaying_, "the last schedule has been left");
  bundles_.clear();
  batches_.clear();
  places_.clear();
  unnamed_places_.clear();
  in_order_ = all_in_sequence(schedule);
  next_in_order_ = 0;
  ++replays_;
  for (AgreedBundle& bundle : schedule) {
    bundles_.push_back({.first = batches_.size(), .batches = bundle.size()});
    for (AgreedBatch& agreed : bundle) add(std::move(agreed));
  }
  replaying_ = true;
  arrived_ = leaving_ = false;
  head_ = 0;
  batches_run_ = 0;
  ++position_;
}

// Adds the batch to the last bundle.
void ScheduleReplay::add(AgreedBatch agreed) {
  const std::size_t operations = agreed.operations.size();
  for (std::size_t i = 0; i < operations; ++i) {
    const SchedulePlace place{replays_, static_cast<std::uint32_t>(batches_.size()),
                              static_cast<std::uint32_t>(i)};
    if (agreed.operations[i].request.unnamed) {
      unnamed_places_.push_back(place);
    } else {
      places_.insert_or_assign(agreed.operations[i].request.name, place);
    }
  }
  batches_.push_back(
      {std::move(agreed), std::vector<std::uint8_t>(operations), bundles_.size() - 1});
  bundles_.back().operations += operations;
  bundles_.back().missing += operations;
}

const wire::Request& ScheduleReplay::planned(const SchedulePlace& place) const noexcept {
  return batches_[place.batch].agreed.operations[place.index].request;
}

// In an ordered schedule the operation has the next place or none. In other schedules the
// parameters identify the place, as in the cache, because no slot occurs twice there.
bool ScheduleReplay::find_unnamed(const wire::Request& request, SchedulePlace& known) const {
  const auto fits = [&](const SchedulePlace& place) {
    return request.parameters() == planned(place).parameters();
  };
  const auto first = unnamed_places_.begin();
  const auto next = first + static_cast<std::ptrdiff_t>(next_in_order_);
  const auto found = in_order_ ? (fits(*next) ? next : unnamed_places_.end())
                               : std::find_if(first, unnamed_places_.end(), fits);
  if (found == unnamed_places_.end()) return false;
  known = *found;
  return true;
}

bool ScheduleReplay::find(const wire::Request& request, SchedulePlace& known) const {
  if (known.replay == replays_) return true;
  if (request.unnamed) return find_unnamed(request, known);
  const auto place = places_.find(request.name);
  if (place == places_.end() || !(planned(place->second) == request)) return false;
  known = place->second;
  return true;
}

// Whether members of an unnamed group are in different bundles. Unnamed members are identified by
// their parameters only, so the program may group equal members differently than in the schedule.
// All members of a group are offered one after the other.
bool ScheduleReplay::splits_unnamed_group(const wire::Request& request,
                                          const SchedulePlace& place) noexcept {
  if (!request.unnamed || request.group_size < 2) return false;
  const std::size_t bundle = batches_[place.batch].bundle;
  if (request.group_index == 0) bundle_of_first_member_ = bundle;
  return bundle != bundle_of_first_member_;
}

bool ScheduleReplay::offer(const wire::Request& request, SchedulePlace& known) {
  if (!find(request, known) || batches_[known.batch].offered[known.index] ||
      splits_unnamed_group(request, known)) {
    leave_soon();
    return false;
  }
  if (in_order_) next_in_order_ = (next_in_order_ + 1) % unnamed_places_.size();
  ReplayedBatch& batch = batches_[known.batch];
  batch.offered[known.index] = 1;
  --bundles_[batch.bundle].missing;
  return true;
}

void ScheduleReplay::arrive(bool leaving, bool polls) noexcept {
  arrived_ = true;
  flags_[own_]->polled.store(polls ? position_ : 0, std::memory_order_relaxed);
  flags_[own_]->arrived.store(position_ * 2 + (leaving ? 1 : 0), std::memory_order_seq_cst);
}

// Sequentially consistent with arrive(): either the last rank to arrive sees that this one has
// stopped, or the next advance() of this rank sees its arrival.
bool ScheduleReplay::stop_polling() noexcept {
  if (!arrived_ || flags_[own_]->polled.load(std::memory_order_relaxed) != position_) return false;
  flags_[own_]->polled.store(0, std::memory_order_seq_cst);
  return true;
}

bool ScheduleReplay::leave_requested() const noexcept {
  const auto requests = [this](const ArrivalFlags* flags) {
    return flags->leave_requested.load(std::memory_order_acquire) == position_;
  };
  return (remote_ != nullptr && requests(remote_)) ||
         std::any_of(flags_.begin(), flags_.end(), requests);
}

std::optional<std::size_t> ScheduleReplay::arrives_with() const noexcept {
  if (!replaying_ || arrived_ || leaving_) return std::nullopt;
  const Bundle& bundle = bundles_[head_];
  if (bundle.missing > 0 || bundle.batches > 1) return std::nullopt;
  return bundle.first;
}

ScheduleReplay::NextBundle ScheduleReplay::advance(bool polls) {
  if (!replaying_) return {};
  const bool arrives = !arrived_;
  if (!arrived_) {
    leaving_ = leaving_ || leave_requested();
    if (leaving_ || bundles_[head_].missing == 0) arrive(leaving_, polls);
  }
  bool all_here = arrived_;
  bool a_rank_leaves = arrived_ && arrives && leaving_;
  const auto check = [&](const ArrivalFlags& flags) {
    // Sequentially consistent with arrive(): if the last two ranks arrive at the same time, at
    // least one of them sees both arrivals, and rings.
    const std::uint64_t flag = flags.arrived.load(std::memory_order_seq_cst);
    if (flag / 2 < position_) all_here = false;
    if (flag == position_ * 2 + 1) a_rank_leaves = true;
  };
  for (const ArrivalFlags* const flags : flags_) check(*flags);
  // Only the flags of this host count for ringing, because its first rank informs the other hosts.
  const bool ring = arrives && arrived_ && (all_here || a_rank_leaves);
  if (remote_ != nullptr) check(*remote_);
  if (a_rank_leaves) {
    replaying_ = false;
    return {Outcome::kLeft, 0, 0, ring};
  }
  if (!all_here) return {Outcome::kNothing, 0, 0, ring};
  Bundle& bundle = bundles_[head_];
  for (std::size_t i = bundle.first; i < bundle.first + bundle.batches; ++i)
    batches_[i].offered.assign(batches_[i].offered.size(), 0);
  bundle.missing = bundle.operations;
  head_ = head_ + 1 == bundles_.size() ? 0 : head_ + 1;
  ++position_;
  batches_run_ += bundle.batches;
  arrived_ = false;
  return {Outcome::kRun, bundle.first, bundle.batches, ring};
}

void ScheduleReplay::request_leave() noexcept {
  flags_[own_]->leave_requested.store(position_, std::memory_order_release);
}

// Whether a slot occurs twice in the bundle. Equal unnamed operations share a slot, and several of
// them may be in flight at once and be fused.
bool StepLearner::repeats_itself(const wire::SlotBundle& bundle) {
  const std::vector<std::uint32_t> slots = sorted(slots_of(bundle));
  return std::ranges::adjacent_find(slots) != slots.end();
}

bool StepLearner::learnable(const wire::Plan& plan, const ResponseCache& cache) const {
  if (plan.shutdown || !plan.errors.empty()) return false;
  const auto tensor_can_be_replayed = [this, &cache](const wire::PlannedTensor& tensor) {
    const auto* const cached = std::get_if<wire::SlotUse>(&tensor);
    return cached != nullptr && cache.holds(cached->slot) &&
           can_be_replayed(cache.at(cached->slot).request, set_) &&
           (set_ == 0 || !cache.at(cached->slot).request.in_sequence);
  };
  return std::ranges::all_of(plan.batches, [&](const wire::Batch& batch) {
    return batch.absent.empty() && std::ranges::all_of(batch.tensors, tensor_can_be_replayed);
  });
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
  const bool equal = slots == previous_;
  equal_steps_ = equal ? equal_steps_ + 1 : 1;
  vary_ = equal && (vary_ || current_.batches != best_.batches);
  if (!equal || current_.batches < best_.batches) best_ = current_;
  previous_ = std::move(slots);
  begin_step();
}

void StepLearner::add(wire::SlotBundle bundle) {
  const std::vector<std::uint32_t> slots = slots_of(bundle);
  if (std::ranges::any_of(slots, [this](std::uint32_t slot) { return in_current(slot); }))
    close_step();
  for (const std::uint32_t slot : slots) {
    if (slot >= seen_.size()) seen_.resize(slot + 1);
    seen_[slot] = true;
  }
  current_.slots.insert(current_.slots.end(), slots.begin(), slots.end());
  current_.batches += bundle.size();
  current_.bundles.push_back(std::move(bundle));
}

void StepLearner::forget() {
  begin_step();
  previous_.clear();
  best_ = {};
  vary_ = false;
  equal_steps_ = 0;
}

bool StepLearner::observe(const wire::Plan& plan, const ResponseCache& cache) {
  std::vector<wire::SlotBundle> bundles;
  if (learnable(plan, cache)) {
    bundles = bundles_of(plan, cache);
  } else {
    schedule_holds_ = false;  // a slot may hold another response from now on
  }
  if (bundles.empty() || std::ranges::any_of(bundles, repeats_itself)) {
    forget();
    return false;
  }
  for (wire::SlotBundle& bundle : bundles) add(std::move(bundle));
  const std::size_t size = current_.slots.size();
  if (size != previous_.size() && size != last_schedule_.size()) return false;
  std::vector<std::uint32_t> slots = sorted(current_.slots);
  const bool again = slots == previous_;
  const bool known = slots == last_schedule_;
  if (!known && !again) return false;
  if (1 + (again ? equal_steps_ : 0) < steps_wanted(known, again)) return false;
  choose(known, again);
  last_schedule_ = std::move(slots);
  return true;
}

std::uint64_t StepLearner::steps_wanted(bool known, bool again) const noexcept {
  if (backoff_ > 0 || known) return std::max<std::uint64_t>(backoff_, 1);
  const bool vary = again && (vary_ || current_.batches != best_.batches);
  return vary ? kStepsToCompare : kStepsToLearn;
}

void StepLearner::choose(bool known, bool again) {
  const Step* fewest = &current_;
  const auto consider = [&](const Step& other) {
    if (other.batches < fewest->batches) fewest = &other;
  };
  const bool lasts = backoff_ == 0;
  if (lasts && again) consider(best_);
  if (lasts && known && schedule_holds_) consider(schedule_);
  schedule_ = Step(*fewest);
  schedule_holds_ = true;
}

void StepLearner::end_replay(std::uint64_t batches_run) {
  const bool short_lived = batches_run < kShortReplay * schedule_.batches;
  backoff_ = short_lived ? std::min(std::max<std::uint64_t>(2 * backoff_, 1), kMaxBackoff) : 0;
  forget();
}

}  // namespace hvd::control
