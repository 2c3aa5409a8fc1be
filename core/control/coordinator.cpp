#include "control/coordinator.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "control/fusion_planner.h"
#include "control/validator.h"
#include "hvd/error.h"

namespace hvd::control {
namespace {

// Note [What a slot means]
// A rank's report refers to cache slots as they were after the last plan it applied. Meanwhile
// further plans may have been decided, and may have put something else into a slot. So each report
// carries the sequence of that last plan, and the coordinator keeps what a slot held before, until
// every rank has applied the plan that displaced it. A hit is thus always read as it was meant: no
// acknowledgement, no second round. Ranks with nothing to say acknowledge now and then
// (Negotiator), so that this memory is bounded.

constexpr std::size_t kBusyBatches = 2;

std::string use_key(const wire::Request& request) {
  return std::to_string(request.process_set) + '/' + request.name;
}

}  // namespace

Coordinator::Coordinator(CoordinatorOptions options, ProcessSetTable sets)
    : options_(std::move(options)),
      sets_(std::move(sets)),
      table_(sets_, static_cast<int>(options_.host_of_rank.size())),
      cache_(options_.cache_capacity),
      stalls_(options_.stall, options_.host_of_rank),
      last_applied_(options_.host_of_rank.size()),
      ranks_at_lowest_(options_.host_of_rank.size()),
      failed_uses_(options_.host_of_rank.size()),
      shut_down_(options_.host_of_rank.size()) {}

void Coordinator::accept(int rank, const wire::Report& report, TimePoint now) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= last_applied_.size()) {
    throw Error("a report came from rank " + std::to_string(rank) + ", which does not exist");
  }
  const auto index = static_cast<std::size_t>(rank);
  if (report.last_applied < last_applied_[index] || report.last_applied > sequence_) {
    throw Error("rank " + std::to_string(rank) + " says it applied plan " +
                std::to_string(report.last_applied) + "; expected " +
                std::to_string(last_applied_[index]) + " to " + std::to_string(sequence_));
  }
  note_applied(rank, report.last_applied);
  for (const auto slot : report.cached) accept_hit(rank, slot, 0, report.last_applied, now);
  for (const auto& hit : report.cached_unnamed)
    accept_hit(rank, hit.slot, hit.ordinal, report.last_applied, now);
  for (const auto& request : report.requests) accept_request(rank, request, std::nullopt, now);
  note_activity(rank, report, now);
  if (table_.joined() > 0) table_.refresh_join(now);
  if (report.shutdown && !shut_down_[index]) {
    shut_down_[index] = true;
    ++shut_down_count_;
  }
}

void Coordinator::note_applied(int rank, std::uint64_t sequence) {
  const auto index = static_cast<std::size_t>(rank);
  const std::uint64_t before = std::exchange(last_applied_[index], sequence);
  if (sequence == before) return;
  std::erase_if(failed_uses_[index], [&](const auto& use) { return use.second <= sequence; });
  if (before != applied_by_all_ || --ranks_at_lowest_ > 0) return;
  applied_by_all_ = *std::min_element(last_applied_.begin(), last_applied_.end());
  ranks_at_lowest_ = static_cast<std::size_t>(
      std::count(last_applied_.begin(), last_applied_.end(), applied_by_all_));
  forget_displaced(applied_by_all_);
}

void Coordinator::note_activity(int rank, const wire::Report& report, TimePoint now) {
  if (!report.requests.empty()) {
    stalls_.note_activity(rank, report.requests.back().name, now);
  } else if (!report.cached_unnamed.empty()) {
    const wire::UnnamedHit& hit = report.cached_unnamed.back();
    const SlotView view = slot_as_seen(rank, hit.slot, report.last_applied);
    stalls_.note_activity(rank, wire::unnamed_name(view.entry.request.kind, hit.ordinal), now);
  } else if (!report.cached.empty()) {
    stalls_.note_activity(
        rank, slot_as_seen(rank, report.cached.back(), report.last_applied).entry.request.name,
        now);
  }
}

Coordinator::SlotView Coordinator::slot_as_seen(int rank, std::uint32_t slot,
                                                std::uint64_t last_applied) const {
  if (const auto history = displaced_.find(slot); history != displaced_.end()) {
    for (const Displaced& earlier : history->second) {
      if (earlier.until > last_applied) return {earlier.entry, false};
    }
  }
  if (!cache_.holds(slot)) {
    throw Error("rank " + std::to_string(rank) + " refers to cache slot " + std::to_string(slot) +
                ", which is empty");
  }
  return {cache_.at(slot), true};
}

void Coordinator::accept_hit(int rank, std::uint32_t slot, std::uint64_t ordinal,
                             std::uint64_t last_applied, TimePoint now) {
  const SlotView view = slot_as_seen(rank, slot, last_applied);
  if (sets_.was_removed(view.entry.request.process_set)) return;
  if (view.current && failed_uses_[static_cast<std::size_t>(rank)].empty() &&
      table_.add_hit(rank, slot))
    return;
  const int position = sets_.position(view.entry.request.process_set, rank);
  if (position < 0) {
    throw Error("rank " + std::to_string(rank) + " refers to cache slot " + std::to_string(slot) +
                " of a process set it is not in");
  }
  const std::optional<CacheHit> hit =
      view.current ? std::optional(CacheHit{slot, &view.entry.first_dims}) : std::nullopt;
  accept_request(rank, ResponseCache::expand(view.entry, ordinal, position), hit, now);
}

