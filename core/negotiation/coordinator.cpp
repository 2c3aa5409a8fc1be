#include "negotiation/coordinator.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "base/expect.h"
#include "base/text.h"
#include "hvd/error.h"
#include "negotiation/aggregator.h"
#include "negotiation/fusion_planner.h"
#include "negotiation/set_disagreement.h"
#include "negotiation/validator.h"

namespace hvd::control {

Coordinator::Coordinator(CoordinatorOptions options, ProcessSetTable sets)
    : options_(std::move(options)),
      ranks_(options_.host_of_rank.size()),
      sets_(std::move(sets)),
      table_(sets_),
      cache_(options_.cache_capacity),
      stalls_(options_.stall, options_.host_of_rank),
      replays_(options_.replays_sets),
      progress_(options_.host_of_rank.size()),
      departures_(options_.host_of_rank.size()),
      blocked_(options_.host_of_rank.size(), options_.stall.deadlock) {}

void Coordinator::accept(const wire::Report& report, TimePoint now) {
  check(report);
  flush_shortcut(now);
  if (accept_by_shortcut(report)) return blocked_.record_change(now);
  for (const auto& section : report.sections) {
    // The ranks withdraw it when they apply the replay's plan: see ScheduleReplay.
    if (section.as_of < replays_.last_of_all_ranks()) continue;
    blocked_.record_change(now);
    // Joins come last, because the requests that a rank made before its join may be anywhere in the
    // section.
    for (const bool joins : {false, true}) {
      for (const auto& group : section.groups)
        accept_group(group, {group.ranks, section.as_of, now}, joins);
    }
    record_activity(section, now);
  }
  // This must follow the requests, because the ranks may have made them before they applied these
  // plans.
  for (const auto& applied : report.applied) record_applied(applied.ranks, applied.last_applied);
  if (table_.anyone_joined()) table_.restart_join_clock(now);
  const RankSet leaving = replays_.leaving(report, sets_);
  if (leaving.empty()) return;
  blocked_.record_change(now);
  departures_.add(leaving);
  departures_.add_ended(intersection(report.ended, leaving));
}

void Coordinator::check(const wire::Report& report) const {
  const RankRange world{0, static_cast<int>(ranks_) - 1};
  const auto check_ranks = [&](const RankSet& ranks) {
    if (contains({&world, 1}, ranks)) return;
    throw Error(text("a report names rank ", ranks.highest(), ", which does not exist"));
  };
  check_ranks(report.leaving);
  for (const auto& applied : report.applied) {
    check_ranks(applied.ranks);
    progress_.check(applied.ranks, applied.last_applied, sequence_);
  }
  for (const auto& section : report.sections) {
    if (section.as_of > sequence_) {
      throw Error(text("a report refers to plan ", section.as_of, "; the last is ", sequence_));
    }
    for (const auto& group : section.groups) check_ranks(group.ranks);
  }
}

void Coordinator::accept_group(const wire::Report::Group& group, const Source& source, bool joins) {
  if (!joins) {
    for (const auto& hits : group.hits) {
      hits.slots.for_each([&](std::uint32_t slot) {
        accept_hit(source, slot, 0, wire::stamp_of_hit(hits.report_number, slot));
      });
    }
    for (const auto& unnamed : group.unnamed_hits)
      accept_hit(source, unnamed.hit.slot, unnamed.hit.ordinal, unnamed.stamp);
  }
  for (const auto& stamped : group.requests) {
    if ((stamped.request.kind == OpKind::kJoin) != joins) continue;
    accept_request(source, {source.ranks, stamped.stamp, stamped.first_dims}, stamped.request);
  }
}

// Records, for each rank, one of the operations that it requests in a section. If groups overlap,
// the first one in the message counts.
void Coordinator::record_activity(const wire::Report::Section& section, TimePoint now) {
  RankSet recorded;
  for (const auto& group : section.groups) {
    const RankSet ranks = difference(group.ranks, recorded);
    if (ranks.empty()) continue;
    recorded.add(ranks);
    const Source source{ranks, section.as_of, now};
    if (!group.requests.empty()) {
      stalls_.record_activity(ranks, group.requests.back().request.name, now);
    } else if (!group.unnamed_hits.empty()) {
      const wire::SlotUse& hit = group.unnamed_hits.back().hit;
      const wire::Request& alike = slot_as_seen(source, hit.slot).request;
      stalls_.record_activity(ranks, wire::unnamed_name(alike, hit.ordinal), now);
    } else if (!group.hits.empty()) {
      stalls_.record_activity(
          ranks, slot_as_seen(source, group.hits.back().slots.highest()).request.name, now);
    }
  }
}

void Coordinator::record_applied(RankSpan ranks, std::uint64_t sequence) {
  failed_uses_.record_applied(ranks, sequence);
  if (progress_.record(ranks, sequence)) cache_.forget_before(progress_.applied_by_all());
}

// The response of the slot as of these ranks' last plan: the current one, or one that was displaced
// since.
const wire::Response& Coordinator::slot_as_seen(const Source& source, std::uint32_t slot) const {
  const wire::Response* const held = cache_.find(slot, source.as_of);
  if (held != nullptr) return *held;
  throw Error(text("rank ", source.ranks.front().first, " refers to cache slot ", slot,
                   ", which is empty"));
}

void Coordinator::accept_hit(const Source& source, std::uint32_t slot, std::uint64_t ordinal,
                             wire::Stamp stamp) {
  const wire::Response& held = slot_as_seen(source, slot);
  const bool current = cache_.holds(slot) && &held == &cache_.at(slot);
  const int process_set = held.request.process_set;
  if (sets_.was_removed(process_set) ||
      replays_.withdrawn(held.request, source.ranks, source.as_of, sets_))
    return;
  Submitters submitters{source.ranks, stamp, {}, &held.first_dims};
  if (current) submitters.slot = slot;
  if (current && failed_uses_.empty() && table_.add_hit(submitters)) return;
  const int lowest = source.ranks.front().first;
  const int position = sets_.contains(process_set) ? sets_.position(process_set, lowest) : -1;
  if (position < 0 || !contains(sets_.rank_set(process_set), source.ranks)) {
    throw Error(
        text("rank ", lowest, " refers to cache slot ", slot, " of a process set it is not in"));
  }
  accept_request(source, submitters, ResponseCache::expand(held, ordinal, position));
}

void Coordinator::accept_request(const Source& source, Submitters submitters,
                                 wire::Request request) {
  // The ranks had not applied the removal yet, and end the operation themselves when they do.
  if (sets_.was_removed(request.process_set) ||
      replays_.withdrawn(request, source.ranks, source.as_of, sets_))
    return;
  RankSet fresh;
  std::vector<wire::DimRun> dims;
  if (const RankSet stale = failed_uses_.find(request, source.ranks, source.as_of);
      !stale.empty()) {
    fresh = difference(source.ranks, stale);
    if (fresh.empty()) return;
    // Keeps the first dimensions of the other ranks, rank by rank. This is rare.
    if (!submitters.first_dims.empty()) {
      std::vector<std::int64_t> each;
      for (const auto& run : submitters.first_dims)
        each.insert(each.end(), static_cast<std::size_t>(run.ranks), run.dim);
      std::size_t next = 0;
      for_each_rank(source.ranks, [&](int rank) {
        if (contains(fresh, rank)) dims.push_back({each[next], 1});
        ++next;
      });
      request.shape[0] = dims.front().dim;
      submitters.first_dims = dims;
    } else if (submitters.first_dims_of_members != nullptr && wire::gathers(request.kind)) {
      const int position = sets_.position(request.process_set, fresh.lowest());
      request.shape[0] = (*submitters.first_dims_of_members)[static_cast<std::size_t>(position)];
    }
    submitters.ranks = fresh;
  }
  const bool joins = request.kind == OpKind::kJoin;
  const PendingRef tensor = table_.add(submitters, std::move(request), source.now);
  if (tensor->request.by_members()) grown_sets_.push_back(tensor);
  // A join fails in the next plan if a rank has left without joining. The ranks that joined then no
  // longer count as joined, so other pending operations wait for them.
  if (!joins || !difference(departures_.ranks(), table_.joined()).empty()) return;
  table_.add_joined(submitters.ranks);
}

// See Note [The shortcut for repeated plans] in coordinator.h.
bool Coordinator::accept_by_shortcut(const wire::Report& report) {
  if (report.sections.size() != 1 || report.sections[0].groups.size() != 1 ||
      report.sections[0].as_of < replays_.last()) {
    return false;
  }
  const wire::Report::Group& group = report.sections[0].groups[0];
  const bool whole = group.hits.size() == 1 && group.unnamed_hits.empty() &&
                     group.requests.empty() && report.leaving.empty() &&
                     group.ranks == RankSet(0, static_cast<int>(ranks_) - 1);
  const bool alone = table_.pending().empty() && failed_uses_.empty() && cache_.displaced() == 0 &&
                     departures_.none();
  if (!whole || !alone || !repeated_.offer(group.hits[0])) return false;
  for (const auto& applied : report.applied) record_applied(applied.ranks, applied.last_applied);
  return true;
}

void Coordinator::flush_shortcut(TimePoint now) {
  const auto hits = repeated_.release();
  if (!hits) return;
  const RankRange world{0, static_cast<int>(ranks_) - 1};
  const Source source{{&world, 1}, sequence_, now};
  hits->slots.for_each([&](std::uint32_t slot) {
    accept_hit(source, slot, 0, wire::stamp_of_hit(hits->report_number, slot));
  });
}

// Whether a batch of the repeated plan might be held back. If so, the ready table makes the
// decision.
bool Coordinator::may_hold_back_repeated(const BatchesAhead& ahead) const {
  return ahead && std::ranges::any_of(repeated_.plan().batches, [&](const wire::Batch& batch) {
           const wire::Request& request =
               cache_.at(std::get<wire::SlotUse>(batch.tensors.front()).slot).request;
           return fusion_sort(request) &&
                  ahead(request.process_set, request.device) >= kBusyBatches;
         });
}

std::optional<wire::Plan> Coordinator::repeat_plan(TimePoint now, const BatchesAhead& ahead) {
  if (!repeated_.waiting()) return std::nullopt;
  if (may_hold_back_repeated(ahead)) {
    flush_shortcut(now);
    return std::nullopt;
  }
  stalls_.record_activity(RankSet(0, static_cast<int>(ranks_) - 1),
                          cache_.at(repeated_.slots().highest()).request.name, now);
  wire::Plan repeated = repeated_.repeat(++sequence_, cache_);
  blocked_.record_change(now);
  if (options_.schedule_lock) replay_if_steady(repeated);
  return repeated;
}

std::optional<wire::Plan> Coordinator::decide(TimePoint now, const BatchesAhead& ahead) {
  if (auto repeated = repeat_plan(now, ahead)) return repeated;
  wire::Plan plan;
  plan.sequence = sequence_ + 1;
  fail_disagreeing_sets(plan);  // first, because it refers to pending tensors
  fail_stalled(now, plan);
  fail_deadlocked(now, plan);
  if (!departures_.none()) fail_for_shutdown(plan);
  if (join_failure_) fail_operations_without_joined_ranks(plan);
  if (table_.anything_ready()) plan_ready(now, ahead, plan);
  if (repeated_.learning()) repeated_.learn(plan, table_.pending().empty());
  if (!table_.anything_ready()) plan.shutdown = departures_.announce_end();
  if (options_.schedule_lock) replay_if_steady(plan);
  if (plan.batches.empty() && plan.errors.empty() && !plan.shutdown) return std::nullopt;
  ++sequence_;
  blocked_.record_change(now);
  return plan;
}

ReadyTable::KeepGathering Coordinator::keep_gathering_while(const BatchesAhead& ahead) const {
  if (!ahead) return {};
  return [this, &ahead](const FusionSort& sort, std::int64_t bytes) {
    return bytes < options_.fusion_threshold &&
           ahead(sort.process_set, sort.device) >= kBusyBatches;
  };
}

// A rank that has not applied the last plan may no longer be blocked.
void Coordinator::record_blocked(int rank, std::uint64_t last_applied) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= ranks_) {
    throw Error(text("rank ", rank, " reports that it is blocked, but it does not exist"));
  }
  if (last_applied == sequence_) blocked_.add(rank);
}

