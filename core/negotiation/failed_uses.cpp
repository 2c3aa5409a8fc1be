#include "negotiation/failed_uses.h"

#include <utility>

#include "negotiation/tensor_key.h"

namespace hvd::control {

void FailedUses::add(const wire::Request& request, std::uint64_t plan, RankSet missing) {
  if (missing.empty()) return;
  uses_[tensor_key(request.process_set, request.name)].push_back({plan, std::move(missing)});
}

RankSet FailedUses::find(const wire::Request& request, RankSpan ranks, std::uint64_t as_of) const {
  RankSet found;
  if (uses_.empty()) return found;
  const auto uses = uses_.find(tensor_key(request.process_set, request.name));
  if (uses == uses_.end()) return found;
  for (const Use& use : uses->second) {
    if (use.plan > as_of) found.add(intersection(use.ranks, ranks));
  }
  return found;
}

void FailedUses::note_applied(RankSpan ranks, std::uint64_t plan) {
  for (auto& [key, uses] : uses_) {
    for (Use& use : uses) {
      if (use.plan <= plan) use.ranks.remove(ranks);
    }
    std::erase_if(uses, [](const Use& use) { return use.ranks.empty(); });
  }
  std::erase_if(uses_, [](const auto& uses) { return uses.second.empty(); });
}

void FailedUses::drop_set(int process_set) {
  const std::string prefix = tensor_key(process_set, "");
  std::erase_if(uses_, [&](const auto& uses) { return uses.first.starts_with(prefix); });
}

std::size_t FailedUses::size() const noexcept {
  std::size_t ranks = 0;
  for (const auto& [key, uses] : uses_) {
    for (const Use& use : uses) ranks += static_cast<std::size_t>(count(use.ranks));
  }
  return ranks;
}

}  // namespace hvd::control
