#include "negotiation/response_cache.h"

#include "negotiation/tensor_key.h"

namespace hvd::control {

bool ResponseCache::cacheable(const wire::Request& request) noexcept {
  return request.kind != OpKind::kJoin && request.kind != OpKind::kAddProcessSet &&
         request.kind != OpKind::kRemoveProcessSet;
}

// Named tensors are known by name. Unnamed ones have no identity of their own, so all that are
// alike share an response: everything that ranks must agree on is in the key, which is why a hit
// only has to add the ordinal.
std::string ResponseCache::key_of(const wire::Request& request) {
  if (!request.unnamed) return tensor_key(request.process_set, request.name);
  wire::Request alike = request;
  alike.name.clear();
  alike.ordinal = static_cast<std::uint64_t>(request.group_index);
  if (wire::gathers(request.kind) && !alike.shape.empty()) alike.shape[0] = 0;
  wire::Report carrier;
  carrier.requests.push_back(std::move(alike));
  const wire::Bytes bytes = wire::encode(carrier);
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
    request.name = wire::unnamed_name(request.kind, ordinal);
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

std::optional<ResponseCache::Displaced> ResponseCache::put(wire::Response response) {
  HVD_EXPECT(!wire::gathers(response.request.kind) ||
                 (!response.request.shape.empty() && !response.first_dims.empty()),
             "what gathers has a first dimension for every member");
  if (capacity_ == 0 || !cacheable(response.request)) return std::nullopt;
  std::string key = key_of(response.request);
  const auto known = by_key_.find(key);
  if (known != by_key_.end()) {
    Displaced displaced{known->second, std::move(slots_[known->second].response)};
    slots_[known->second].response = std::move(response);
    touch(known->second);
    return displaced;
  }
  std::optional<Displaced> displaced;
  std::uint32_t slot = 0;
  if (slots_.size() < capacity_) {
    slot = static_cast<std::uint32_t>(slots_.size());
    slots_.emplace_back();
  } else {
    slot = recency_.front();
    recency_.pop_front();
    by_key_.erase(slots_[slot].key);
    displaced = Displaced{slot, std::move(slots_[slot].response)};
  }
  by_key_.emplace(key, slot);
  slots_[slot] = {true, std::move(key), std::move(response), recency_.insert(recency_.end(), slot)};
  return displaced;
}

void ResponseCache::touch(std::uint32_t slot) {
  HVD_EXPECT(holds(slot), "the slot is in use");
  recency_.splice(recency_.end(), recency_, slots_[slot].recency);
}

}  // namespace hvd::control
