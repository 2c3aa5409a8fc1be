#include "negotiation/repeated_plan.h"

namespace hvd::control {

bool RepeatedPlan::offer(const wire::StampedHits& hits) {
  if (!known_ || known_->slots != hits.slots) {
    learning_ = hits.slots;
    return false;
  }
  waiting_ = hits;
  return true;
}

std::optional<wire::StampedHits> RepeatedPlan::give_back() {
  learning_.reset();
  return std::exchange(waiting_, std::nullopt);
}

wire::Plan RepeatedPlan::take(std::uint64_t sequence, ResponseCache& cache) {
  HVD_EXPECT(waiting(), "hits wait");
  waiting_.reset();
  wire::Plan plan = known_->plan;
  plan.sequence = known_->taken_as = sequence;
  // Twice the same in a row leaves the cache's order as it is.
  if (std::exchange(known_->just_used, true)) return plan;
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors) cache.touch(std::get<wire::SlotUse>(tensor).slot);
  }
  return plan;
}

wire::Bytes RepeatedPlan::encode(const wire::Plan& plan) const {
  const bool repeated = known_ && known_->taken_as == plan.sequence && plan.replay.empty();
  return repeated ? wire::renumber(known_->encoded, plan.sequence) : wire::encode(plan);
}

void RepeatedPlan::learn(wire::Plan plan, bool nothing_pending) {
  const std::optional<wire::SlotSet> asked = std::exchange(learning_, std::nullopt);
  if (!asked || plan.shutdown || !plan.errors.empty() || !nothing_pending) return;
  wire::SlotSet planned;
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors) {
      const auto* const cached = std::get_if<wire::SlotUse>(&tensor);
      if (cached == nullptr || !batch.absent.empty()) return;
      planned.add(cached->slot);
    }
  }
  if (planned != *asked) return;
  plan.sequence = 0;
  wire::Bytes encoded = wire::encode(plan);
  known_ = {planned, std::move(encoded), std::move(plan), true, 0};
}

}  // namespace hvd::control