// Starts at most one replay. A set that has to wait is due again after its next step.
void Coordinator::replay_if_steady(wire::Plan& plan) {
  if (plan.batches.empty() && plan.errors.empty() && !plan.shutdown) return;
  for (const int process_set : replays_.observe(plan, cache_, sets_)) {
    if (!may_replay_now(process_set)) continue;
    plan.replay = replays_.schedule(process_set);
    replays_.begin(process_set, plan.sequence);
    return process_set == 0 ? table_.clear() : table_.drop_set(process_set);
  }
}

// A replay withdraws pending operations, and the ranks submit them again once they have entered the
// replay.
bool Coordinator::may_replay_now(int process_set) const {
  if (table_.anyone_joined() || !departures_.none() || !may_replay(sets_, process_set))
    return false;
  std::set<std::uint32_t> slots;
  for (const wire::SlotBundle& bundle : replays_.schedule(process_set)) {
    for (const auto& batch : bundle) slots.insert(batch.begin(), batch.end());
  }
  // Another set may have displaced an operation of the current step.
  const auto is_of_set = [&](std::uint32_t slot) {
    return cache_.holds(slot) && cache_.at(slot).request.process_set == process_set;
  };
  return std::ranges::all_of(slots, is_of_set) &&
         std::ranges::all_of(table_.pending(), [&](const PendingTensor& tensor) {
           const bool in_schedule = tensor.cached_slot && slots.contains(*tensor.cached_slot);
           return in_schedule || replays_.may_stay_pending(tensor.request, process_set);
         });
}