void Coordinator::accept_request(int rank, wire::Request request,
                                 const std::optional<CacheHit>& hit, TimePoint now) {
  // The rank had not heard of the removal yet, and ends it by itself when it does.
  if (sets_.was_removed(request.process_set)) return;
  if (belongs_to_failed_use(rank, request)) return;
  const bool joins = request.kind == OpKind::kJoin;
  table_.add(rank, std::move(request), hit, now);
  if (!joins) return;
  table_.note_joined(rank);
  last_to_join_ = rank;
}

bool Coordinator::belongs_to_failed_use(int rank, const wire::Request& request) const {
  const auto& uses = failed_uses_[static_cast<std::size_t>(rank)];
  return !uses.empty() && uses.contains(use_key(request));
}

void Coordinator::forget_displaced(std::uint64_t applied_by_all) {
  for (auto slot = displaced_.begin(); slot != displaced_.end();) {
    auto& history = slot->second;
    while (!history.empty() && history.front().until <= applied_by_all) history.pop_front();
    slot = history.empty() ? displaced_.erase(slot) : std::next(slot);
  }
}

std::size_t Coordinator::displaced_entries() const noexcept {
  std::size_t entries = 0;
  for (const auto& [slot, history] : displaced_) entries += history.size();
  return entries;
}

std::size_t Coordinator::failed_uses() const noexcept {
  std::size_t uses = 0;
  for (const auto& of_rank : failed_uses_) uses += of_rank.size();
  return uses;
}

std::optional<wire::Plan> Coordinator::decide(TimePoint now, std::size_t in_flight) {
  wire::Plan plan;
  plan.sequence = sequence_ + 1;
  fail_stalled(now, plan);
  if (shut_down_count_ > 0) fail_for_shutdown(plan);
  if (join_failure_) fail_what_counts_on_joined(plan);
  const bool hold_back = in_flight >= kBusyBatches && plan.errors.empty() &&
                         table_.ready_bytes() < options_.fusion_threshold;
  if (table_.anything_ready() && !hold_back) plan_ready(plan);
  if (all_shut_down() && !shutdown_published_ && !table_.anything_ready())
    plan.shutdown = shutdown_published_ = true;
  if (plan.batches.empty() && plan.errors.empty() && !plan.shutdown) return std::nullopt;
  ++sequence_;
  return plan;
}

void Coordinator::fail(PendingRef tensor, const Status& status, wire::Plan& plan) {
  wire::ErrorEntry entry;
  entry.process_set = tensor->request.process_set;
  entry.name = tensor->request.name;
  entry.code = status.code;
  entry.message = status.message;
  entry.rank = status.rank;
  entry.missing = table_.missing_ranks(*tensor);
  for (const int missing : entry.missing) {
    failed_uses_[static_cast<std::size_t>(missing)][use_key(tensor->request)] = plan.sequence;
  }
  plan.errors.push_back(std::move(entry));
  if (tensor->request.kind == OpKind::kJoin) {
    table_.end_join();
    join_failure_ = status;
  }
  table_.fail_group(*tensor, status);
  table_.erase(tensor);
}

void Coordinator::fail_stalled(TimePoint now, wire::Plan& plan) {
  // Each text tells what the missing ranks wait for, so all are written before the first tensor
  // goes.
  std::vector<std::pair<PendingRef, std::string>> expired;
  for (const PendingRef tensor : stalls_.expired(table_, now)) {
    expired.emplace_back(tensor, stalls_.error_text(table_, *tensor, now));
  }
  for (auto& [tensor, text] : expired) fail(tensor, {StatusCode::kStalled, std::move(text)}, plan);
}

void Coordinator::fail_for_shutdown(wire::Plan& plan) {
  std::vector<std::pair<PendingRef, Status>> ended;
  for (PendingRef tensor = table_.pending().begin(); tensor != table_.pending().end(); ++tensor) {
    if (auto status = hopeless(*tensor)) ended.emplace_back(tensor, std::move(*status));
  }
  for (const auto& [tensor, status] : ended) fail(tensor, status, plan);
}

// Ranks that had joined have not any more, so they cannot be absent from anything.
void Coordinator::fail_what_counts_on_joined(wire::Plan& plan) {
  const Status cause = *std::exchange(join_failure_, std::nullopt);
  std::vector<PendingRef> ended;
  for (PendingRef tensor = table_.pending().begin(); tensor != table_.pending().end(); ++tensor) {
    if (!tensor->absent.empty()) ended.push_back(tensor);
  }
  for (const PendingRef tensor : ended) {
    fail(tensor, {cause.code, describe(tensor->request) + ": a rank that took no part in it had called join(), which failed: " +
                                  cause.message, cause.rank}, plan);
  }
}

