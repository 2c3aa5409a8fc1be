#include "control/coordinator.h"

#include <algorithm>

#include "control/fusion_planner.h"
#include "control/validator.h"
#include "hvd/error.h"

namespace hvd::control {
namespace {

// Note [What a slot means]
// A rank's report refers to cache slots as they were after the last plan it applied. Meanwhile further plans may have been decided, and
// may have put something else into a slot. So each report carries the sequence of that last plan, and the coordinator keeps
// what a slot held before, until every rank has applied the plan that displaced it. A hit is thus always read as it was meant: no
// acknowledgement, no second round. Ranks with nothing to say acknowledge now and then (Negotiator), so that this memory is bounded.

constexpr std::size_t kBusyBatches = 2;

std::string use_key(const wire::Request& request) {
  return std::to_string(request.process_set) + '/' + request.name;
}

}  // namespace

Coordinator::Coordinator(CoordinatorOptions options, const ProcessSetTable& sets)
    : options_(std::move(options)),
      sets_(sets),
      table_(sets, static_cast<int>(options_.host_of_rank.size())),
      cache_(options_.cache_capacity),
      stalls_(options_.stall, options_.host_of_rank),
      last_applied_(options_.host_of_rank.size()),
      shut_down_(options_.host_of_rank.size()) {}

void Coordinator::accept(int rank, const wire::Report& report, TimePoint now) {
  const auto index = static_cast<std::size_t>(rank);
  if (report.last_applied < last_applied_[index] || report.last_applied > sequence_) {
    throw Error("rank " + std::to_string(rank) + " says it applied plan " + std::to_string(report.last_applied) +
                "; expected " + std::to_string(last_applied_[index]) + " to " + std::to_string(sequence_));
  }
  const bool advanced = report.last_applied > last_applied_[index];
  last_applied_[index] = report.last_applied;
  for (const auto slot : report.cached) accept_hit(rank, slot, 0, report.last_applied, now);
  for (const auto& hit : report.cached_unnamed) accept_hit(rank, hit.slot, hit.ordinal, report.last_applied, now);
  for (const auto& request : report.requests) accept_request(rank, request, std::nullopt, report.last_applied, now);
  if (!report.requests.empty()) {
    stalls_.note_activity(rank, report.requests.back().name, now);
  } else if (!report.cached.empty()) {
    stalls_.note_activity(rank, slot_as_seen(rank, report.cached.back(), report.last_applied).entry.request.name, now);
  }
  if (report.shutdown && !shut_down_[index]) {
    shut_down_[index] = true;
    ++shut_down_count_;
  }
  if (advanced && !displaced_.empty()) forget_displaced();
}

Coordinator::SlotView Coordinator::slot_as_seen(int rank, std::uint32_t slot, std::uint64_t last_applied) const {
  if (const auto history = displaced_.find(slot); history != displaced_.end()) {
    for (const Displaced& earlier : history->second) {
      if (earlier.until > last_applied) return {earlier.entry, false};
    }
  }
  if (!cache_.holds(slot)) {
    throw Error("rank " + std::to_string(rank) + " refers to cache slot " + std::to_string(slot) + ", which is empty");
  }
  return {cache_.at(slot), true};
}

void Coordinator::accept_hit(int rank, std::uint32_t slot, std::uint64_t ordinal, std::uint64_t last_applied,
                             TimePoint now) {
  const SlotView view = slot_as_seen(rank, slot, last_applied);
  if (view.current && failed_uses_.empty() && table_.add_hit(rank, slot)) return;
  const int position = sets_.position(view.entry.request.process_set, rank);
  if (position < 0) {
    throw Error("rank " + std::to_string(rank) + " refers to cache slot " + std::to_string(slot) +
                " of a process set it is not in");
  }
  const std::optional<CacheHit> hit =
      view.current ? std::optional(CacheHit{slot, &view.entry.first_dims}) : std::nullopt;
  accept_request(rank, ResponseCache::expand(view.entry, ordinal, position), hit, last_applied, now);
}

void Coordinator::accept_request(int rank, wire::Request request, const std::optional<CacheHit>& hit,
                                 std::uint64_t last_applied, TimePoint now) {
  if (belongs_to_failed_use(rank, request, last_applied)) return;
  table_.add(rank, std::move(request), hit, now);
}

bool Coordinator::belongs_to_failed_use(int rank, const wire::Request& request, std::uint64_t last_applied) {
  if (failed_uses_.empty()) return false;
  const auto found = failed_uses_.find({use_key(request), rank});
  if (found == failed_uses_.end()) return false;
  const bool before = last_applied < found->second;
  if (!before) failed_uses_.erase(found);
  return before;
}

void Coordinator::forget_displaced() {
  const std::uint64_t applied_by_all = *std::min_element(last_applied_.begin(), last_applied_.end());
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

std::optional<wire::Plan> Coordinator::decide(TimePoint now, std::size_t in_flight) {
  wire::Plan plan;
  plan.sequence = sequence_ + 1;
  fail_stalled(now, plan);
  if (shut_down_count_ > 0) fail_for_shutdown(plan);
  const bool hold_back = in_flight >= kBusyBatches && plan.errors.empty() && table_.ready_bytes() < options_.fusion_threshold;
  if (table_.anything_ready() && !hold_back) plan_ready(plan);
  if (all_shut_down() && !shutdown_published_ && !table_.anything_ready()) plan.shutdown = shutdown_published_ = true;
  if (plan.batches.empty() && plan.errors.empty() && !plan.shutdown) return std::nullopt;
  ++sequence_;
  return plan;
}

void Coordinator::fail(PendingRef tensor, StatusCode code, const std::string& message, int rank, wire::Plan& plan) {
  wire::ErrorEntry entry;
  entry.process_set = tensor->request.process_set;
  entry.name = tensor->request.name;
  entry.code = code;
  entry.message = message;
  entry.rank = rank;
  entry.missing = table_.missing_ranks(*tensor);
  for (const int missing : entry.missing) failed_uses_[{use_key(tensor->request), missing}] = plan.sequence;
  plan.errors.push_back(std::move(entry));
  table_.fail_group(*tensor, message);
  table_.erase(tensor);
}

void Coordinator::fail_stalled(TimePoint now, wire::Plan& plan) {
  for (const PendingRef tensor : stalls_.expired(table_, now)) {
    fail(tensor, StatusCode::kStalled, stalls_.error_text(table_, *tensor, now), -1, plan);
  }
}

// An operation that waits for a rank which has left will never be complete.
void Coordinator::fail_for_shutdown(wire::Plan& plan) {
  std::vector<std::pair<PendingRef, int>> hopeless;
  for (PendingRef tensor = table_.pending().begin(); tensor != table_.pending().end(); ++tensor) {
    if (tensor->missing == 0) continue;
    for (const int rank : table_.missing_ranks(*tensor)) {
      if (!shut_down_[static_cast<std::size_t>(rank)]) continue;
      hopeless.emplace_back(tensor, rank);
      break;
    }
  }
  for (const auto& [tensor, rank] : hopeless) {
    fail(tensor, StatusCode::kShutdown,
         describe(tensor->request) + ": rank " + std::to_string(rank) + " (" +
             options_.host_of_rank[static_cast<std::size_t>(rank)] +
             ") has called shutdown() without submitting it; every rank must submit the same operations before it leaves",
         rank, plan);
  }
}

void Coordinator::plan_ready(wire::Plan& plan) {
  std::vector<PendingRef> sound;
  // Failing one tensor may make held members of its group ready, so take until nothing comes.
  while (table_.anything_ready()) {
    for (const PendingRef tensor : table_.take_ready()) {
      if (tensor->mismatch) {
        const std::string message = *tensor->mismatch;
        fail(tensor, StatusCode::kMismatch, message, -1, plan);
      } else {
        sound.push_back(tensor);
      }
    }
  }
  std::erase_if(sound, [&](PendingRef tensor) {
    const auto failure = table_.group_failure(*tensor);
    if (failure) fail(tensor, StatusCode::kMismatch, describe(tensor->request) + ": its group failed: " + *failure, -1, plan);
    return failure.has_value();
  });
  std::vector<ReadyTensor> ready;
  for (const PendingRef tensor : sound) ready.push_back({&tensor->request, batch_bytes(*tensor)});
  for (const auto& indices : plan_fusion(ready, options_.fusion_threshold)) {
    wire::Batch batch;
    for (const auto index : indices) batch.tensors.push_back(plan_tensor(sound[index]));
    plan.batches.push_back(std::move(batch));
  }
}

wire::PlannedTensor Coordinator::plan_tensor(PendingRef tensor) {
  wire::PlannedTensor planned;
  const auto slot = cache_.find(tensor->request);
  if (slot && cache_.matches(*slot, tensor->request, 0) && cache_.at(*slot).first_dims == tensor->first_dims) {
    planned.slot = *slot;
    planned.ordinal = tensor->request.unnamed ? tensor->request.ordinal : 0;
    cache_.touch(*slot);
  } else {
    planned.request = tensor->request;
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