void Coordinator::fail(PendingRef tensor, const Status& status, wire::Plan& plan,
                       RankSpan informed) {
  wire::ErrorEntry entry;
  entry.process_set = tensor->request.process_set;
  entry.name = tensor->request.name;
  entry.code = status.code;
  entry.message = status.message;
  entry.rank = status.rank;
  RankSet missing = table_.missing(*tensor);
  missing.remove(informed);
  entry.missing = missing.to_vector();
  failed_uses_.add(tensor->request, plan.sequence, std::move(missing));
  plan.errors.push_back(std::move(entry));
  if (tensor->request.kind == OpKind::kJoin) {
    table_.end_join();
    join_failure_ = status;
  }
  table_.fail_group(*tensor, status);
  table_.erase(tensor);
}

// See Note [Sets that wait for each other] in set_disagreement.h.
void Coordinator::fail_disagreeing_sets(wire::Plan& plan) {
  std::vector<PendingRef> grown = std::exchange(grown_sets_, {});
  while (!grown.empty()) {
    const PendingRef last = grown.back();
    grown.pop_back();
    if (last->missing == 0) continue;
    const auto found = find_disagreement(table_, last);
    if (!found) continue;
    RankSet informed;
    for (const PendingRef set : found->sets) informed.add(set->reported);
    for (const PendingRef set : found->sets) {
      std::erase(grown, set);
      fail(set, {StatusCode::kMismatch, text(describe(set->request), ": ", found->text)}, plan,
           informed);
    }
  }
}

