#include "engine/operation_table.h"

#include <string>
#include <utility>

#include "engine/submission_check.h"
#include "hvd/error.h"
#include "negotiation/validator.h"

namespace hvd::runtime {
namespace {

/// More names than a model has parameters. A program that makes up a new name for every operation
/// would fill the memory: beyond this number the least recently used are forgotten.
constexpr std::size_t kMostRemembered = 1 << 14;

// Unnamed operations are numbered from a multiple of this after each join, so that no number is in
// use twice.
constexpr std::uint64_t kOrdinalsPerJoin = 1'000'000'000;

}  // namespace

void OperationTable::check_running() const {
  if (front_.failed()) front_.failure().raise_if_error();
  if (front_.shutdown_requested())
    throw ShutdownError("hvd is shutting down on this rank; submit before shutdown()");
}

void OperationTable::submit(std::span<const Submission> submissions, std::span<Operation> handles,
                            const std::weak_ptr<Runtime>& owner, TimePoint now) {
  const MutexLock lock(mutex_);
  check_running();
  claimed_.clear();
  try {
    for (const Submission& submission : submissions)
      claimed_.push_back(claim(submission, owner, now));
    check_unnamed_groups(submissions, rank_);
  } catch (...) {
    take_back();
    throw;
  }
  for (std::size_t i = 0; i < claimed_.size(); ++i) {
    if (claimed_[i]->calls_back()) callbacks_.fetch_add(1, std::memory_order_relaxed);
    handles[i] = Operation(claimed_[i].get());
  }
  // Under the lock, so that operations enter the engine in the order of their numbers.
  front_.enqueue(claimed_);
  claimed_.clear();
}

OperationPtr OperationTable::claim(const Submission& submission,
                                   const std::weak_ptr<Runtime>& owner, TimePoint now) {
  if (joined_) {
    throw UsageError(std::string(to_string(submission.kind())) + " '" + submission.name +
                     "' on rank " + std::to_string(rank_) +
                     ": this rank has called join(), so it has no more data until join() returns");
  }
  if (OperationPtr again = claim_again(submission, now)) return again;
  OperationPtr made(new OperationState(submission, number(submission), owner, now));
  const wire::Request& request = made->request;
  const Key key{request.process_set, request.name};
  const auto known = operations_.find(key);
  if (known != operations_.end()) {
    if (known->second->in_flight) {
      if (request.unnamed) --ordinals_[{request.process_set, request.kind}];
      throw UsageError(control::describe(request) + " on rank " + std::to_string(rank_) +
                       ": this name is already in flight; wait for its last use, or give each "
                       "operation its own name");
    }
    unlink(*known->second);  // it may not be used again, or asks for something else
    operations_.erase(known);
  }
  operations_.emplace(key, made);
  made->in_flight = true;
  joined_ = request.kind == OpKind::kJoin;
  return made;
}

// What has been submitted before, with the same parameters, needs neither checks nor memory.
OperationPtr OperationTable::claim_again(const Submission& submission, TimePoint now) {
  if (submission.process_set != 0 || submission.name.empty()) return {};
  const auto known = operations_.find(Key{0, submission.name});
  if (known == operations_.end()) return {};
  OperationState& last = *known->second;
  if (last.in_flight || !last.over()) return {};
  if (!asks_for_the_same(submission, last.submission, last.request)) return {};
  unlink(last);
  last.in_flight = true;
  last.begin_again(submission, now);
  return known->second;
}

wire::Request OperationTable::number(const Submission& submission) {
  wire::Request request = make_request(submission, *front_.process_sets(), rank_, gpu_);
  if (request.unnamed) {
    request.ordinal = joins_ * kOrdinalsPerJoin + ordinals_[{request.process_set, request.kind}]++;
    request.name = wire::unnamed_name(request.kind, request.ordinal);
  }
  return request;
}

// Nothing was sent, so the names are free, and the next unnamed operations take the numbers.
void OperationTable::take_back() {
  for (const OperationPtr& operation : claimed_) {
    const wire::Request& request = operation->request;
    if (request.unnamed) --ordinals_[{request.process_set, request.kind}];
    if (request.kind == OpKind::kJoin) joined_ = false;
    operation->in_flight = false;
    forget(request);
  }
  claimed_.clear();
}

void OperationTable::release(OperationState& operation) {
  const MutexLock lock(mutex_);
  if (!operation.in_flight) return;
  const wire::Request& request = operation.request;
  if (operation.calls_back()) callbacks_.fetch_sub(1, std::memory_order_relaxed);
  operation.in_flight = false;
  const bool may_come_again = !request.unnamed && request.process_set == 0;
  may_come_again ? remember(operation) : forget(request);
  if (request.kind != OpKind::kJoin) return;
  joined_ = false;
  if (operation.result() < 0) return;
  // The ranks have made different numbers of unnamed calls, and none is in flight: all start again.
  ++joins_;
  ordinals_.clear();
}

void OperationTable::forget(const wire::Request& request) {
  const auto known = operations_.find(Key{request.process_set, request.name});
  if (known != operations_.end()) operations_.erase(known);
}

void OperationTable::remember(OperationState& operation) {
  operation.released_before = last_released_;
  (last_released_ != nullptr ? last_released_->released_after : first_released_) = &operation;
  last_released_ = &operation;
  if (operations_.size() <= kMostRemembered) return;
  OperationState& oldest = *first_released_;
  unlink(oldest);
  forget(oldest.request);
}

void OperationTable::unlink(OperationState& operation) {
  OperationState* const before = std::exchange(operation.released_before, nullptr);
  OperationState* const after = std::exchange(operation.released_after, nullptr);
  (before != nullptr ? before->released_after : first_released_) = after;
  (after != nullptr ? after->released_before : last_released_) = before;
}

}  // namespace hvd::runtime
