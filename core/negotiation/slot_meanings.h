#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "negotiation/messages.h"
#include "negotiation/response_cache.h"

namespace hvd::control {

/// Which operation a cache slot holds.
struct SlotMeaning {
  int process_set = 0;
  std::string name = {};  ///< empty if unnamed
  OpKind kind = OpKind::kAllreduce;
  bool operator==(const SlotMeaning&) const = default;
};

/// Which operations the cache slots hold for ranks that are some plans behind: what an aggregator
/// keeps of it, for some plans only. See Note [What a slot means]. Pure; not thread-safe.
class SlotMeanings {
 public:
  /// The plan `sequence` has changed the cache. @param displaced called with what a slot held
  void update(const ResponseCache&, std::uint64_t sequence,
              const std::function<void(std::uint32_t slot, const SlotMeaning&)>& displaced);
  /// After plan `as_of`; null: nothing.
  const SlotMeaning* find(std::uint32_t slot, std::uint64_t as_of) const;
  /// After the last update(); null: nothing.
  const SlotMeaning* current(std::uint32_t slot) const noexcept {
    return slot < current_.size() ? &current_[slot] : nullptr;
  }
  /// Those that now hold operations of other process sets than 0.
  const wire::SlotSet& foreign() const noexcept { return foreign_; }

 private:
  struct Former {
    SlotMeaning meaning = {};
    std::uint64_t until = 0;  ///< the plan that put something else into the slot
  };
  std::vector<SlotMeaning> current_;                     // by slot
  std::map<std::uint32_t, std::vector<Former>> former_;  // by slot, oldest first
  wire::SlotSet foreign_;
};

}  // namespace hvd::control
