#include "control/ready_table.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "control/saturating.h"
#include "control/validator.h"
#include "hvd/error.h"

namespace hvd::control {

std::int64_t batch_bytes(const PendingTensor& tensor) {
  const wire::Request& request = tensor.request;
  if (!wire::gathers(request.kind) || request.shape.empty()) {
    return saturating_product(request.elements(),
                              static_cast<std::int64_t>(size_of(request.dtype)));
  }
  return gathered_bytes(request, tensor.first_dims);
}

ReadyTable::ReadyTable(const ProcessSetTable& sets, int world_size)
    : sets_(sets),
      submissions_(static_cast<std::size_t>(world_size)),
      joined_(static_cast<std::size_t>(world_size)) {}

PendingRef ReadyTable::add(int rank, wire::Request request, const std::optional<CacheHit>& hit,
                           TimePoint now) {
  const int position =
      sets_.contains(request.process_set) ? sets_.position(request.process_set, rank) : -1;
  if (position < 0) {
    throw Error("rank " + std::to_string(rank) + " asked for " + describe(request) +
                " of process set " + std::to_string(request.process_set) + ", which it is not in");
  }
  if (joined_[static_cast<std::size_t>(rank)]) {
    throw Error("rank " + std::to_string(rank) + " asked for " + describe(request) +
                " although it has joined");
  }
  const auto found = by_key_.find(key_of(request));
  if (found == by_key_.end()) {
    const PendingRef created = create(rank, position, std::move(request), hit, now);
    mark_joined_absent(created);
    mark(created, rank, position);
    return created;
  }
  const PendingRef tensor = found->second;
  if (tensor->reported[static_cast<std::size_t>(position)]) {
    throw Error("rank " + std::to_string(rank) + " asked twice for " + describe(request) +
                " before it was done");
  }
  if (tensor->cached_slot && (!hit || hit->slot != *tensor->cached_slot)) {
    forget_slot(*tensor->cached_slot);
  }
  if (wire::gathers(request.kind) && !request.shape.empty() && !tensor->first_dims.empty()) {
    tensor->first_dims[static_cast<std::size_t>(position)] = request.shape[0];
  }
  join_group(tensor, request);
  compare(*tensor, rank, std::move(request));
  mark(tensor, rank, position);
  return tensor;
}

// Keeps the lowest rank's request and that of the lowest rank that disagrees with it: so what is
// planned, and what a MismatchError says, do not depend on the order in which reports arrive.
void ReadyTable::compare(PendingTensor& tensor, int rank, wire::Request&& request) {
  const bool agrees = !find_mismatch(tensor.request, tensor.reference_rank, request, rank);
  if (rank < tensor.reference_rank) {
    if (!agrees) tensor.dissent = {std::move(tensor.request), tensor.reference_rank};
    tensor.request = std::move(request);
    tensor.reference_rank = rank;
  } else if (!agrees && (!tensor.dissent || rank < tensor.dissent->rank)) {
    tensor.dissent = {std::move(request), rank};
  }
}

bool ReadyTable::add_hit(int rank, std::uint32_t slot) {
  if (slot >= by_slot_.size() || !by_slot_[slot]) return false;
  const PendingRef tensor = *by_slot_[slot];
  const int position = sets_.position(tensor->request.process_set, rank);
  if (position < 0 || tensor->reported[static_cast<std::size_t>(position)] ||
      joined_[static_cast<std::size_t>(rank)])
    return false;  // add() explains
  if (rank < tensor->reference_rank) {
    tensor->reference_rank = rank;
    if (!tensor->first_dims.empty())
      tensor->request.shape[0] = tensor->first_dims[static_cast<std::size_t>(position)];
  }
  mark(tensor, rank, position);
  return true;
}

void ReadyTable::forget_slot(std::uint32_t slot) {
  if (slot >= by_slot_.size() || !by_slot_[slot]) return;
  (*by_slot_[slot])->cached_slot.reset();
  by_slot_[slot].reset();
}

PendingRef ReadyTable::create(int rank, int position, wire::Request&& request,
                              const std::optional<CacheHit>& hit, TimePoint now) {
  const auto members = sets_.ranks(request.process_set).size();
  const PendingRef tensor = pending_.emplace(pending_.end());
  tensor->reference_rank = rank;
  tensor->reported.resize(members);
  tensor->missing = static_cast<int>(members);
  tensor->first_seen = now;
  if (hit && !request.unnamed) {
    tensor->cached_slot = hit->slot;
    if (by_slot_.size() <= hit->slot) by_slot_.resize(hit->slot + 1);
    by_slot_[hit->slot] = tensor;
  }
  if (wire::gathers(request.kind) && !request.shape.empty()) {
    if (hit) tensor->first_dims = *hit->first_dims;
    tensor->first_dims.resize(members);
    tensor->first_dims[static_cast<std::size_t>(position)] = request.shape[0];
  }
  if (request.kind == OpKind::kJoin) join_ = tensor;
  tensor->request = std::move(request);
  by_key_.emplace(key_of(tensor->request), tensor);
  join_group(tensor, tensor->request);
  return tensor;
}

void ReadyTable::mark(PendingRef tensor, int rank, int position) {
  const std::uint64_t stamp = ++submissions_[static_cast<std::size_t>(rank)];
  if (rank == tensor->reference_rank) tensor->order = stamp;
  tensor->reported[static_cast<std::size_t>(position)] = true;
  if (--tensor->missing == 0) complete(tensor);
}

void ReadyTable::mark_absent(PendingRef tensor, std::size_t position) {
  if (!is_missing(*tensor, position)) return;
  tensor->absent.resize(tensor->reported.size());
  tensor->absent[position] = true;
  if (!tensor->first_dims.empty()) {
    // What the slot holds includes this member's part.
    if (tensor->cached_slot) forget_slot(*tensor->cached_slot);
    tensor->first_dims[position] = 0;
  }
  --tensor->missing;
}

void ReadyTable::mark_joined_absent(PendingRef tensor) {
  if (joined_count_ == 0 || tensor->request.kind == OpKind::kJoin) return;
  const auto& members = sets_.ranks(tensor->request.process_set);
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (joined_[static_cast<std::size_t>(members[i])]) mark_absent(tensor, i);
  }
}

