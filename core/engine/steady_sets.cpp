#include "engine/steady_sets.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::runtime {

template <class Visit>
void SteadySets::for_each(Visit&& visit) {
  visit(0, world_);
  for (auto& [process_set, state] : sets_) visit(process_set, *state);
}

template <class Visit>
void SteadySets::for_each(Visit&& visit) const {
  visit(0, world_);
  for (const auto& [process_set, state] : sets_) visit(process_set, std::as_const(*state));
}

SteadySets::SteadySets(const RuntimeOptions& options, control::ControlPlane& control,
                       Executor& executor, observe::Counters& counters)
    : options_(options),
      control_(control),
      executor_(executor),
      counters_(counters),
      spans_hosts_(control.topology().host_names.size() > 1),
      world_(options, control, executor, counters) {}

SteadyState* SteadySets::find(int process_set) noexcept {
  return const_cast<SteadyState*>(std::as_const(*this).find(process_set));
}

const SteadyState* SteadySets::find(int process_set) const noexcept {
  if (process_set == 0) return &world_;
  const auto found = sets_.find(process_set);
  return found == sets_.end() ? nullptr : found->second.get();
}

bool SteadySets::repeating() const noexcept {
  bool any = false;
  for_each([&any](int, const SteadyState& state) { any = any || state.repeating(); });
  return any;
}

bool SteadySets::repeating(int process_set) const noexcept {
  const SteadyState* const state = find(process_set);
  return state != nullptr && state->repeating();
}

std::size_t SteadySets::batches() const noexcept {
  std::size_t sum = 0;
  for_each([&sum](int, const SteadyState& state) {
    if (state.repeating()) sum += state.batches();
  });
  return sum;
}

std::uint64_t SteadySets::batches_run(int process_set) const {
  const SteadyState* const state = find(process_set);
  return state == nullptr ? 0 : state->batches_run();
}

std::uint64_t SteadySets::position(int process_set) const noexcept {
  const SteadyState* const state = find(process_set);
  return state == nullptr ? 0 : state->position();
}

void SteadySets::begin(int process_set, const std::vector<int>& members,
                       std::vector<control::AgreedBundle> schedule, TimePoint now) {
  if (repeating(process_set) || (process_set != 0 && spans_hosts_))
    throw Error(text("a plan repeats a schedule of process set ", process_set,
                     ", which repeats one already or is in a job of several hosts"));
  if (find(process_set) == nullptr) {
    sets_.emplace(process_set, std::make_unique<SteadyState>(options_, control_, executor_,
                                                             counters_, process_set, members));
  }
  find(process_set)->begin(std::move(schedule), now);
  if (holds_all_) leave_soon();
  std::vector<std::shared_ptr<Execution>> all;
  for_each([&all](int, const SteadyState& state) {
    all.insert(all.end(), state.executions().begin(), state.executions().end());
  });
  executor_.keep_buffers_for(all);
}

SteadySets::Holds SteadySets::holds(const wire::Request& request) const noexcept {
  if (spans_hosts_ || control::ends_all_replays(request)) return Holds::kAll;
  return request.device == DeviceType::kCpu ? Holds::kOwnSet : Holds::kOwnSetAndWorld;
}

bool SteadySets::is_held(const wire::Request& request) const noexcept {
  if (holds_all_) return repeating();
  switch (holds(request)) {
    case Holds::kAll:
      return repeating();
    case Holds::kOwnSetAndWorld:
      return world_.repeating() || repeating(request.process_set);
    case Holds::kOwnSet:
      return repeating(request.process_set);
  }
  return false;
}

bool SteadySets::accept(OperationPtr& operation, TimePoint now) {
  const wire::Request& request = operation->request;
  SteadyState* const own = find(request.process_set);
  if (own != nullptr && own->repeating() && own->offer(operation, now)) return true;
  if (!is_held(request)) return false;
  const OperationPtr& held = held_.emplace(operation->order, std::move(operation)).first->second;
  switch (holds(held->request)) {
    case Holds::kAll:
      holds_all_ = true;
      leave_soon();
      break;
    case Holds::kOwnSetAndWorld:
      world_.leave_soon();
      break;
    case Holds::kOwnSet:  // offer() has made this rank leave
      break;
  }
  return true;
}

SteadySets::Advanced SteadySets::advance(TimePoint now, bool polls) {
  Advanced advanced;
  for_each([&](int process_set, SteadyState& state) {
    if (advanced.left || !state.repeating()) return;
    const SteadyState::Outcome outcome = state.advance(now, polls);
    advanced.moved = advanced.moved || outcome != SteadyState::Outcome::kNothing;
    if (outcome == SteadyState::Outcome::kLeft) advanced.left = process_set;
  });
  return advanced;
}

bool SteadySets::stop_polling() noexcept {
  bool stopped = false;
  for_each([&stopped](int, SteadyState& state) { stopped = state.stop_polling() || stopped; });
  return stopped;
}

std::vector<OperationPtr> SteadySets::release(int process_set) {
  std::vector<OperationPtr> released;
  if (SteadyState* const left = find(process_set)) released = left->release_waiting();
  holds_all_ = holds_all_ && repeating();
  for (auto held = held_.begin(); held != held_.end();) {
    if (is_held(held->second->request)) {
      ++held;
      continue;
    }
    released.push_back(std::move(held->second));
    held = held_.erase(held);
  }
  std::ranges::sort(released, {}, [](const OperationPtr& one) { return one->order; });
  return released;
}

void SteadySets::release_all() {
  for_each([](int, SteadyState& state) { state.release_waiting(); });
  held_.clear();
}

void SteadySets::leave_soon() noexcept {
  for_each([](int, SteadyState& state) {
    if (state.repeating()) state.leave_soon();
  });
}

void SteadySets::remove(int process_set) { sets_.erase(process_set); }

std::vector<OperationPtr> SteadySets::waiting() const {
  std::vector<OperationPtr> operations;
  for_each([&operations](int, const SteadyState& state) {
    for (OperationPtr& operation : state.waiting()) operations.push_back(std::move(operation));
  });
  for (const auto& [order, operation] : held_) operations.push_back(operation);
  return operations;
}

bool SteadySets::anything_waits() const noexcept {
  bool any = !held_.empty();
  for_each([&any](int, const SteadyState& state) { any = any || state.anything_waits(); });
  return any;
}

bool SteadySets::leave_if_own_missing() noexcept {
  bool leaves = false;
  for_each([&leaves](int, SteadyState& state) {
    if (state.anything_waits() && state.leave_if_own_missing()) leaves = true;
  });
  return leaves;
}

bool SteadySets::watch(TimePoint now, bool waits) {
  bool leaves = false;
  for_each([&](int process_set, SteadyState& state) {
    // In a job of several hosts, any operation that waits blocks the replay of all ranks.
    const bool waits_here = state.anything_waits() || (process_set == 0 && spans_hosts_);
    if (state.watch(now, waits && waits_here)) leaves = true;
  });
  return leaves;
}

std::optional<TimePoint> SteadySets::deadline() const noexcept {
  std::optional<TimePoint> next;
  for_each([&next](int, const SteadyState& state) {
    const auto own = state.anything_waits() ? state.deadline() : std::nullopt;
    if (own) next = next ? std::min(*next, *own) : *own;
  });
  return next;
}

}  // namespace hvd::runtime
