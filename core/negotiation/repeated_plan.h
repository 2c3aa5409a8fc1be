#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "base/expect.h"
#include "negotiation/messages.h"
#include "negotiation/response_cache.h"

namespace hvd::control {

// Note [The whole world at once]
// In the steady state a merged report says that every rank has hit the same slots. With nothing
// else pending, what is planned then depends on nothing but the slots, the cache's contents and the
// fusion threshold. So the plan is kept, and such a report answered with it: the ready table never
// sees it. Anything else in between, or a reason to hold back, spreads the report into the table
// first, as if there were no shortcut.

/// The plan for slots that all ranks hit at once, kept as long as the cache is what it was.
/// Coordinator only; pure; not thread-safe.
///
///   offer() --known--> waiting --take() or give_back()-->
///   offer() --unknown--> learning --learn()-->
class RepeatedPlan {
 public:
  /// All ranks have hit these slots, and nothing else is pending.
  /// @return whether the plan for them is known: they wait for take() or give_back(). If not, the
  /// next plan is worth keeping, see learn().
  bool offer(const wire::StampedHits&);
  bool waiting() const noexcept { return waiting_.has_value(); }
  /// The slots that wait. @pre waiting()
  const wire::SlotSet& slots() const noexcept {
    HVD_EXPECT(waiting(), "hits wait");
    return waiting_->slots;
  }
  /// The plan for them, without its number. @pre waiting()
  const wire::Plan& plan() const noexcept {
    HVD_EXPECT(waiting(), "hits wait");
    return known_->plan;
  }
  /// Something else comes in between: the hits that have waited, for the ready table, if any have.
  std::optional<wire::StampedHits> give_back();
  /// The plan for what has waited; the cache is made what the plan makes of it. @pre waiting()
  wire::Plan take(std::uint64_t sequence, ResponseCache&);
  /// What wire::encode() gives, which costs less for the plan that take() gave last.
  wire::Bytes encode(const wire::Plan&) const;

  bool learning() const noexcept { return learning_.has_value(); }
  /// What has been decided since offer(). @param nothing_pending after it
  void learn(wire::Plan, bool nothing_pending);
  /// Another plan has changed the order of the cache.
  void note_touched() noexcept {
    if (known_) known_->just_used = false;
  }
  /// Something else is in a slot of the cache.
  void forget() noexcept { known_.reset(); }

 private:
  struct Known {
    wire::SlotSet slots = {};
    wire::Bytes encoded = {};  ///< with the sequence 0
    wire::Plan plan = {};
    bool just_used = false;      ///< the cache's order is what this plan makes of it
    std::uint64_t taken_as = 0;  ///< the number that take() last gave it
  };
  std::optional<Known> known_;
  std::optional<wire::StampedHits> waiting_;
  std::optional<wire::SlotSet> learning_;
};

}  // namespace hvd::control