void Coordinator::fail_stalled(TimePoint now, wire::Plan& plan) {
  // Each text lists the operations that the missing ranks wait for, so all texts are written before
  // the first tensor leaves the table.
  std::vector<std::pair<PendingRef, Status>> expired;
  for (const PendingRef tensor : stalls_.expired(table_, now)) {
    const int rank = tensor->missing == 1 ? table_.missing(*tensor).lowest() : -1;
    expired.emplace_back(
        tensor, Status{StatusCode::kStalled, stalls_.error_text(table_, *tensor, now), rank});
  }
  for (const auto& [tensor, status] : expired) fail(tensor, status, plan);
}

void Coordinator::fail_deadlocked(TimePoint now, wire::Plan& plan) {
  if (table_.anything_ready()) return;
  const auto quiet = blocked_.deadlocked_for(departures_.ranks(), now);
  if (!quiet) return;
  const std::string deadlock = stalls_.deadlock_text(table_, departures_.ranks(), *quiet);
  std::vector<PendingRef> ended;
  for (PendingRef tensor = table_.pending().begin(); tensor != table_.pending().end(); ++tensor)
    ended.push_back(tensor);
  for (const PendingRef tensor : ended)
    fail(tensor, {StatusCode::kStalled, text(describe(tensor->request), ": ", deadlock)}, plan);
}

void Coordinator::fail_for_shutdown(wire::Plan& plan) {
  std::vector<std::pair<PendingRef, Status>> ended;
  for (PendingRef tensor = table_.pending().begin(); tensor != table_.pending().end(); ++tensor) {
    if (auto status = why_never_complete(*tensor)) ended.emplace_back(tensor, std::move(*status));
  }
  for (const auto& [tensor, status] : ended) fail(tensor, status, plan);
}

// A failed join undoes the joins of its ranks, so operations can no longer do without these ranks.
void Coordinator::fail_operations_without_joined_ranks(wire::Plan& plan) {
  const Status cause = *std::exchange(join_failure_, std::nullopt);
  std::vector<PendingRef> ended;
  for (PendingRef tensor = table_.pending().begin(); tensor != table_.pending().end(); ++tensor) {
    if (!tensor->absent.empty()) ended.push_back(tensor);
  }
  for (const PendingRef tensor : ended) {
    fail(tensor,
         {cause.code,
          describe(tensor->request) +
              ": a rank that took no part in it had called join(), which failed: " + cause.message,
          cause.rank},
         plan);
  }
}

