// The part of an engine that runs a locked schedule.
#include "engine/engine_lock.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/log.h"
#include "engine/engine.h"

namespace hvd::runtime {

namespace {

/// Of the ranks of this host.
std::vector<LockWords*> words_of_host(control::ControlPlane& control) {
  const Topology& topology = control.topology();
  std::vector<LockWords*> words;
  for (int rank = 0; rank < control.size(); ++rank) {
    if (topology.same_host(rank, topology.rank)) words.push_back(control.lock_words(rank));
  }
  return words;
}

}  // namespace

control::ScheduleLock make_lock(const RuntimeOptions& options, control::ControlPlane& control) {
  std::vector<LockWords*> words = words_of_host(control);
  if (!options.schedule_lock || words.front() == nullptr) return {{}, 0};
  return {std::move(words), static_cast<std::size_t>(control.topology().local_rank),
          control.outside_lock_words()};
}

std::optional<control::LockRelay> make_relay(const control::ScheduleLock& lock,
                                             control::ControlPlane& control) {
  const Topology& topology = control.topology();
  if (!lock.available() || !lock.spans_hosts() || topology.local_rank != 0) return std::nullopt;
  return control::LockRelay(words_of_host(control), *control.outside_lock_words(),
                            topology.host_index(), static_cast<int>(topology.host_names.size()));
}

Duration lock_patience(const RuntimeOptions& options) {
  Duration patience = std::chrono::seconds(1);
  for (const Duration limit : {options.stall_warning, options.stall_shutdown}) {
    if (limit > Duration::zero()) patience = std::min(patience, limit / 10);
  }
  return patience;
}

bool Engine::run_locked() {
  if (!lock_.locked()) return false;
  if (front_.shutdown_requested()) lock_.leave_soon();
  bool moved = false;
  while (lock_.locked()) {
    const control::ScheduleLock::Advance next = lock_.advance();
    if (next.ring) ring_others();
    if (next.outcome == control::ScheduleLock::Outcome::kNothing) break;
    moved = true;
    lock_moved_at_ = time_.step();
    if (next.outcome == control::ScheduleLock::Outcome::kLeft) {
      leave_lock();
      apply_deferred();
      continue;
    }
    const std::shared_ptr<Job>& job = locked_jobs_[next.batch];
    counters_.locked_operations.fetch_add(job->agreed().size(), std::memory_order_relaxed);
    executor_.start(job);
    locked_waiting_ -= job->agreed().size();
  }
  return moved;
}

/// @return whether the ranks of this host have something to do
bool Engine::relay_lock_news() {
  if (!relay_) return false;
  lock_news_.clear();
  const bool changed = relay_->advance(lock_news_);
  for (const auto& [host, news] : lock_news_)
    send(control_->topology().first_rank_on(host), wire::encode(news));
  if (changed) ring_others();
  return changed;
}

// Plans that were made by ranks of other hosts, which have left the lock before this one could know
// that.
void Engine::apply_deferred() {
  while (!lock_.locked() && !deferred_plans_.empty()) {
    const wire::Plan plan = std::move(deferred_plans_.front());
    deferred_plans_.pop_front();
    apply(plan);
  }
}

/// @return whether it now waits in its place of the schedule
bool Engine::offer(const OperationPtr& operation) {
  // A name is free again when its operation has ended. Unnamed operations of a kind share a place,
  // and the last one may still run there.
  const wire::Request& request = operation->request;
  if (request.unnamed && lock_.find(request, operation->place) &&
      locked_jobs_[operation->place.batch]->started) {
    lock_.leave_soon();
    return false;
  }
  if (!lock_.offer(operation->request, operation->place)) return false;
  locked_jobs_[operation->place.batch]->put(operation->place.index, operation);
  ++locked_waiting_;
  return true;
}

void Engine::enter_lock(std::vector<control::AgreedBatch> schedule) {
  HVD_LOG(kDebug) << "locked a schedule of " << schedule.size() << " batches";
  locked_jobs_.clear();
  for (const control::AgreedBatch& batch : schedule)
    locked_jobs_.push_back(executor_.prepare(batch));
  executor_.keep_buffers_for(locked_jobs_);
  lock_.enter(std::move(schedule));
  lock_moved_at_ = time_.step();
  for (const OperationPtr& operation : outstanding_in_order()) {
    if (offer(operation))
      outstanding_.take(operation->request.process_set, operation->request.name);
  }
}

// What has not run is negotiated as if it had been submitted just now.
void Engine::leave_lock() {
  HVD_LOG(kDebug) << "left the lock after " << lock_.batches_run() << " batches";
  if (coordinator_) coordinator_->note_lock_left(lock_.batches_run());
  const std::vector<OperationPtr> operations = outstanding_in_order();
  locked_jobs_.clear();
  locked_waiting_ = 0;
  for (const OperationPtr& operation : operations) {
    outstanding_.add(operation);
    const auto error = negotiator_.submit(operation->request);
    if (error)
      end_with(outstanding_.take(operation->request.process_set, operation->request.name), *error);
  }
}

// Those that wait for other ranks, not those that run.
std::vector<OperationPtr> Engine::outstanding_in_order() const {
  std::vector<OperationPtr> operations = outstanding_.in_order();
  for (const auto& job : locked_jobs_) {
    if (job->started) continue;
    for (const OperationPtr& operation : job->operations()) {
      if (operation) operations.push_back(operation);
    }
  }
  sort_by_order(operations);
  return operations;
}

void Engine::ring_others() noexcept {
  for (int rank = 0; rank < control_->size(); ++rank) {
    if (rank != control_->rank()) control_->ring(rank);
  }
}

// Another thread of the program might be about to submit what is missing; then a few steps are
// negotiated for nothing.
bool Engine::note_blocked() noexcept {
  if (!waits_for_others() || executor_.active()) return false;
  wait_noted_ = true;
  if (!lock_.lacks_own()) return false;
  lock_.leave_soon();
  return true;
}

bool Engine::watch_lock(TimePoint now) {
  if (!lock_.locked() || !waits_for_others() || now - lock_moved_at_ < lock_patience(options_))
    return false;
  lock_moved_at_ = now;
  if (lock_.lacks_own()) {
    lock_.leave_soon();
    return true;
  }
  lock_.ask_others_to_leave();
  ring_others();
  return false;
}

}  // namespace hvd::runtime