void ReadyTable::note_joined(int rank) {
  if (joined_[static_cast<std::size_t>(rank)]) return;
  joined_[static_cast<std::size_t>(rank)] = true;
  ++joined_count_;
  for (PendingRef tensor = pending_.begin(); tensor != pending_.end(); ++tensor) {
    const int position = sets_.position(tensor->request.process_set, rank);
    if (tensor->request.kind == OpKind::kJoin || position < 0 || tensor->missing == 0) continue;
    mark_absent(tensor, static_cast<std::size_t>(position));
    if (tensor->missing == 0) complete(tensor);
  }
}

void ReadyTable::refresh_join(TimePoint now) {
  if (!join_) return;
  (*join_)->first_seen = now;
  (*join_)->warned = false;
  pending_.splice(pending_.end(), pending_, *join_);  // oldest first
}

void ReadyTable::end_join() noexcept {
  joined_.assign(joined_.size(), false);
  joined_count_ = 0;
}

void ReadyTable::drop_set(int process_set) {
  for (PendingRef tensor = pending_.begin(); tensor != pending_.end();) {
    const PendingRef next = std::next(tensor);
    if (tensor->request.process_set == process_set) erase(tensor);
    tensor = next;
  }
  std::erase_if(groups_, [&](const auto& entry) {
    return entry.first.starts_with(std::to_string(process_set) + '/');
  });
}

void ReadyTable::complete(PendingRef tensor) {
  wire::Request& request = tensor->request;
  if (tensor->dissent) {
    tensor->mismatch = find_mismatch(request, tensor->reference_rank, tensor->dissent->request,
                                     tensor->dissent->rank);
  } else {
    tensor->mismatch = find_fault(request, sets_.ranks(request.process_set), absent_ranks(*tensor));
    // From here on the plan speaks for the set's first member.
    if (!tensor->first_dims.empty()) request.shape[0] = tensor->first_dims[0];
  }
  if (!tensor->mismatch && batch_bytes(*tensor) == kMostBytes) {
    tensor->mismatch = describe(request) + ": the result has more than 2^63 bytes";
  }
  if (request.group_size == 0 || tensor->mismatch || tensor->groups.front()->failure)
    return make_ready(tensor);
  TensorGroup& group = *tensor->groups.front();
  group.held.push_back(tensor);
  tensor->held = true;
  if (group.held.size() < static_cast<std::size_t>(group.size)) return;
  for (const PendingRef held : std::exchange(group.held, {})) make_ready(held);
}

