#include "negotiation/negotiator.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"
#include "negotiation/fusion_planner.h"
#include "negotiation/process_set_table.h"
#include "negotiation/schedule_replay.h"
#include "negotiation/validator.h"

namespace hvd::control {
namespace {

// An idle rank acknowledges plans this often. See Note [Meaning of a slot] in response_cache.h.
constexpr std::uint64_t kPlansPerAcknowledgement = 256;

// An aggregator can read reports of ranks that are up to this many plans behind.
constexpr std::uint64_t kPlansToLookBack = 64;

}  // namespace

Negotiator::Negotiator(int rank, ProcessSetTable sets, std::size_t cache_capacity)
    : rank_(rank), sets_(std::move(sets)), cache_(cache_capacity) {}

// Checks the limits here, because a peer would refuse a message that exceeds them, which would end
// the job.
void Negotiator::check_submission(const wire::Request& request) const {
  if (!is_member(request)) {
    throw UsageError(
        text(describe(request), ": rank ", rank_, " is not in process set ", request.process_set));
  }
  if (request.name.size() > wire::kMaxNameBytes || request.group.size() > wire::kMaxNameBytes) {
    throw UsageError(
        text(describe(request), ": expected a name of at most ", wire::kMaxNameBytes, " bytes"));
  }
  if (request.shape.size() > wire::kMaxDims) {
    throw UsageError(text(describe(request), ": expected at most ", wire::kMaxDims,
                          " dimensions, got ", request.shape.size()));
  }
}

bool Negotiator::is_member(const wire::Request& request) const {
  return (request.by_members() || sets_.contains(request.process_set)) && position_in(request) >= 0;
}

int Negotiator::position_in(const wire::Request& request) const {
  if (!request.by_members()) return sets_.position(request.process_set, rank_);
  const auto found = std::ranges::lower_bound(request.new_set, rank_);
  return found != request.new_set.end() && *found == rank_
             ? static_cast<int>(found - request.new_set.begin())
             : -1;
}

std::optional<wire::ErrorEntry> Negotiator::submit(wire::Request request, std::uint64_t use) {
  check_submission(request);
  if (auto error = consume_failure(request)) return error;
  std::string key = tensor_key(request.process_set, request.name);
  const Awaited awaited{use, false, ends_all_replays(request)};
  if (!awaiting_.try_emplace(std::move(key), awaited).second) {
    throw Error(describe(request) + " was submitted while it is in flight");
  }
  unsent_.push_back(std::move(request));
  return std::nullopt;
}

std::optional<wire::ErrorEntry> Negotiator::consume_failure(const wire::Request& request) {
  if (failed_in_advance_.empty()) return std::nullopt;
  const auto found = failed_in_advance_.find(tensor_key(request.process_set, request.name));
  if (found == failed_in_advance_.end()) return std::nullopt;
  wire::ErrorEntry error = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) failed_in_advance_.erase(found);
  return error;
}

std::optional<wire::Report> Negotiator::next_report() {
  const bool leaving = shutdown_ && !shutdown_reported_;
  const bool acknowledge = last_applied_ - last_reported_ >= kPlansPerAcknowledgement;
  if (unsent_.empty() && !leaving && !acknowledge) return std::nullopt;
  last_reported_ = last_applied_;
  shutdown_reported_ = shutdown_;
  const RankSet this_rank(rank_);
  wire::Report report;
  report.applied = {{last_applied_, this_rank}};
  if (shutdown_) report.leaving = this_rank;
  if (shutdown_ && ended_) report.ended = this_rank;
  const std::uint64_t number = ++reports_;
  wire::Report::Group group{this_rank};
  wire::SlotSet hits;
  for (wire::Request& request : unsent_) {
    std::string key = tensor_key(request.process_set, request.name);
    awaiting_.at(key).sent = true;
    if (request.kind == OpKind::kJoin) join_ = std::move(key);
    const auto slot = cache_.find(request);
    if (!slot || !cache_.matches(*slot, request, position_in(request))) {
      ++in_full_;
      wire::StampedRequest& stamped = group.requests.emplace_back();
      stamped.stamp = wire::stamp_of_request(number, group.requests.size() - 1);
      if (wire::gathers(request.kind) && !request.shape.empty())
        stamped.first_dims = {{request.shape[0], 1}};
      stamped.request = std::move(request);
    } else if (request.unnamed) {
      ++by_bit_;
      group.unnamed_hits.push_back({wire::stamp_of_unnamed_hit(number, group.unnamed_hits.size()),
                                    {*slot, request.ordinal}});
    } else {
      ++by_bit_;
      hits.add(*slot);
    }
  }
  if (!hits.empty()) group.hits = {{number, std::move(hits)}};
  if (!unsent_.empty()) report.sections = {{last_applied_, {std::move(group)}}};
  unsent_.clear();
  return report;
}

