#include "negotiation/slot_history.h"

#include <iterator>
#include <utility>

#include "base/expect.h"

namespace hvd::control {

void SlotHistory::add(ResponseCache::Displaced displaced, std::uint64_t until) {
  std::deque<Former>& history = former_[displaced.slot];
  HVD_EXPECT(history.empty() || history.back().until <= until, "plans come in their order");
  history.push_back({std::move(displaced.response), until});
}

const wire::Response* SlotHistory::find(std::uint32_t slot, std::uint64_t as_of) const {
  const auto history = former_.find(slot);
  if (history == former_.end()) return nullptr;
  for (const Former& former : history->second) {
    if (former.until > as_of) return &former.response;
  }
  return nullptr;
}

void SlotHistory::forget_before(std::uint64_t plan) {
  for (auto slot = former_.begin(); slot != former_.end();) {
    auto& history = slot->second;
    while (!history.empty() && history.front().until <= plan) history.pop_front();
    slot = history.empty() ? former_.erase(slot) : std::next(slot);
  }
}

std::size_t SlotHistory::size() const noexcept {
  std::size_t responses = 0;
  for (const auto& [slot, history] : former_) responses += history.size();
  return responses;
}

}  // namespace hvd::control