void ReadyTable::make_ready(PendingRef tensor) {
  tensor->held = false;
  ready_.push_back(tensor);
  ready_bytes_ = saturating_sum(ready_bytes_, batch_bytes(*tensor));
}

void ReadyTable::join_group(PendingRef tensor, const wire::Request& request) {
  if (request.group_size == 0) return;
  std::string key = group_of(request);
  const auto same = [&](const std::shared_ptr<TensorGroup>& group) { return group->key == key; };
  if (std::any_of(tensor->groups.begin(), tensor->groups.end(), same)) return;
  std::shared_ptr<TensorGroup>& current = groups_[key];
  if (!current || !current->seen.insert(request.group_index).second) {
    current = std::make_shared<TensorGroup>();
    current->key = std::move(key);
    current->size = request.group_size;
    current->seen.insert(request.group_index);
  }
  tensor->groups.push_back(current);
  if (current->size != request.group_size) {
    fail_group(*current,
               {StatusCode::kMismatch,
                "one member says that it has " + std::to_string(current->size) + " members, " +
                    describe(request) + " says " + std::to_string(request.group_size)});
  }
}

std::vector<PendingRef> ReadyTable::take_ready() {
  std::sort(ready_.begin(), ready_.end(), [](PendingRef a, PendingRef b) {
    return std::tie(a->request.process_set, a->order) < std::tie(b->request.process_set, b->order);
  });
  ready_bytes_ = 0;
  return std::exchange(ready_, {});
}

std::optional<Status> ReadyTable::group_failure(const PendingTensor& tensor) const {
  return tensor.groups.empty() ? std::nullopt : tensor.groups.front()->failure;
}

void ReadyTable::fail_group(const PendingTensor& tensor, const Status& reason) {
  for (const auto& group : tensor.groups) fail_group(*group, reason);
}

void ReadyTable::fail_group(TensorGroup& group, const Status& reason) {
  if (!group.failure) group.failure = reason;
  for (const PendingRef held : std::exchange(group.held, {})) make_ready(held);
}

void ReadyTable::erase(PendingRef tensor) {
  if (join_ == tensor) join_.reset();
  by_key_.erase(key_of(tensor->request));
  if (tensor->cached_slot) forget_slot(*tensor->cached_slot);
  if (std::erase(ready_, tensor) > 0) {
    ready_bytes_ = 0;
    for (const PendingRef ready : ready_)
      ready_bytes_ = saturating_sum(ready_bytes_, batch_bytes(*ready));
  }
  for (const auto& group : tensor->groups) {
    std::erase(group->held, tensor);
    if (++group->gone < group->size) continue;
    const auto current = groups_.find(group->key);
    if (current != groups_.end() && current->second == group) groups_.erase(current);
  }
  pending_.erase(tensor);
}

bool ReadyTable::has_reported(const PendingTensor& tensor, int rank) const {
  const int position = sets_.position(tensor.request.process_set, rank);
  return position >= 0 && tensor.reported[static_cast<std::size_t>(position)];
}

bool ReadyTable::is_missing(const PendingTensor& tensor, std::size_t position) const {
  return !tensor.reported[position] && (tensor.absent.empty() || !tensor.absent[position]);
}

std::vector<int> ReadyTable::missing_ranks(const PendingTensor& tensor) const {
  std::vector<int> missing;
  const auto& members = sets_.ranks(tensor.request.process_set);
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (is_missing(tensor, i)) missing.push_back(members[i]);
  }
  return missing;
}

std::vector<int> ReadyTable::absent_ranks(const PendingTensor& tensor) const {
  std::vector<int> absent;
  const auto& members = sets_.ranks(tensor.request.process_set);
  for (std::size_t i = 0; i < tensor.absent.size(); ++i) {
    if (tensor.absent[i]) absent.push_back(members[i]);
  }
  return absent;
}

}  // namespace hvd::control