Applied Negotiator::apply(const wire::Plan& plan) {
  if (plan.sequence != last_applied_ + 1) {
    throw Error(text("plan ", plan.sequence, " arrived; expected ", last_applied_ + 1));
  }
  Applied applied;
  applied.shutdown = plan.shutdown;
  was_joined_ = join_.has_value();
  // Errors come first, because the coordinator also decides them before it changes the cache.
  for (const auto& error : plan.errors) apply_error(error, applied);
  for (const auto& batch : plan.batches) apply_batch(batch, applied);
  if (!plan.replay.empty()) apply_replay(plan.replay, applied);
  last_applied_ = plan.sequence;
  if (last_applied_ > kPlansToLookBack) cache_.forget_before(last_applied_ - kPlansToLookBack);
  return applied;
}

void Negotiator::check_planned(const wire::Response& response,
                               const std::vector<int>& absent) const {
  const auto& [request, first_dims] = response;
  if (!request.by_members() && !sets_.contains(request.process_set)) {
    throw Error(text("a plan names process set ", request.process_set, ", which does not exist"));
  }
  const auto& members = request.by_members() ? request.new_set : sets_.ranks(request.process_set);
  if (const auto fault = find_fault(request, members, absent))
    throw Error("a plan runs an invalid operation: " + *fault);
  if (!wire::gathers(request.kind)) return;
  if (first_dims.size() != members.size()) {
    throw Error(text("a plan gives ", first_dims.size(), " sizes for ", describe(request),
                     ", expected ", members.size()));
  }
  if (gathered_bytes(request, first_dims) == kMaxBytes) {
    throw Error("a plan gives " + describe(request) + " more than 2^63 bytes");
  }
}

void Negotiator::apply_batch(const wire::Batch& batch, Applied& applied) {
  AgreedBatch agreed;
  agreed.absent = batch.absent;
  agreed.absent_here =
      std::find(batch.absent.begin(), batch.absent.end(), rank_) != batch.absent.end();
  for (const auto& tensor : batch.tensors) {
    const auto* const cached = std::get_if<wire::SlotUse>(&tensor);
    if (cached != nullptr && !cache_.holds(cached->slot)) {
      throw Error(text("a plan refers to cache slot ", cached->slot, ", which is empty"));
    }
    const wire::Response& response =
        cached != nullptr ? cache_.at(cached->slot) : std::get<wire::Response>(tensor);
    if (cached == nullptr) check_planned(response, batch.absent);
    const int process_set = response.request.process_set;
    if (cached != nullptr && !sets_.contains(process_set)) {
      throw Error(
          text("a plan runs an operation of process set ", process_set, ", which does not exist"));
    }
    const bool member = is_member(response.request);
    if (member) {
      if (!response.request.by_members()) agreed.members = sets_.members(process_set);
      agree(response, cached != nullptr ? cached->ordinal : response.request.ordinal, agreed);
    }
    // Ranks outside the set apply the change too, because all ranks must have the same numbers of
    // sets.
    apply_set_change(response.request, agreed, applied);
    if (member) {
      const wire::Request& operation = agreed.operations.back().request;
      if (agreed.operations.size() > 1 &&
          !may_share_batch(agreed.operations.front().request, operation)) {
        throw Error("a plan joins " + describe(agreed.operations.front().request) + " and " +
                    describe(operation) + " in one batch");
      }
    }
    if (cached != nullptr) {
      cache_.touch(cached->slot);
    } else {
      cache_.put(response, last_applied_ + 1);
    }
  }
  if (!agreed.operations.empty()) applied.batches.push_back(std::move(agreed));
}