// The reason why the operation can never be complete, if any: a rank that has left did not submit
// it or another member of its group.
std::optional<Status> Coordinator::why_never_complete(const PendingTensor& tensor) const {
  const bool group_lacks_member =
      tensor.held &&
      tensor.groups.front()->seen.size() < static_cast<std::size_t>(tensor.groups.front()->size);
  if (tensor.missing == 0 && !group_lacks_member) return std::nullopt;
  const RankSet gone = intersection(
      departures_.ranks(),
      tensor.missing > 0 ? table_.missing(tensor) : sets_.rank_set(tensor.request.process_set));
  if (gone.empty()) return std::nullopt;
  const int rank = gone.lowest();
  const std::string subject = text(describe(tensor.request), ": rank ", rank, " (",
                                   options_.host_of_rank[static_cast<std::size_t>(rank)], ")");
  const std::string what = tensor.missing > 0 ? "it" : "the rest of its group";
  if (departures_.ended(rank)) {
    return Status{StatusCode::kShutdown,
                  text(subject, " ended without shutdown() and without submitting ", what,
                       "; see its output and its exit code for the cause"),
                  rank};
  }
  return Status{StatusCode::kShutdown,
                text(subject, " has called shutdown() without submitting ", what,
                     "; every rank must submit the same operations before it leaves; a rank with "
                     "fewer batches than the others calls hvd::join() after its last batch"),
                rank};
}

// Returns the ready tensors that can run, in canonical order. Fails the others.
std::vector<PendingRef> Coordinator::extract_valid(const BatchesAhead& ahead, wire::Plan& plan) {
  std::vector<PendingRef> valid;
  const ReadyTable::KeepGathering keep_gathering = keep_gathering_while(ahead);
  // A failed tensor may make held members of its group ready, so extract until no tensor is ready.
  for (;;) {
    const std::vector<PendingRef> taken = table_.extract_ready(keep_gathering);
    if (taken.empty()) break;
    for (const PendingRef tensor : taken) {
      if (const auto fault = fault_of(*tensor)) {
        fail(tensor, {StatusCode::kMismatch, *fault}, plan);
      } else {
        valid.push_back(tensor);
      }
    }
  }
  std::erase_if(valid, [&](PendingRef tensor) {
    auto failure = table_.group_failure(*tensor);
    if (!failure) return false;
    failure->message = describe(tensor->request) + ": its group failed: " + failure->message;
    fail(tensor, *failure, plan);
    return true;
  });
  return valid;
}

std::optional<std::string> Coordinator::fault_of(const PendingTensor& tensor) const {
  const wire::Request& request = tensor.request;
  if (!tensor.mismatch && request.kind == OpKind::kRemoveProcessSet &&
      (request.removed_set == 0 || !sets_.contains(request.removed_set))) {
    return text(describe(request), ": there is no process set ", request.removed_set,
                " that could be removed");
  }
  return tensor.mismatch;
}

void Coordinator::plan_ready(TimePoint now, const BatchesAhead& ahead, wire::Plan& plan) {
  std::vector<PendingRef> valid = extract_valid(ahead, plan);
  stalls_.record_resumed(valid, now);
  // A set is removed after its ready operations have been planned.
  const auto removals = std::stable_partition(valid.begin(), valid.end(), [](PendingRef tensor) {
    return tensor->request.kind != OpKind::kRemoveProcessSet;
  });
  plan_batches({valid.begin(), removals}, plan);
  plan_removals({removals, valid.end()}, plan);
}

void Coordinator::plan_removals(const std::vector<PendingRef>& removals, wire::Plan& plan) {
  // A removal by the members is an operation of the removed set itself, so end_set() drops a second
  // removal.
  std::vector<PendingRef> rest = removals;
  while (!rest.empty()) {
    const PendingRef removal = rest.front();
    const int removed = removal->request.removed_set;
    rest.erase(rest.begin());
    if (!sets_.contains(removed)) {  // removed twice
      fail(removal, {StatusCode::kMismatch, *fault_of(*removal)}, plan);
      continue;
    }
    plan_batches({removal}, plan);
    std::erase_if(rest,
                  [removed](PendingRef next) { return next->request.process_set == removed; });
    end_set(removed);
  }
}

