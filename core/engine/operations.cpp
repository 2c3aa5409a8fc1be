#include "engine/operations.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <variant>

#include "base/expect.h"
#include "base/log.h"
#include "base/process_exit.h"
#include "base/text.h"
#include "engine/submission_check.h"
#include "hvd/error.h"
#include "negotiation/mailboxes.h"
#include "negotiation/validator.h"

namespace hvd::runtime {

void retain(OperationState* state, std::uint64_t unit) noexcept {
  state->holders_.fetch_add(unit, std::memory_order_relaxed);
}

void release(OperationState* state, std::uint64_t unit) noexcept {
  if (state->holders_.fetch_sub(unit, std::memory_order_acq_rel) == unit) delete state;
}

std::string describe(const MessageSide& side) {
  const std::string peer = side.peer == control::kAnyRank ? "any rank" : text("rank ", side.peer);
  return text(side.sends() ? "send (" : "recv (", describe(side.key),
              side.sends() ? ") to " : ") from ", peer);
}

OperationState::OperationState(const Message& what, std::weak_ptr<Runtime> owner, TimePoint now)
    : message(new MessageSide{what.direction,
                              what.peer,
                              {what.process_set, what.name, what.name.empty() ? what.tag : 0}}),
      submitted(now),
      runtime_(std::move(owner)) {
  (message->sends() ? submission.input : submission.output) = what.tensor;
  submission.input_ready = what.input_ready;
  submission.keep_alive = what.keep_alive;
  if (what.on_done)
    submission.on_done = [done = what.on_done](const Status& status, const EventPtr&) {
      done(status);
    };
}

std::string OperationState::title() const {
  return message ? runtime::describe(*message) : control::describe(request);
}

void OperationState::begin_again(const Submission& what, TimePoint now, std::uint64_t kept) {
  HVD_EXPECT(over(kept), "no other handle refers to the last use");
  submission.input.data = what.input.data;
  submission.output.data = what.output.data;
  submission.parts = what.parts;
  submission.allocate_output = what.allocate_output;
  submission.input_ready = what.input_ready;
  submission.keep_alive = what.keep_alive;
  submission.on_done = what.on_done;
  submitted = now;
  output_ready_.reset();
  result_ = -1;
  done_.store(false, std::memory_order_relaxed);
}

namespace {

// Which overlap is allowed depends on the output's offset from the input (see check_overlap() in
// submission_check.cpp), so an overlap with the same offset as before is allowed.
bool overlaps_otherwise(const Submission& what, const Submission& before) noexcept {
  const auto begin = [](const TensorView& view) {
    return reinterpret_cast<std::uintptr_t>(view.data);
  };
  const std::uintptr_t input = begin(what.input);
  const std::uintptr_t output = begin(what.output);
  if (output >= input + what.input.bytes() || input >= output + what.output.bytes()) return false;
  return output - input != begin(before.output) - begin(before.input);
}

}  // namespace

bool parts_fit(const Submission& submission) noexcept {
  std::int64_t end = 0;
  for (const TensorPart& part : submission.parts) {
    if (part.first < end || part.count < 0) return false;
    if (part.count > submission.input.count - part.first) return false;
    if (part.count > 0 && part.data == nullptr) return false;
    end = part.first + part.count;
  }
  return true;
}

bool is_same_operation(const Submission& what, const Submission& before,
                       const wire::Request& request) noexcept {
  const bool in_parts = !what.parts.empty();
  const auto alike = [in_parts](const TensorView& a, const TensorView& b) {
    return a.count == b.count && a.dtype == b.dtype && a.device == b.device &&
           (a.count == 0 || (a.data == nullptr) == in_parts) && a.shape == b.shape;
  };
  return what.name == request.name && what.parameters == before.parameters &&
         alike(what.input, before.input) &&
         // For gathering kinds `before.output` is allocated later.
         (wire::gathers(request.kind) ? what.allocate_output != nullptr
                                      : alike(what.output, before.output)) &&
         what.process_set == 0 && before.process_set == 0 && what.group == before.group &&
         what.group_size == before.group_size && what.group_index == before.group_index &&
         what.alone == before.alone && !std::holds_alternative<Alltoall>(what.parameters) &&
         !wire::only_agrees(request.kind) && !overlaps_otherwise(what, before) &&
         in_parts == (request.group_size != before.group_size) && parts_fit(what);
}

void OperationState::call_back(const Status& status, const EventPtr& output_ready) {
  if (!calls_back()) return;
  const auto on_done = std::exchange(submission.on_done, nullptr);
  submission.allocate_output = nullptr;
  if (!on_done) return;
  try {
    on_done(status, output_ready);
  } catch (const std::exception& error) {
    // Callbacks must not throw. The operation's own status does not change.
    HVD_LOG(kError) << "the completion callback of "
                    << (message ? title() : text("'", request.name, "'"))
                    << " threw: " << error.what();
  }
}

void OperationState::finish(const Status& status, const EventPtr& output_ready) {
  status_ = status;
  output_ready_ = output_ready;
  call_back(status, output_ready);
  submission.parts = {};
  submission.keep_alive.reset();
  submission.input_ready.reset();
  done_.store(true, std::memory_order_release);
}

void OperationState::finish_in_flight(const Status& status) {
  keep_until_exit(std::move(submission.keep_alive));
  finish(status, nullptr);
}

SubmissionQueue::~SubmissionQueue() {
  for (OperationState* last = newest_.load(); last != nullptr;)
    last = OperationPtr::adopt(last)->queued_before;
}

void SubmissionQueue::enqueue(std::span<OperationPtr> operations) noexcept {
  OperationState* first = nullptr;
  OperationState* last = nullptr;
  for (OperationPtr& operation : operations) {
    if (!operation) continue;
    operation->queued_before = last;
    last = operation.detach();
    if (first == nullptr) first = last;
  }
  if (first == nullptr) return;
  OperationState* before = newest_.load(std::memory_order_relaxed);
  do {
    first->queued_before = before;
  } while (!newest_.compare_exchange_weak(before, last, std::memory_order_acq_rel));
}

std::vector<OperationPtr> SubmissionQueue::queued() const {
  std::vector<OperationPtr> operations;
  for (OperationState* one = newest_.load(std::memory_order_acquire); one != nullptr;
       one = one->queued_before)
    operations.emplace_back(one);
  std::ranges::reverse(operations);
  return operations;
}

// Other threads only add operations at the front, so the list is unchanged as long as its newest
// operation is the same.
void SubmissionQueue::pop_all(std::vector<OperationPtr>& operations, Callbacks callbacks) {
  OperationState* newest = newest_.load(std::memory_order_acquire);
  do {
    std::size_t queued = 0;
    for (const OperationState* one = newest; one != nullptr; one = one->queued_before) {
      if (callbacks == Callbacks::kNone && one->calls_back()) return;
      ++queued;
    }
    operations.reserve(queued);
  } while (!newest_.compare_exchange_weak(newest, nullptr, std::memory_order_acq_rel));
  for (OperationState* one = newest; one != nullptr; one = one->queued_before)
    operations.push_back(OperationPtr::adopt(one));
  std::ranges::reverse(operations);
}

void SubmissionQueue::request_description(std::shared_ptr<WaitDescription> description) {
  const MutexLock lock(mutex_);
  descriptions_.push_back(std::move(description));
  has_description_requests_.store(true, std::memory_order_release);
}

std::vector<std::shared_ptr<WaitDescription>> SubmissionQueue::pop_description_requests() {
  const MutexLock lock(mutex_);
  has_description_requests_.store(false, std::memory_order_relaxed);
  return std::exchange(descriptions_, {});
}

void SubmissionQueue::fail_from_outside(Status cause) {
  const MutexLock lock(mutex_);
  if (!outside_failure_) outside_failure_ = std::move(cause);
  has_outside_failure_.store(true, std::memory_order_release);
}

std::optional<Status> SubmissionQueue::outside_failure() const {
  if (!has_outside_failure_.load(std::memory_order_acquire)) return std::nullopt;
  const MutexLock lock(mutex_);
  return outside_failure_;
}

void SubmissionQueue::set_failed(const Status& cause) {
  {
    const MutexLock lock(mutex_);
    failure_ = cause;
  }
  failed_.store(true, std::memory_order_release);
}

Status SubmissionQueue::failure() const {
  HVD_EXPECT(failed(), "the engine has failed");
  const MutexLock lock(mutex_);
  return failure_;
}

void SubmissionQueue::set_process_sets(control::ProcessSetTable sets) {
  auto copy = std::make_shared<const control::ProcessSetTable>(std::move(sets));
  const MutexLock lock(mutex_);
  sets_ = std::move(copy);
}

std::shared_ptr<const control::ProcessSetTable> SubmissionQueue::process_sets() const {
  const MutexLock lock(mutex_);
  return sets_;
}

namespace {

/// Limit of the names that are kept, above the number of a model's parameters. A program that uses
/// a new name for every operation would otherwise fill the memory, so beyond this limit the least
/// recently used names are forgotten.
constexpr std::size_t kMaxRemembered = 1 << 14;

bool is_reusable(const wire::Request& request) noexcept {
  return !request.unnamed && request.process_set == 0;
}

// After each join the numbers of unnamed operations start at a multiple of this, so that no number
// is in use twice.
constexpr std::uint64_t kOrdinalsPerJoin = 1'000'000'000;

}  // namespace

void OperationTable::check_running() const {
  if (queue_.failed()) queue_.failure().raise_if_error();
  if (queue_.shutdown_requested())
    throw ShutdownError("hvd is shutting down on this rank; submit before shutdown()");
}

void OperationTable::submit(std::span<const Submission> submissions, std::span<Operation> handles,
                            const std::weak_ptr<Runtime>& owner, TimePoint now) {
  const auto is_last_use = [](const Operation& handle, const Submission& submission) {
    return handle.valid() && !submission.name.empty() &&
           handle.state_->request.name == submission.name;
  };
  for (std::size_t i = 0; i < handles.size(); ++i) {
    if (!is_last_use(handles[i], submissions[i])) handles[i] = {};
  }
  const MutexLock lock(mutex_);
  try {
    check_running();
    claimed_.clear();
    for (std::size_t i = 0; i < submissions.size(); ++i)
      claimed_.push_back(claim(submissions[i], handles[i], owner, now));
    check_unnamed_groups(submissions, rank_);
  } catch (...) {
    roll_back();
    std::ranges::fill(handles, Operation());
    throw;
  }
  enqueue_claimed(handles);
}

void OperationTable::submit(std::span<const Message> messages, std::span<Operation> handles,
                            const std::weak_ptr<Runtime>& owner, TimePoint now) {
  const MutexLock lock(mutex_);
  check_running();
  const auto sets = queue_.process_sets();
  std::vector<OperationPtr> accepted;
  for (const Message& message : messages) {
    const OperationPtr& made = accepted.emplace_back(new OperationState(message, owner, now));
    check_message(message, made->title(), *sets, rank_, gpu_);
    check_not_joined(made->title());
    made->in_flight.store(true, std::memory_order_relaxed);
  }
  claimed_ = std::move(accepted);
  enqueue_claimed(handles);
}

// Queues the operations of claimed_.
void OperationTable::enqueue_claimed(std::span<Operation> handles) {
  for (std::size_t i = 0; i < claimed_.size(); ++i) {
    if (claimed_[i]->calls_back()) callbacks_.fetch_add(1, std::memory_order_relaxed);
    if (handles[i].state_.get() != claimed_[i].get()) handles[i] = Operation(claimed_[i].get());
  }
  // Still under the lock, so that operations enter the engine in the order of their numbers.
  queue_.enqueue(claimed_);
  claimed_.clear();
}

void OperationTable::check_not_joined(const std::string& title) const {
  if (!joined_) return;
  throw UsageError(
      text(title, " on rank ", rank_,
           ": this rank has called join(), so it has no more data until join() returns"));
}

OperationPtr OperationTable::claim(const Submission& submission, const Operation& handle,
                                   const std::weak_ptr<Runtime>& owner, TimePoint now) {
  if (joined_) check_not_joined(text(submission.kind(), " '", submission.name, "'"));
  if (OperationPtr again = claim_again(submission, handle, now)) return again;
  OperationPtr made(new OperationState(submission, number(submission), owner, now));
  const wire::Request& request = made->request;
  if (request.by_members() && sets_being_made_.contains(submission.name)) {
    throw UsageError(text(control::describe(request), " on rank ", rank_,
                          ": this rank is making another process set of the same name; wait for "
                          "it, or give sets that are made at the same time different names"));
  }
  if (is_reusable(request)) forget_unused();
  const Key key{request.process_set, request.name};
  const auto [known, is_new] = operations_.try_emplace(key, made);
  if (!is_new) {
    if (known->second->in_flight.load(std::memory_order_acquire)) {
      if (request.unnamed) --next_ordinal(request);
      throw UsageError(text(control::describe(request), " on rank ", rank_,
                            ": this name is already in flight; wait for its last use, or give each "
                            "operation its own name"));
    }
    unlink(*known->second);  // its parameters differ, or a handle still refers to it
    operations_.erase(known);
    operations_.emplace(key, made);
  }
  if (is_reusable(request)) link(*made);
  if (request.by_members()) sets_being_made_.insert(submission.name);
  made->in_flight.store(true, std::memory_order_relaxed);
  joined_ = request.kind == OpKind::kJoin;
  return made;
}

// An operation that was submitted before with the same parameters needs neither checks nor memory.
// A handle of the caller to its last use counts as released.
OperationPtr OperationTable::claim_again(const Submission& submission, const Operation& handle,
                                         TimePoint now) {
  if (submission.process_set != 0 || submission.name.empty()) return {};
  const auto known = operations_.find(Key{0, submission.name});
  if (known == operations_.end()) return {};
  OperationState& last = *known->second;
  const std::uint64_t kept = handle.state_.get() == &last ? kHandle : 0;
  if (last.in_flight.load(std::memory_order_acquire) || !last.over(kept)) return {};
  if (!is_same_operation(submission, last.submission, last.request)) return {};
  if (last_used_ != &last) {
    unlink(last);
    link(last);
  }
  last.in_flight.store(true, std::memory_order_relaxed);
  last.begin_again(submission, now, kept);
  return known->second;
}

std::uint64_t& OperationTable::next_ordinal(const wire::Request& request) {
  return ordinals_[{request.process_set,
                    request.in_sequence ? std::nullopt : std::optional(request.kind)}];
}

wire::Request OperationTable::number(const Submission& submission) {
  wire::Request request = make_request(submission, *queue_.process_sets(), rank_, gpu_);
  if (request.unnamed) {
    request.ordinal = joins_ * kOrdinalsPerJoin + next_ordinal(request)++;
    request.name = wire::unnamed_name(request, request.ordinal);
  }
  return request;
}

// No request was sent, so the names and the numbers of these operations are free again.
void OperationTable::roll_back() {
  for (const OperationPtr& operation : claimed_) {
    const wire::Request& request = operation->request;
    if (request.unnamed) --next_ordinal(request);
    if (request.kind == OpKind::kJoin) joined_ = false;
    if (request.by_members()) sets_being_made_.erase(operation->submission.name);
    operation->in_flight.store(false, std::memory_order_relaxed);
    if (is_reusable(request)) unlink(*operation);
    forget(request);
  }
  claimed_.clear();
}

// An ordinary operation stays in the table: the next submit() of its name reuses it, and takes the
// lock anyway.
void OperationTable::release(OperationState& operation) {
  if (!operation.in_flight.load(std::memory_order_relaxed)) return;
  const wire::Request& request = operation.request;
  if (operation.calls_back()) callbacks_.fetch_sub(1, std::memory_order_relaxed);
  const bool ordinary = !operation.message && is_reusable(request);
  if (ordinary && request.kind != OpKind::kJoin)
    return operation.in_flight.store(false, std::memory_order_release);
  const MutexLock lock(mutex_);
  operation.in_flight.store(false, std::memory_order_release);
  if (request.by_members()) sets_being_made_.erase(operation.submission.name);
  if (operation.message) return;
  if (!ordinary) forget(request);
  if (request.kind != OpKind::kJoin) return;
  joined_ = false;
  if (operation.result() < 0) return;
  // The ranks may have made different numbers of unnamed calls, and no such call is in flight, so
  // all ranks restart their counts here.
  ++joins_;
  ordinals_.clear();
}

void OperationTable::forget(const wire::Request& request) {
  operations_.erase(Key{request.process_set, request.name});
}

// Checks only a few operations per call, because all of them may be in flight.
void OperationTable::forget_unused() {
  constexpr int kChecks = 2;
  OperationState* oldest = first_used_;
  for (int check = 0; check < kChecks && operations_.size() >= kMaxRemembered; ++check) {
    if (oldest == nullptr) return;
    OperationState& one = *oldest;
    oldest = one.used_after;
    unlink(one);
    one.in_flight.load(std::memory_order_acquire) ? link(one) : forget(one.request);
  }
}

void OperationTable::link(OperationState& operation) {
  operation.used_before = last_used_;
  (last_used_ != nullptr ? last_used_->used_after : first_used_) = &operation;
  last_used_ = &operation;
}

void OperationTable::unlink(OperationState& operation) {
  OperationState* const before = std::exchange(operation.used_before, nullptr);
  OperationState* const after = std::exchange(operation.used_after, nullptr);
  (before != nullptr ? before->used_after : first_used_) = after;
  (after != nullptr ? after->used_before : last_used_) = before;
}

}  // namespace hvd::runtime
