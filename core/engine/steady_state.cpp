#include "engine/steady_state.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/expect.h"
#include "base/log.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

/// Fan-out of the tree that wakes a host's ranks.
constexpr std::size_t kChildren = 8;
constexpr std::size_t kMaxRings = kChildren + 1;

std::vector<int> ranks_of_host(const control::ControlPlane& control) {
  const Topology& topology = control.topology();
  std::vector<int> ranks;
  for (int rank = 0; rank < control.size(); ++rank) {
    if (topology.same_host(rank, topology.rank)) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<ArrivalFlags*> flags_of(control::ControlPlane& control, const std::vector<int>& ranks,
                                    int process_set) {
  std::vector<ArrivalFlags*> words;
  for (const int rank : ranks)
    words.push_back(control.arrival_flags(rank, process_set % kArrivalFlags));
  return words;
}

std::size_t position_in(const std::vector<int>& ranks, int rank) {
  return static_cast<std::size_t>(std::ranges::find(ranks, rank) - ranks.begin());
}

control::ScheduleReplay make_schedule(const RuntimeOptions& options,
                                      control::ControlPlane& control) {
  std::vector<ArrivalFlags*> words = flags_of(control, ranks_of_host(control), 0);
  if (!options.schedule_lock || words.front() == nullptr) return {{}, 0};
  return {std::move(words), static_cast<std::size_t>(control.topology().local_rank),
          control.remote_arrival_flags()};
}

// The first rank of each of several hosts sends the arrivals of its host to the others.
std::optional<control::DisseminationBarrier> make_dissemination_barrier(
    const control::ScheduleReplay& schedule, control::ControlPlane& control) {
  const Topology& topology = control.topology();
  if (!schedule.available() || !schedule.spans_hosts() || topology.local_rank != 0)
    return std::nullopt;
  return control::DisseminationBarrier(flags_of(control, ranks_of_host(control), 0),
                                       *control.remote_arrival_flags(), topology.host_index(),
                                       static_cast<int>(topology.host_names.size()));
}

// How long watch() waits for a batch to run: short compared with the times after which stalls are
// reported.
Duration idle_timeout(const RuntimeOptions& options) {
  Duration timeout = std::chrono::seconds(1);
  for (const Duration limit : {options.stall_warning, options.stall_shutdown}) {
    if (limit > Duration::zero()) timeout = std::min(timeout, limit / 10);
  }
  return timeout;
}

}  // namespace

SteadyState::SteadyState(const RuntimeOptions& options, control::ControlPlane& control,
                         Executor& executor, observe::Counters& counters)
    : control_(control),
      executor_(executor),
      counters_(counters),
      sender_(control, counters),
      idle_timeout_(idle_timeout(options)),
      host_(ranks_of_host(control)),
      own_(static_cast<std::size_t>(control.topology().local_rank)),
      schedule_(make_schedule(options, control)),
      barrier_(make_dissemination_barrier(schedule_, control)) {}

SteadyState::SteadyState(const RuntimeOptions& options, control::ControlPlane& control,
                         Executor& executor, observe::Counters& counters, int process_set,
                         std::vector<int> members)
    : control_(control),
      executor_(executor),
      counters_(counters),
      sender_(control, counters),
      idle_timeout_(idle_timeout(options)),
      host_(std::move(members)),
      own_(position_in(host_, control.rank())),
      schedule_(flags_of(control, host_, process_set), own_, nullptr, process_set) {}

void SteadyState::begin(std::vector<control::AgreedBundle> schedule, TimePoint now) {
  HVD_EXPECT(!repeating() && !anything_waits(), "the last schedule has been left");
  executions_.clear();
  for (const control::AgreedBundle& bundle : schedule) {
    for (const control::AgreedBatch& batch : bundle) {
      std::vector<OperationPtr> places(batch.operations.size());  // filled by offer()
      executions_.push_back(executor_.prepare(batch, std::move(places)));
    }
  }
  on_device_ = std::ranges::any_of(executions_, [](const auto& execution) {
    return execution->batch().spec().device.type != DeviceType::kCpu;
  });
  HVD_LOG(kDebug) << "replaying a schedule of " << executions_.size() << " batches";
  schedule_.enter(std::move(schedule));
  moved_at_ = now;
}

bool SteadyState::offer(OperationPtr& operation, TimePoint now) {
  HVD_EXPECT(repeating(), "a schedule is repeated");
  moved_at_ = now;
  // A name is free again when its operation has ended. But unnamed operations of a kind share a
  // place, and the last one there may still run.
  const wire::Request& request = operation->request;
  if (request.unnamed && schedule_.find(request, operation->place) &&
      executions_[operation->place.batch]->running()) {
    schedule_.leave_soon();
    return false;
  }
  if (!schedule_.offer(request, operation->place)) return false;
  const control::SchedulePlace place = operation->place;
  executions_[place.batch]->put(place.index, std::move(operation));
  ++waiting_;
  return true;
}

SteadyState::Outcome SteadyState::advance(TimePoint now, bool polls) {
  Outcome outcome = Outcome::kNothing;
  std::size_t bytes = 0;  // other work gets its turn after kBytesPerCall
  while (schedule_.replaying() && bytes < kBytesPerCall) {
    if (!fill_ahead()) {
      moved_at_ = now;  // the running batch has a time limit of its own
      break;
    }
    const control::ScheduleReplay::NextBundle next = schedule_.advance(polls);
    if (next.outcome == Outcome::kNothing) {
      // All ranks of this host have arrived: its first rank informs the other hosts.
      if (next.ring && own_ != 0) control_.ring(host_.front());
      break;
    }
    wake_next(next.ring, next.outcome == Outcome::kLeft);
    moved_at_ = now;
    if (next.outcome == Outcome::kLeft) {
      HVD_LOG(kDebug) << "left the replay after " << batches_run() << " batches";
      return Outcome::kLeft;
    }
    for (std::size_t i = 0; i < next.batches; ++i) bytes += run(next.batch + i);
    outcome = Outcome::kRun;
  }
  return outcome;
}

// Between hosts, the arrival of a rank does not make the memory that it has written visible, so a
// schedule that spans hosts fills no batch ahead.
bool SteadyState::fill_ahead() {
  if (schedule_.spans_hosts()) return true;
  const auto batch = schedule_.arrives_with();
  return !batch || executor_.fill_ahead(*executions_[*batch]);
}

std::size_t SteadyState::run(std::size_t batch) {
  const std::shared_ptr<Execution>& execution = executions_[batch];
  const std::size_t operations = execution->batch().agreed().size();
  counters_.locked_operations.add(operations);
  waiting_ -= operations;
  if (execution->filled()) return executor_.run_filled(*execution);
  executor_.start(execution);
  return 0;
}

std::vector<OperationPtr> SteadyState::waiting() const {
  std::vector<OperationPtr> operations;
  for (const auto& execution : executions_) {
    if (execution->running()) continue;
    for (const OperationPtr& operation : execution->batch().operations()) {
      if (operation) operations.push_back(operation);
    }
  }
  return operations;
}

std::vector<OperationPtr> SteadyState::release_waiting() {
  std::vector<OperationPtr> operations = waiting();
  executions_.clear();
  waiting_ = 0;
  return operations;
}

void SteadyState::defer(const wire::Plan& plan) {
  if (!schedule_.spans_hosts())
    throw Error(text("plan ", plan.sequence, " arrived during a replay"));
  plans_.push_back(plan);
}

std::optional<wire::Plan> SteadyState::next_deferred_plan() {
  if (schedule_.replaying() || plans_.empty()) return std::nullopt;
  std::optional<wire::Plan> plan = std::move(plans_.front());
  plans_.pop_front();
  return plan;
}

// Another thread of the program might be about to submit the missing operation; then a few steps
// are negotiated needlessly.
bool SteadyState::leave_if_own_missing() noexcept {
  if (!schedule_.lacks_own()) return false;
  schedule_.leave_soon();
  return true;
}

bool SteadyState::watch(TimePoint now, bool waits) {
  if (!schedule_.replaying() || !waits || now - moved_at_ < idle_timeout_) return false;
  moved_at_ = now;
  if (leave_if_own_missing()) return true;
  schedule_.request_leave();
  ring_host();
  return false;
}

std::optional<TimePoint> SteadyState::deadline() const noexcept {
  return schedule_.replaying() ? std::optional(moved_at_ + idle_timeout_) : std::nullopt;
}

bool SteadyState::exchange_updates() {
  if (!barrier_) return false;
  updates_.clear();
  const bool changed = barrier_->advance(updates_);
  for (const auto& [host, update] : updates_)
    sender_.send(control_.topology().first_rank_on(host), wire::encode(update));
  if (changed) ring_host();
  return changed;
}

void SteadyState::accept(int source, const wire::ReplayUpdate& update) {
  if (!barrier_) {
    throw Error(
        text("rank ", source, " sent a replay update to rank ", control_.rank(),
             ", which is not the first rank of its host; set schedule replay (HVD_SCHEDULE_LOCK) "
             "to the same value on every rank"));
  }
  if (barrier_->accept(update)) ring_host();
}

void SteadyState::ring_host() noexcept {
  for (const int rank : host_) {
    if (rank != control_.rank()) control_.ring(rank);
  }
}

// Note [Waking a host]
// The last rank to arrive has work of its own to begin. On a host of many ranks it therefore wakes
// only the first rank and its own children in a tree, and each rank wakes its children when it
// detects that all ranks have arrived, or that one leaves. Every rank is reached: the first rank is
// rung after the last one has arrived, and each rank that detects the arrival rings its children.
// On a host of a few ranks the tree has one level, and the last rank rings the others, except those
// that poll the flags: a ring would take the doorbell's cache line away from them.
/// @param first whether this rank is the last to arrive, or one that leaves
/// @param left whether a rank leaves: then ranks that have not arrived are rung too
void SteadyState::wake_next(bool first, bool left) noexcept {
  if (host_.size() <= kMaxRings) {
    if (!first) return;
    for (std::size_t rank = 0; rank < host_.size(); ++rank) {
      if (rank != own_ && (left || schedule_.has_to_be_woken(rank))) control_.ring(host_[rank]);
    }
    return;
  }
  if (first && own_ != 0) control_.ring(host_.front());
  const std::size_t begin = std::min(host_.size(), own_ * kChildren + 1);
  const std::size_t end = std::min(host_.size(), begin + kChildren);
  for (std::size_t child = begin; child < end; ++child) control_.ring(host_[child]);
}

}  // namespace hvd::runtime
