#include "negotiation/ready_table.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "base/expect.h"
#include "base/text.h"
#include "hvd/error.h"
#include "negotiation/validator.h"

namespace hvd::control {

std::int64_t batch_bytes(const PendingTensor& tensor) {
  const wire::Request& request = tensor.request;
  if (!wire::gathers(request.kind) || request.shape.empty()) {
    return saturating_product(request.elements(),
                              static_cast<std::int64_t>(size_of(request.wire_dtype())));
  }
  return gathered_bytes(request, tensor.first_dims);
}

void ReadyTable::check(const Submitters& submitters, const wire::Request& request) const {
  const auto lowest_of = [](const RankSet& ranks) { return text("rank ", ranks.lowest()); };
  if (request.by_members()) {
    check_own_members(submitters, request);
  } else {
    check_members(submitters, request);
  }
  if (intersects(joined_, submitters.ranks)) {
    throw Error(lowest_of(intersection(joined_, submitters.ranks)) + " submitted " +
                describe(request) + " although it has joined");
  }
}

void ReadyTable::check_members(const Submitters& submitters, const wire::Request& request) const {
  if (request.kind == OpKind::kRemoveProcessSet && request.process_set != 0 &&
      request.process_set != request.removed_set) {
    throw Error(text(describe(request), ": expected an operation of all ranks or of process set ",
                     request.removed_set, ", which it removes, got one of ", request.process_set));
  }
  const bool known = sets_.contains(request.process_set);
  if (known && hvd::contains(sets_.rank_set(request.process_set), submitters.ranks)) return;
  const RankSet all(submitters.ranks);
  throw Error(text("rank ",
                   (known ? difference(all, sets_.rank_set(request.process_set)) : all).lowest(),
                   " submitted ", describe(request), " of process set ", request.process_set,
                   ", which it is not in"));
}

void ReadyTable::check_own_members(const Submitters& submitters,
                                   const wire::Request& request) const {
  const std::vector<int>& list = request.new_set;
  const auto known = by_key_.find(key_of(request));
  const bool valid = known != by_key_.end() && known->second->request.new_set == list
                         ? hvd::contains(known->second->own_members, submitters.ranks)
                         : request.name.ends_with(members_text(list)) &&
                               static_cast<std::size_t>(list.back()) < sets_.ranks(0).size() &&
                               hvd::contains(RankSet::of(list), submitters.ranks);
  if (valid) return;
  throw Error(text("rank ", RankSet(submitters.ranks).lowest(), " submitted ", describe(request),
                   ", which it is not in, or whose list of ranks is wrong"));
}

PendingRef ReadyTable::add(const Submitters& submitters, wire::Request request, TimePoint now) {
  check(submitters, request);
  const auto found = by_key_.find(key_of(request));
  if (found == by_key_.end()) {
    const PendingRef created = create(submitters, std::move(request), now);
    if (!joined_.empty() && created->request.kind != OpKind::kJoin) mark_absent(created, joined_);
    mark(created, submitters);
    return created;
  }
  const PendingRef tensor = found->second;
  if (intersects(tensor->reported, submitters.ranks)) {
    throw Error(text("rank ", intersection(tensor->reported, submitters.ranks).lowest(),
                     " submitted ", describe(request), " twice before it was done"));
  }
  if (tensor->cached_slot && submitters.slot != tensor->cached_slot)
    forget_slot(*tensor->cached_slot);
  if (wire::gathers(request.kind) && !request.shape.empty() && !tensor->first_dims.empty()) {
    fill_first_dims(*tensor, submitters, request.shape[0]);
  }
  join_group(tensor, submitters, request);
  compare(*tensor, submitters.ranks.front().first, std::move(request));
  mark(tensor, submitters);
  return tensor;
}

// In set 0 a rank is its own position.
std::size_t ReadyTable::position_of(const PendingTensor& tensor, int rank) const {
  return static_cast<std::size_t>(sets_.position(tensor.request.process_set, rank));
}

void ReadyTable::fill_first_dims(PendingTensor& tensor, const Submitters& submitters,
                                 std::int64_t of_request) const {
  std::span<const wire::DimRun> runs = submitters.first_dims;
  int left = runs.empty() ? 0 : runs.front().ranks;
  for_each_rank(submitters.ranks, [&](int rank) {
    const std::size_t position = position_of(tensor, rank);
    std::int64_t& dim = tensor.first_dims[position];
    if (submitters.first_dims_of_members != nullptr) {
      dim = (*submitters.first_dims_of_members)[position];
    } else if (runs.empty()) {
      dim = of_request;
    } else {
      dim = runs.front().dim;
      if (--left > 0) return;
      runs = runs.subspan(1);
      left = runs.empty() ? 0 : runs.front().ranks;
    }
  });
}

// Keeps the lowest rank's request and that of the lowest rank that disagrees with it, so that plans
// and the texts of mismatches do not depend on the order in which reports arrive.
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

bool ReadyTable::add_hit(const Submitters& submitters) {
  HVD_EXPECT(submitters.slot.has_value(), "the submitters have a slot");
  const std::uint32_t slot = *submitters.slot;
  if (slot >= by_slot_.size() || !by_slot_[slot]) return false;
  const PendingRef tensor = *by_slot_[slot];
  if (!hvd::contains(sets_.rank_set(tensor->request.process_set), submitters.ranks) ||
      intersects(tensor->reported, submitters.ranks) || intersects(joined_, submitters.ranks))
    return false;  // the caller reports the error
  const int lowest = submitters.ranks.front().first;
  if (lowest < tensor->reference_rank) {
    tensor->reference_rank = lowest;
    if (!tensor->first_dims.empty())
      tensor->request.shape[0] = tensor->first_dims[position_of(*tensor, lowest)];
  }
  mark(tensor, submitters);
  return true;
}

void ReadyTable::forget_slot(std::uint32_t slot) {
  if (slot >= by_slot_.size() || !by_slot_[slot]) return;
  (*by_slot_[slot])->cached_slot.reset();
  by_slot_[slot].reset();
}

PendingRef ReadyTable::create(const Submitters& submitters, wire::Request&& request,
                              TimePoint now) {
  const auto members =
      request.by_members() ? request.new_set.size() : sets_.ranks(request.process_set).size();
  const PendingRef tensor = pending_.emplace(pending_.end());
  tensor->reference_rank = submitters.ranks.front().first;
  tensor->members = tensor->missing = static_cast<int>(members);
  tensor->first_seen = now;
  if (request.by_members()) tensor->own_members = RankSet::of(request.new_set);
  if (submitters.slot && !request.unnamed) {
    tensor->cached_slot = submitters.slot;
    if (by_slot_.size() <= *submitters.slot) by_slot_.resize(*submitters.slot + 1);
    by_slot_[*submitters.slot] = tensor;
  }
  const bool gathers = wire::gathers(request.kind) && !request.shape.empty();
  if (request.kind == OpKind::kJoin) join_ = tensor;
  tensor->request = std::move(request);
  if (gathers) {
    if (submitters.slot) tensor->first_dims = *submitters.first_dims_of_members;
    tensor->first_dims.resize(members);
    if (!submitters.slot) fill_first_dims(*tensor, submitters, tensor->request.shape[0]);
  }
  by_key_.emplace(key_of(tensor->request), tensor);
  join_group(tensor, submitters, tensor->request);
  return tensor;
}

void ReadyTable::mark(PendingRef tensor, const Submitters& submitters) {
  if (submitters.ranks.front().first == tensor->reference_rank) tensor->order = submitters.stamp;
  tensor->reported.add(submitters.ranks);
  tensor->missing -= count(submitters.ranks);
  if (tensor->missing == 0) complete(tensor);
}

void ReadyTable::mark_absent(PendingRef tensor, const RankSet& ranks) {
  const RankSet gone = intersection(ranks, missing(*tensor));
  if (gone.empty()) return;
  tensor->absent.add(gone);
  if (!tensor->first_dims.empty()) {
    // The response in the slot includes the first dimensions of these members.
    if (tensor->cached_slot) forget_slot(*tensor->cached_slot);
    for_each_rank(gone, [&](int rank) { tensor->first_dims[position_of(*tensor, rank)] = 0; });
  }
  tensor->missing -= count(gone);
}

void ReadyTable::add_joined(RankSpan ranks) {
  last_to_join_ = ranks.back().last;
  const RankSet joining = difference(ranks, joined_);
  if (joining.empty()) return;
  joined_.add(joining);
  for (PendingRef tensor = pending_.begin(); tensor != pending_.end(); ++tensor) {
    if (tensor->request.kind == OpKind::kJoin || tensor->missing == 0) continue;
    const int missing_before = tensor->missing;
    mark_absent(tensor, joining);
    if (tensor->missing == 0 && missing_before > 0) complete(tensor);
  }
}

void ReadyTable::restart_join_clock(TimePoint now) {
  if (!join_) return;
  (*join_)->first_seen = now;
  (*join_)->warned = false;
  pending_.splice(pending_.end(), pending_, *join_);  // oldest first
}

void ReadyTable::end_join() noexcept { joined_.clear(); }

void ReadyTable::clear() {
  while (!pending_.empty()) erase(pending_.begin());
  groups_.clear();
}

void ReadyTable::drop_set(int process_set) {
  for (PendingRef tensor = pending_.begin(); tensor != pending_.end();) {
    const PendingRef next = std::next(tensor);
    if (tensor->request.process_set == process_set) erase(tensor);
    tensor = next;
  }
  std::erase_if(groups_,
                [&](const auto& entry) { return entry.first.starts_with(text(process_set, '/')); });
}

void ReadyTable::complete(PendingRef tensor) {
  wire::Request& request = tensor->request;
  if (tensor->dissent) {
    tensor->mismatch = find_mismatch(request, tensor->reference_rank, tensor->dissent->request,
                                     tensor->dissent->rank);
  } else {
    tensor->mismatch = find_fault(
        request, request.by_members() ? request.new_set : sets_.ranks(request.process_set),
        tensor->absent.to_vector());
    // A plan carries the request of the set's first member.
    if (!tensor->first_dims.empty()) request.shape[0] = tensor->first_dims[0];
  }
  if (!tensor->mismatch && batch_bytes(*tensor) == kMaxBytes) {
    tensor->mismatch = describe(request) + ": the result has more than 2^63 bytes";
  }
  if (request.group_size == 0) return make_ready(tensor, !tensor->mismatch);
  if (tensor->mismatch || tensor->groups.front()->failure) return make_ready(tensor, false);
  TensorGroup& group = *tensor->groups.front();
  group.held.push_back(tensor);
  tensor->held = true;
  if (group.held.size() < static_cast<std::size_t>(group.size)) return;
  const bool of_one_sort = std::ranges::all_of(
      group.held, [&](PendingRef member) { return may_share_batch(member->request, request); });
  for (const PendingRef member : std::exchange(group.held, {})) make_ready(member, of_one_sort);
}

void ReadyTable::make_ready(PendingRef tensor, bool may_gather) {
  tensor->held = false;
  tensor->ready = true;
  const auto sort = may_gather ? fusion_sort(tensor->request) : std::nullopt;
  if (!sort) return at_once_.push_back(tensor);
  Gathering& gathering = gathering_[*sort];
  gathering.tensors.push_back(tensor);
  gathering.bytes = saturating_sum(gathering.bytes, batch_bytes(*tensor));
}

void ReadyTable::forget_ready(PendingRef tensor) {
  if (std::erase(at_once_, tensor) > 0) return;
  const auto sort = gathering_.find(fusion_sort(tensor->request).value());
  Gathering& gathering = sort->second;
  std::erase(gathering.tensors, tensor);
  if (gathering.tensors.empty()) {
    gathering_.erase(sort);
    return;
  }
  gathering.bytes = 0;
  for (const PendingRef other : gathering.tensors)
    gathering.bytes = saturating_sum(gathering.bytes, batch_bytes(*other));
}

// Whether these ranks submit another operation in the place of a member of the group that they have
// not submitted yet. (A rank that has already submitted the member begins the next use of the
// group.)
bool ReadyTable::replaces_member(const TensorGroup& group, const Submitters& submitters,
                                 const wire::Request& request) const {
  const auto member = group.seen.find(request.group_index);
  if (member == group.seen.end() || member->second == key_of(request)) return false;
  const auto pending = by_key_.find(member->second);
  return pending != by_key_.end() && !intersects(pending->second->reported, submitters.ranks);
}

void ReadyTable::join_group(PendingRef tensor, const Submitters& submitters,
                            const wire::Request& request) {
  if (request.group_size == 0) return;
  std::string key = group_of(request);
  const auto same = [&](const std::shared_ptr<TensorGroup>& group) { return group->key == key; };
  if (std::any_of(tensor->groups.begin(), tensor->groups.end(), same)) return;
  std::shared_ptr<TensorGroup>& current = groups_[key];
  if (current && replaces_member(*current, submitters, request)) {
    const PendingTensor& other = *by_key_.find(current->seen.at(request.group_index))->second;
    tensor->groups.push_back(current);
    return fail_group(
        *current, {StatusCode::kMismatch,
                   text("member ", request.group_index, " is ", describe(other.request),
                        " on rank ", other.reference_rank, " and ", describe(request), " on rank ",
                        submitters.ranks.front().first)});
  }
  if (!current || !current->seen.try_emplace(request.group_index, key_of(request)).second) {
    current = std::make_shared<TensorGroup>();
    current->key = std::move(key);
    current->size = request.group_size;
    current->seen.emplace(request.group_index, key_of(request));
  }
  tensor->groups.push_back(current);
  if (current->size != request.group_size) {
    fail_group(*current, {StatusCode::kMismatch,
                          text("one member has a group of ", current->size, " members, ",
                               describe(request), " has one of ", request.group_size)});
  }
}

std::vector<PendingRef> ReadyTable::extract_ready(const KeepGathering& keep_gathering) {
  std::vector<PendingRef> taken = std::exchange(at_once_, {});
  const bool leaves_nothing = std::ranges::any_of(taken, [](PendingRef tensor) {
    return tensor->request.kind == OpKind::kJoin ||
           tensor->request.kind == OpKind::kRemoveProcessSet;
  });
  for (auto sort = gathering_.begin(); sort != gathering_.end();) {
    if (!leaves_nothing && keep_gathering && keep_gathering(sort->first, sort->second.bytes)) {
      ++sort;
      continue;
    }
    taken.insert(taken.end(), sort->second.tensors.begin(), sort->second.tensors.end());
    sort = gathering_.erase(sort);
  }
  for (const PendingRef tensor : taken) tensor->ready = false;
  std::sort(taken.begin(), taken.end(), [](PendingRef a, PendingRef b) {
    return std::tie(a->request.process_set, a->order, a->reference_rank) <
           std::tie(b->request.process_set, b->order, b->reference_rank);
  });
  return taken;
}

std::optional<Status> ReadyTable::group_failure(const PendingTensor& tensor) const {
  return tensor.groups.empty() ? std::nullopt : tensor.groups.front()->failure;
}

void ReadyTable::fail_group(const PendingTensor& tensor, const Status& reason) {
  for (const auto& group : tensor.groups) fail_group(*group, reason);
}

void ReadyTable::fail_group(TensorGroup& group, const Status& reason) {
  if (!group.failure) group.failure = reason;
  for (const PendingRef held : std::exchange(group.held, {})) make_ready(held, false);
}

void ReadyTable::erase(PendingRef tensor) {
  if (join_ == tensor) join_.reset();
  by_key_.erase(key_of(tensor->request));
  if (tensor->cached_slot) forget_slot(*tensor->cached_slot);
  if (tensor->ready) forget_ready(tensor);
  for (const auto& group : tensor->groups) {
    std::erase(group->held, tensor);
    if (++group->gone < group->size) continue;
    const auto current = groups_.find(group->key);
    if (current != groups_.end() && current->second == group) groups_.erase(current);
  }
  pending_.erase(tensor);
}

RankSpan ReadyTable::members_of(const PendingTensor& tensor) const {
  return tensor.request.by_members() ? tensor.own_members
                                     : sets_.rank_set(tensor.request.process_set);
}

const PendingTensor* ReadyTable::find(const wire::Request& request) const {
  const auto found = by_key_.find(key_of(request));
  return found == by_key_.end() ? nullptr : &*found->second;
}

RankSet ReadyTable::missing(const PendingTensor& tensor) const {
  RankSet missing = difference(members_of(tensor), tensor.reported);
  missing.remove(tensor.absent);
  return missing;
}

}  // namespace hvd::control
