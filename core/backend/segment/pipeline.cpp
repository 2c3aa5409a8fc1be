#include "backend/segment/pipeline.h"

namespace hvd::segment {

void Pipeline::begin(PhaseRules rules, std::uint64_t rounds) noexcept {
  rules_ = rules;
  rounds_ = rounds;
  first_ = segment_.next_round;
  done_ = {};
  awaited_ = false;
}

bool Pipeline::finish() noexcept {
  const bool finished = done(rules_.back().phase) == rounds_;
  if (finished) segment_.next_round = number(rounds_);
  return finished;
}

void Pipeline::complete(const PhaseRule& rule) noexcept {
  const std::uint64_t rounds = number(++done_[static_cast<std::size_t>(rule.phase)]);
  if (rule.publishes == nullptr) return;
  segment_.publish(rule.publishes, rounds);
  awaited_ = awaited_ || awaited(rule.publishes, rounds);
}

// Note [Who rings]
// All that a member waits for is that every member has got as far, so only the last one to do so
// has anybody to wake. Every access is sequentially consistent: of two that are last at the same
// time one sees the other, and either this member sees that it is the last, or the others see what
// it has done before they sleep. What frees a slot is waited for only by a member that is as many
// rounds ahead as there are slots, and such a member has said so before it looked.
bool Pipeline::awaited(ChannelSegment::Counter counter, std::uint64_t rounds) const noexcept {
  if (!segment_.all_reached(counter, rounds)) return false;
  for (const PhaseRule& rule : rules_) {
    if (rule.waits_for == counter && rule.behind > 0)
      return segment_.other_reached(rule.publishes, rounds + rule.behind - 1);
  }
  return true;
}

}  // namespace hvd::segment