// The coordinator also forgets the pending operations that are withdrawn here, and ignores them in
// reports from before this plan.
void Negotiator::apply_replay(const std::vector<wire::SlotBundle>& schedule, Applied& applied) {
  const int process_set = set_of(schedule);
  if (sets_.position(process_set, rank_) < 0) return;
  applied.replayed_set = process_set;
  std::set<std::uint32_t> seen;
  std::optional<std::uint32_t> repeated;
  bool all_in_sequence = true;
  for (const wire::SlotBundle& slots_of_batches : schedule) {
    if (slots_of_batches.empty()) throw Error("a plan replays an empty bundle");
    AgreedBundle& bundle = applied.replay.emplace_back();
    for (const auto& slots : slots_of_batches) {
      bundle.push_back(replayed_batch(slots, process_set));
      for (const std::uint32_t slot : slots) {
        all_in_sequence = all_in_sequence && cache_.at(slot).request.in_sequence;
        if (!seen.insert(slot).second) repeated = slot;
      }
    }
  }
  if (repeated && !all_in_sequence) {
    throw Error(text("a plan replays cache slot ", *repeated,
                     " twice, and not all of its operations are in sequence"));
  }
  withdraw(process_set);
}

// The process set of the schedule's operations.
int Negotiator::set_of(const std::vector<wire::SlotBundle>& schedule) const {
  if (schedule.front().empty()) throw Error("a plan replays an empty bundle");
  if (schedule.front().front().empty()) throw Error("a plan replays an empty batch");
  const std::uint32_t first = schedule.front().front().front();
  const int process_set = cache_.holds(first) ? cache_.at(first).request.process_set : -1;
  if (sets_.contains(process_set)) return process_set;
  throw Error(text("a plan replays cache slot ", first, ", which is empty or of no process set"));
}

void Negotiator::withdraw(int replayed_set) {
  std::erase_if(unsent_, [replayed_set](const wire::Request& request) {
    return withdrawn_by_replay(request, replayed_set);
  });
  const std::string prefix = text(replayed_set, '/');
  std::erase_if(awaiting_, [&](const auto& entry) {
    return replayed_set == 0 || entry.second.ends_replays || entry.first.starts_with(prefix);
  });
  join_.reset();
  shutdown_reported_ = false;
}

AgreedBatch Negotiator::replayed_batch(const std::vector<std::uint32_t>& slots,
                                       int process_set) const {
  if (slots.empty()) throw Error("a plan replays an empty batch");
  AgreedBatch batch;
  batch.members = sets_.members(process_set);
  for (const std::uint32_t slot : slots) {
    if (!cache_.holds(slot) || cache_.at(slot).request.process_set != process_set) {
      throw Error(
          text("a plan replays cache slot ", slot, ", which is empty or of another process set"));
    }
    wire::Response operation{cache_.expand(slot, 0, sets_.position(process_set, rank_)),
                             cache_.at(slot).first_dims};
    if (!batch.operations.empty() &&
        !may_share_batch(batch.operations.front().request, operation.request)) {
      throw Error("a plan replays " + describe(batch.operations.front().request) + " and " +
                  describe(operation.request) + " in one batch");
    }
    batch.operations.push_back(std::move(operation));
  }
  return batch;
}

