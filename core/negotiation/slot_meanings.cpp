#include "negotiation/slot_meanings.h"

#include <utility>

namespace hvd::control {
namespace {

constexpr std::uint64_t kPlansToLookBack = 64;

}  // namespace

void SlotMeanings::update(const ResponseCache& cache, std::uint64_t sequence,
                          const std::function<void(std::uint32_t, const SlotMeaning&)>& displaced) {
  foreign_ = {};
  for (std::uint32_t slot = 0; slot < cache.size(); ++slot) {
    const wire::Request& request = cache.at(slot).request;
    if (request.process_set != 0) foreign_.add(slot);
    SlotMeaning now{request.process_set, request.unnamed ? std::string() : request.name,
                    request.kind};
    if (slot == current_.size()) {
      current_.push_back(std::move(now));
      continue;
    }
    if (current_[slot] == now) continue;
    SlotMeaning former = std::exchange(current_[slot], std::move(now));
    displaced(slot, former);
    former_[slot].push_back({std::move(former), sequence});
  }
  std::erase_if(former_, [&](const auto& of_slot) {
    return of_slot.second.back().until + kPlansToLookBack <= sequence;
  });
}

const SlotMeaning* SlotMeanings::find(std::uint32_t slot, std::uint64_t as_of) const {
  if (const auto history = former_.find(slot); history != former_.end()) {
    for (const Former& former : history->second) {
      if (former.until > as_of) return &former.meaning;
    }
  }
  return current(slot);
}

}  // namespace hvd::control
