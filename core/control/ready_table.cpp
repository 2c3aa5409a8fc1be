#include "control/ready_table.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "control/validator.h"
#include "hvd/error.h"

namespace hvd::control {

std::int64_t batch_bytes(const PendingTensor& tensor) {
  const auto element = static_cast<std::int64_t>(size_of(tensor.request.dtype));
  if (tensor.request.kind != OpKind::kAllgather || tensor.request.shape.empty()) return tensor.request.elements() * element;
  std::int64_t row = 1;
  for (std::size_t i = 1; i < tensor.request.shape.size(); ++i) row *= tensor.request.shape[i];
  return std::accumulate(tensor.first_dims.begin(), tensor.first_dims.end(), std::int64_t{0}) * row * element;
}

ReadyTable::ReadyTable(const ProcessSetTable& sets, int world_size)
    : sets_(sets), submissions_(static_cast<std::size_t>(world_size)) {}

PendingRef ReadyTable::add(int rank, wire::Request request, const std::optional<CacheHit>& hit, TimePoint now) {
  const int position = sets_.contains(request.process_set) ? sets_.position(request.process_set, rank) : -1;
  if (position < 0) {
    throw Error("rank " + std::to_string(rank) + " asked for " + describe(request) + " of process set " +
                std::to_string(request.process_set) + ", which it is not in");
  }
  const auto found = by_key_.find(key_of(request));
  if (found == by_key_.end()) {
    const PendingRef created = create(rank, position, std::move(request), hit, now);
    mark(created, rank, position);
    return created;
  }
  const PendingRef tensor = found->second;
  if (tensor->reported[static_cast<std::size_t>(position)]) {
    throw Error("rank " + std::to_string(rank) + " asked twice for " + describe(request) + " before it was done");
  }
  if (tensor->cached_slot && (!hit || hit->slot != *tensor->cached_slot)) {
    by_slot_.erase(*tensor->cached_slot);
    tensor->cached_slot.reset();
  }
  if (!tensor->mismatch) tensor->mismatch = find_mismatch(tensor->request, tensor->reference_rank, request, rank);
  if (request.kind == OpKind::kAllgather && !request.shape.empty() && !tensor->first_dims.empty()) {
    tensor->first_dims[static_cast<std::size_t>(position)] = request.shape[0];
  }
  mark(tensor, rank, position);
  return tensor;
}

bool ReadyTable::add_hit(int rank, std::uint32_t slot) {
  const auto found = by_slot_.find(slot);
  if (found == by_slot_.end()) return false;
  const PendingRef tensor = found->second;
  const int position = sets_.position(tensor->request.process_set, rank);
  if (position < 0 || tensor->reported[static_cast<std::size_t>(position)]) return false;  // add() explains
  mark(tensor, rank, position);
  return true;
}

void ReadyTable::forget_slot(std::uint32_t slot) {
  const auto found = by_slot_.find(slot);
  if (found == by_slot_.end()) return;
  found->second->cached_slot.reset();
  by_slot_.erase(found);
}

PendingRef ReadyTable::create(int rank, int position, wire::Request&& request, const std::optional<CacheHit>& hit,
                              TimePoint now) {
  const auto members = sets_.ranks(request.process_set).size();
  const PendingRef tensor = pending_.emplace(pending_.end());
  tensor->reference_rank = rank;
  tensor->reported.resize(members);
  tensor->missing = static_cast<int>(members);
  tensor->first_seen = now;
  if (hit && !request.unnamed) tensor->cached_slot = hit->slot;
  tensor->order_position = static_cast<int>(members);
  if (request.kind == OpKind::kAllgather && !request.shape.empty()) {
    if (hit) tensor->first_dims = *hit->first_dims;
    tensor->first_dims.resize(members);
    tensor->first_dims[static_cast<std::size_t>(position)] = request.shape[0];
  }
  tensor->request = std::move(request);
  by_key_.emplace(key_of(tensor->request), tensor);
  if (tensor->cached_slot) by_slot_.emplace(*tensor->cached_slot, tensor);
  if (tensor->request.group_size > 0) ++groups_[group_of(tensor->request)].open;
  return tensor;
}

void ReadyTable::note_order(PendingTensor& tensor, int rank, int position) {
  const std::uint64_t stamp = ++submissions_[static_cast<std::size_t>(rank)];
  if (position >= tensor.order_position) return;
  tensor.order_position = position;
  tensor.order = stamp;
}

void ReadyTable::mark(PendingRef tensor, int rank, int position) {
  note_order(*tensor, rank, position);
  tensor->reported[static_cast<std::size_t>(position)] = true;
  if (--tensor->missing == 0) complete(tensor);
}

void ReadyTable::complete(PendingRef tensor) {
  // From here on the plan speaks for the set's first member.
  if (!tensor->first_dims.empty()) tensor->request.shape[0] = tensor->first_dims[0];
  if (tensor->request.group_size == 0) return make_ready(tensor);
  Group& group = groups_[group_of(tensor->request)];
  ++group.complete;
  group.held.push_back(tensor);
  if (group.failure || tensor->mismatch || group.complete == tensor->request.group_size) {
    for (const PendingRef held : group.held) make_ready(held);
    group.held.clear();
  }
}

void ReadyTable::make_ready(PendingRef tensor) {
  ready_.push_back(tensor);
  ready_bytes_ += batch_bytes(*tensor);
}

std::vector<PendingRef> ReadyTable::take_ready() {
  std::sort(ready_.begin(), ready_.end(), [](PendingRef a, PendingRef b) {
    return std::tie(a->request.process_set, a->order) < std::tie(b->request.process_set, b->order);
  });
  ready_bytes_ = 0;
  return std::exchange(ready_, {});
}

std::optional<std::string> ReadyTable::group_failure(const PendingTensor& tensor) const {
  if (tensor.request.group_size == 0) return std::nullopt;
  const auto found = groups_.find(group_of(tensor.request));
  return found == groups_.end() ? std::nullopt : found->second.failure;
}

void ReadyTable::fail_group(const PendingTensor& tensor, const std::string& reason) {
  if (tensor.request.group_size == 0) return;
  Group& group = groups_[group_of(tensor.request)];
  if (!group.failure) group.failure = reason;
  for (const PendingRef held : group.held) make_ready(held);
  group.held.clear();
}

void ReadyTable::erase(PendingRef tensor) {
  by_key_.erase(key_of(tensor->request));
  if (tensor->cached_slot) by_slot_.erase(*tensor->cached_slot);
  if (const auto ready = std::find(ready_.begin(), ready_.end(), tensor); ready != ready_.end()) {
    ready_bytes_ -= batch_bytes(*tensor);
    ready_.erase(ready);
  }
  if (tensor->request.group_size > 0) {
    const auto group = groups_.find(group_of(tensor->request));
    std::erase(group->second.held, tensor);
    if (--group->second.open == 0) groups_.erase(group);
  }
  pending_.erase(tensor);
}

std::vector<int> ReadyTable::missing_ranks(const PendingTensor& tensor) const {
  std::vector<int> missing;
  const auto& members = sets_.ranks(tensor.request.process_set);
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (!tensor.reported[i]) missing.push_back(members[i]);
  }
  return missing;
}

}  // namespace hvd::control