/// Adds the operation to the batch; this rank no longer waits for it.
void Negotiator::agree(const wire::Response& response, std::uint64_t ordinal, AgreedBatch& agreed) {
  const int process_set = response.request.process_set;
  wire::Response operation{ResponseCache::expand(response, ordinal, position_in(response.request)),
                           response.first_dims};
  const auto found = awaiting_.find(tensor_key(process_set, operation.request.name));
  if (agreed.absent_here) {
    if (!was_joined_ || found != awaiting_.end()) {
      throw Error(text("a plan counts rank ", rank_, " as absent from ",
                       describe(operation.request), ", but it is not"));
    }
    return agreed.operations.push_back(std::move(operation));
  }
  if (found == awaiting_.end() || !found->second.sent) {
    throw Error("a plan runs " + describe(operation.request) +
                ", which this rank has not submitted");
  }
  agreed.uses.push_back(found->second.use);
  agreed.operations.push_back(std::move(operation));
  awaiting_.erase(found);
}

// Applies an operation that changes the process sets or ends a join.
void Negotiator::apply_set_change(const wire::Request& request, AgreedBatch& agreed,
                                  Applied& applied) {
  if (request.kind == OpKind::kJoin) {
    agreed.result = request.last_to_join;
    join_.reset();
  } else if (request.kind == OpKind::kAddProcessSet) {
    const int added = sets_.add(request.new_set, request.by_members());
    agreed.result = added;
    agreed.members = request.by_members() ? sets_.members(added) : agreed.members;
    applied.sets_changed = true;
  } else if (request.kind == OpKind::kRemoveProcessSet) {
    end_set(request.removed_set, applied);
  }
}

void Negotiator::end_set(int process_set, Applied& applied) {
  if (process_set == 0 || !sets_.contains(process_set)) {
    throw Error(text("a plan removes process set ", process_set, ", which cannot be removed"));
  }
  const std::string prefix = text(process_set, '/');
  for (auto found = awaiting_.begin(); found != awaiting_.end();) {
    if (!found->first.starts_with(prefix)) {
      ++found;
      continue;
    }
    FailedUse error;
    error.use = found->second.use;
    error.process_set = process_set;
    error.name = found->first.substr(prefix.size());
    error.code = StatusCode::kUsage;
    error.message = text("'", error.name, "': process set ", process_set,
                         " was removed before every member had submitted it");
    forget_unsent(process_set, error.name);
    applied.errors.push_back(std::move(error));
    found = awaiting_.erase(found);
  }
  std::erase_if(failed_in_advance_,
                [&](const auto& entry) { return entry.first.starts_with(prefix); });
  sets_.remove(process_set);
  applied.sets_changed = true;
  applied.sets_removed.push_back(process_set);
}

void Negotiator::forget_unsent(int process_set, const std::string& name) {
  std::erase_if(unsent_, [&](const wire::Request& request) {
    return request.process_set == process_set && request.name == name;
  });
}

void Negotiator::apply_error(const wire::ErrorEntry& error, Applied& applied) {
  const bool by_members = error.process_set == wire::kOwnMembers;
  if (!by_members &&
      (!sets_.contains(error.process_set) || sets_.position(error.process_set, rank_) < 0))
    return;
  const std::string key = tensor_key(error.process_set, error.name);
  const bool missing =
      std::find(error.missing.begin(), error.missing.end(), rank_) != error.missing.end();
  const auto found = awaiting_.find(key);
  if (found == awaiting_.end()) {
    // The error concerns only members that have not joined. The error of an add_process_set by its
    // members does not list the members: a rank that has not submitted it and is not missing is
    // outside of the set.
    if (!missing && (was_joined_ || by_members)) return;
    if (!missing)
      throw Error("a plan ends '" + error.name +
                  "', which this rank has not submitted: " + error.message);
    failed_in_advance_[key].push_back(error);
    return;
  }
  const auto [use, sent, ends_replays] = found->second;
  if (!sent && !missing) {
    throw Error(text("a plan counts rank ", rank_, " among those that submitted '", error.name,
                     "', but it has not: ", error.message));
  }
  // A submission that was not reported yet must not be reported any more. If it was reported, the
  // coordinator treats it as a part of the failed use.
  if (!sent) forget_unsent(error.process_set, error.name);
  if (join_ == key) join_.reset();
  awaiting_.erase(found);
  applied.errors.push_back({error, use});
}

}  // namespace hvd::control
