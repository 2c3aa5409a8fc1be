#include "negotiation/response_cache.h"

#include <iterator>
#include <utility>

#include "negotiation/process_set_table.h"

namespace hvd::control {

bool ResponseCache::cacheable(const wire::Request& request) noexcept {
  return request.kind != OpKind::kJoin && request.kind != OpKind::kAddProcessSet &&
         request.kind != OpKind::kRemoveProcessSet;
}

// Named tensors are identified by name. Equal unnamed tensors share a response: the key contains
// everything that ranks must agree on, so a hit only has to add the ordinal.
std::string ResponseCache::key_of(const wire::Request& request) {
  if (!request.unnamed) return tensor_key(request.process_set, request.name);
  wire::Request alike = request;
  alike.name.clear();
  alike.ordinal = static_cast<std::uint64_t>(request.group_index);
  if (wire::gathers(request.kind) && !alike.shape.empty()) alike.shape[0] = 0;
  const wire::Bytes bytes = wire::encode(alike);
  std::string key(1, '\0');
  key.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return key;
}

std::optional<std::uint32_t> ResponseCache::find(const wire::Request& request) const {
  if (by_key_.empty() || !cacheable(request)) return std::nullopt;
  const auto found = by_key_.find(key_of(request));
  if (found == by_key_.end()) return std::nullopt;
  return found->second;
}

wire::Request ResponseCache::expand(const wire::Response& response, std::uint64_t ordinal,
                                    int position) {
  wire::Request request = response.request;
  if (request.unnamed) {
    request.ordinal = ordinal;
    request.name = wire::unnamed_name(request, ordinal);
  }
  if (wire::gathers(request.kind))
    request.shape[0] = response.first_dims[static_cast<std::size_t>(position)];
  return request;
}

wire::Request ResponseCache::expand(std::uint32_t slot, std::uint64_t ordinal, int position) const {
  HVD_EXPECT(holds(slot), "the slot is in use");
  return expand(at(slot), ordinal, position);
}

bool ResponseCache::matches(std::uint32_t slot, const wire::Request& request, int position) const {
  return expand(slot, request.ordinal, position) == request;
}

void ResponseCache::displace(std::uint32_t slot, std::uint64_t plan) {
  std::deque<Displaced>& displaced = displaced_[slot];
  HVD_EXPECT(displaced.empty() || displaced.back().by_plan <= plan, "plans come in their order");
  displaced.push_back({std::move(slots_[slot].response), plan});
  ++displaced_count_;
}

std::optional<std::uint32_t> ResponseCache::put(wire::Response response, std::uint64_t plan) {
  HVD_EXPECT(!wire::gathers(response.request.kind) ||
                 (!response.request.shape.empty() && !response.first_dims.empty()),
             "a gathering operation has a first dimension for every member");
  if (capacity_ == 0 || !cacheable(response.request)) return std::nullopt;
  std::string key = key_of(response.request);
  if (const auto known = by_key_.find(key); known != by_key_.end()) {
    const std::uint32_t slot = known->second;
    displace(slot, plan);
    slots_[slot].response = std::move(response);
    touch(slot);
    return slot;
  }
  std::optional<std::uint32_t> displaced;
  auto slot = static_cast<std::uint32_t>(slots_.size());
  if (slots_.size() < capacity_) {
    slots_.emplace_back();
  } else {
    slot = recency_.front();
    recency_.pop_front();
    by_key_.erase(slots_[slot].key);
    slots_of_other_sets_.remove(slot);
    displace(slot, plan);
    displaced = slot;
  }
  if (response.request.process_set != 0) slots_of_other_sets_.add(slot);
  by_key_.emplace(key, slot);
  slots_[slot] = {true, std::move(key), std::move(response), recency_.insert(recency_.end(), slot)};
  return displaced;
}

const wire::Response* ResponseCache::find_displaced(std::uint32_t slot, std::uint64_t as_of) const {
  const auto displaced = displaced_.find(slot);
  if (displaced == displaced_.end()) return nullptr;
  for (const Displaced& former : displaced->second) {
    if (former.by_plan > as_of) return &former.response;
  }
  return nullptr;
}

const wire::Response* ResponseCache::find(std::uint32_t slot, std::uint64_t as_of) const {
  if (const wire::Response* const former = find_displaced(slot, as_of)) return former;
  return holds(slot) ? &slots_[slot].response : nullptr;
}

void ResponseCache::forget_before(std::uint64_t plan) {
  for (auto slot = displaced_.begin(); slot != displaced_.end();) {
    auto& displaced = slot->second;
    while (!displaced.empty() && displaced.front().by_plan <= plan) {
      displaced.pop_front();
      --displaced_count_;
    }
    slot = displaced.empty() ? displaced_.erase(slot) : std::next(slot);
  }
}

void ResponseCache::touch(std::uint32_t slot) {
  HVD_EXPECT(holds(slot), "the slot is in use");
  recency_.splice(recency_.end(), recency_, slots_[slot].recency);
}

}  // namespace hvd::control