void Coordinator::plan_batches(const std::vector<PendingRef>& tensors, wire::Plan& plan) {
  // Tensors share a batch only if the same ranks are absent from them.
  std::map<std::vector<int>, std::vector<PendingRef>> by_absent;
  for (const PendingRef tensor : tensors) by_absent[tensor->absent.to_vector()].push_back(tensor);
  for (const auto& [absent, alike] : by_absent) {
    std::vector<ReadyTensor> ready;
    for (const PendingRef tensor : alike) ready.push_back({&tensor->request, batch_bytes(*tensor)});
    for (const auto& indices : plan_fusion(ready, options_.fusion_threshold)) {
      wire::Batch batch;
      batch.absent = absent;
      for (const auto index : indices) batch.tensors.push_back(plan_tensor(alike[index]));
      plan.batches.push_back(std::move(batch));
    }
  }
}

void Coordinator::end_set(int process_set) {
  table_.drop_set(process_set);
  sets_.remove(process_set);
  failed_uses_.drop_set(process_set);
  replays_.drop_set(process_set);
}

// Returns the slot that holds exactly the response that the ranks have agreed on, if there is one.
std::optional<std::uint32_t> Coordinator::agreed_slot(const PendingTensor& tensor) const {
  if (tensor.cached_slot) return tensor.cached_slot;  // all ranks hit it
  const auto slot = cache_.find(tensor.request);
  const bool same = slot && cache_.matches(*slot, tensor.request, 0) &&
                    cache_.at(*slot).first_dims == tensor.first_dims;
  return same ? slot : std::nullopt;
}

wire::PlannedTensor Coordinator::plan_tensor(PendingRef tensor) {
  if (const auto slot = agreed_slot(*tensor)) {
    repeated_.mark_cache_touched();
    cache_.touch(*slot);
    const wire::SlotUse use{*slot, tensor->request.unnamed ? tensor->request.ordinal : 0};
    table_.erase(tensor);
    return use;
  }
  repeated_.forget();
  wire::Response response{tensor->request, tensor->first_dims};
  if (const auto displaced = cache_.put(response, sequence_ + 1)) table_.forget_slot(*displaced);
  if (tensor->request.kind == OpKind::kJoin) {
    response.request.last_to_join = table_.last_to_join();
    table_.end_join();
  } else if (tensor->request.kind == OpKind::kAddProcessSet) {
    sets_.add(tensor->request.new_set, tensor->request.by_members());
  }
  table_.erase(tensor);
  return response;
}

bool RepeatedPlan::offer(const wire::StampedHits& hits) {
  if (!known_ || known_->slots != hits.slots) {
    learning_ = hits.slots;
    return false;
  }
  waiting_ = hits;
  return true;
}

std::optional<wire::StampedHits> RepeatedPlan::release() {
  learning_.reset();
  return std::exchange(waiting_, std::nullopt);
}

wire::Plan RepeatedPlan::repeat(std::uint64_t sequence, ResponseCache& cache) {
  HVD_EXPECT(waiting(), "hits wait");
  waiting_.reset();
  wire::Plan plan = known_->plan;
  plan.sequence = known_->repeated_as = sequence;
  // Repeating the same plan does not change the order of the cache.
  if (std::exchange(known_->just_used, true)) return plan;
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors) cache.touch(std::get<wire::SlotUse>(tensor).slot);
  }
  return plan;
}

wire::Bytes RepeatedPlan::encode(const wire::Plan& plan) const {
  const bool repeated = known_ && known_->repeated_as == plan.sequence && plan.replay.empty();
  return repeated ? wire::renumber(known_->encoded, plan.sequence) : wire::encode(plan);
}

void RepeatedPlan::learn(wire::Plan plan, bool nothing_pending) {
  const std::optional<wire::SlotSet> reported = std::exchange(learning_, std::nullopt);
  if (!reported || plan.shutdown || !plan.errors.empty() || !nothing_pending) return;
  wire::SlotSet planned;
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors) {
      const auto* const cached = std::get_if<wire::SlotUse>(&tensor);
      if (cached == nullptr || !batch.absent.empty()) return;
      planned.add(cached->slot);
    }
  }
  if (planned != *reported) return;
  plan.sequence = 0;
  wire::Bytes encoded = wire::encode(plan);
  known_ = {planned, std::move(encoded), std::move(plan), true, 0};
}

}  // namespace hvd::control