// An operation that waits for a rank which has left will never be complete, nor will a group that
// lacks a member.
std::optional<Status> Coordinator::hopeless(const PendingTensor& tensor) const {
  const bool group_lacks_member =
      tensor.held &&
      tensor.groups.front()->seen.size() < static_cast<std::size_t>(tensor.groups.front()->size);
  if (tensor.missing == 0 && !group_lacks_member) return std::nullopt;
  const auto& members = sets_.ranks(tensor.request.process_set);
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto rank = static_cast<std::size_t>(members[i]);
    if (!shut_down_[rank] || (tensor.missing > 0 && !table_.is_missing(tensor, i))) continue;
    return Status{StatusCode::kShutdown,
                  describe(tensor.request) + ": rank " + std::to_string(rank) + " (" +
                      options_.host_of_rank[rank] + ") has called shutdown() without submitting " +
                      (tensor.missing > 0 ? "it" : "the rest of its group") +
                      "; every rank must submit the same operations before it leaves",
                  members[i]};
  }
  return std::nullopt;
}

// What can run, in canonical order; what cannot is failed.
std::vector<PendingRef> Coordinator::take_sound(wire::Plan& plan) {
  std::vector<PendingRef> sound;
  // Failing one tensor may make held members of its group ready, so take until nothing comes.
  while (table_.anything_ready()) {
    for (const PendingRef tensor : table_.take_ready()) {
      if (const auto fault = fault_of(*tensor)) {
        fail(tensor, {StatusCode::kMismatch, *fault}, plan);
      } else {
        sound.push_back(tensor);
      }
    }
  }
  std::erase_if(sound, [&](PendingRef tensor) {
    auto failure = table_.group_failure(*tensor);
    if (!failure) return false;
    failure->message = describe(tensor->request) + ": its group failed: " + failure->message;
    fail(tensor, *failure, plan);
    return true;
  });
  return sound;
}

std::optional<std::string> Coordinator::fault_of(const PendingTensor& tensor) const {
  const wire::Request& request = tensor.request;
  if (!tensor.mismatch && request.kind == OpKind::kRemoveProcessSet &&
      (request.root == 0 || !sets_.contains(request.root))) {
    return describe(request) + ": there is no process set " + std::to_string(request.root) +
           " that could be removed";
  }
  return tensor.mismatch;
}

void Coordinator::plan_ready(wire::Plan& plan) {
  std::vector<PendingRef> sound = take_sound(plan);
  // A set ends after what is ready in it.
  const auto removals = std::stable_partition(sound.begin(), sound.end(), [](PendingRef tensor) {
    return tensor->request.kind != OpKind::kRemoveProcessSet;
  });
  plan_batches({sound.begin(), removals}, plan);
  for (auto removal = removals; removal != sound.end(); ++removal) {
    const int removed = (*removal)->request.root;
    if (!sets_.contains(removed)) {  // asked for twice
      fail(*removal, {StatusCode::kMismatch, *fault_of(**removal)}, plan);
      continue;
    }
    plan_batches({*removal}, plan);
    end_set(removed);
  }
}

void Coordinator::plan_batches(const std::vector<PendingRef>& tensors, wire::Plan& plan) {
  // Only what the same ranks are absent from can share a batch.
  std::map<std::vector<int>, std::vector<PendingRef>> by_absent;
  for (const PendingRef tensor : tensors)
    by_absent[table_.absent_ranks(*tensor)].push_back(tensor);
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
  const std::string prefix = std::to_string(process_set) + '/';
  for (auto& uses : failed_uses_)
    std::erase_if(uses, [&](const auto& use) { return use.first.starts_with(prefix); });
}

// The slot that holds exactly what the ranks have agreed on.
std::optional<std::uint32_t> Coordinator::agreed_slot(const PendingTensor& tensor) const {
  if (tensor.cached_slot) return tensor.cached_slot;  // everybody asked by naming it
  const auto slot = cache_.find(tensor.request);
  const bool same = slot && cache_.matches(*slot, tensor.request, 0) &&
                    cache_.at(*slot).first_dims == tensor.first_dims;
  return same ? slot : std::nullopt;
}

wire::PlannedTensor Coordinator::plan_tensor(PendingRef tensor) {
  wire::PlannedTensor planned;
  if (const auto slot = agreed_slot(*tensor)) {
    planned.slot = *slot;
    planned.ordinal = tensor->request.unnamed ? tensor->request.ordinal : 0;
    cache_.touch(*slot);
  } else {
    planned.request = tensor->request;
    if (tensor->request.kind == OpKind::kJoin) {
      planned.request.root = last_to_join_;
      table_.end_join();
    } else if (tensor->request.kind == OpKind::kAddProcessSet) {
      sets_.add({tensor->request.splits.begin(), tensor->request.splits.end()});
    }
    planned.first_dims = tensor->first_dims;
    if (auto displaced = cache_.put({tensor->request, tensor->first_dims})) {
      table_.forget_slot(displaced->slot);
      displaced_[displaced->slot].push_back({std::move(displaced->entry), sequence_ + 1});
    }
  }
  table_.erase(tensor);
  return planned;
}

}  // namespace hvd::control
