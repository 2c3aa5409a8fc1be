#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>

#include "negotiation/messages.h"
#include "negotiation/response_cache.h"

namespace hvd::control {

// Note [What a slot means]
// A rank's report refers to cache slots as they were after the last plan it applied. Meanwhile
// further plans may have been decided, and may have put something else into a slot. So each report
// carries the sequence of that last plan, and the coordinator keeps what a slot held before, until
// every rank has applied the plan that displaced it. A hit is thus always read as it was meant: no
// acknowledgement, no second round. Ranks with nothing to say acknowledge now and then
// (Negotiator), so that this memory is bounded.

/// What cache slots held before, as long as a rank may still mean it. Coordinator only; pure; not
/// thread-safe.
class SlotHistory {
 public:
  /// The plan `until` puts something else into the slot. @pre `until` is not before that of the
  /// last call
  void add(ResponseCache::Displaced, std::uint64_t until);
  /// What the slot meant after plan `as_of`; null: what it means now.
  const wire::Response* find(std::uint32_t slot, std::uint64_t as_of) const;
  /// No rank refers to slots as of an earlier plan any more.
  void forget_before(std::uint64_t plan);
  bool empty() const noexcept { return former_.empty(); }
  std::size_t size() const noexcept;

 private:
  struct Former {
    wire::Response response = {};
    std::uint64_t until = 0;
  };
  std::map<std::uint32_t, std::deque<Former>> former_;  // by slot, oldest first; none empty
};

}  // namespace hvd::control
