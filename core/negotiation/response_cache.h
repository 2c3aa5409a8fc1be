#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/expect.h"
#include "negotiation/messages.h"

namespace hvd::control {

// Note [Meaning of a slot]
// A rank's report refers to cache slots as they were after the last plan that the rank had applied.
// Later plans may have put other responses into these slots. Therefore each report carries the
// sequence number of that plan, and a cache keeps a displaced response until no report can refer to
// it any more. The coordinator keeps it until every rank has applied the plan that displaced it;
// the other ranks keep it for a number of plans. A hit is therefore always interpreted correctly,
// without an acknowledgement or a second round. A rank that has nothing to report still
// acknowledges plans from time to time (Negotiator), which bounds this memory.

/// The last response for each tensor, so that a rank requests it again with one bit.
///
/// Every rank holds an identical copy, because it changes only by put() and touch(), called in the
/// order of the plan. Slots are numbers below the capacity; a new entry replaces the least recently
/// used one. Not thread-safe.
class ResponseCache {
 public:
  /// Uses at most wire::kMaxSlots, since reports cannot name more slots.
  explicit ResponseCache(std::size_t capacity) : capacity_(std::min(capacity, wire::kMaxSlots)) {}

  /// Whether responses of this kind are kept. Joins and changes of process sets are rare and differ
  /// each time, so they are not kept.
  static bool cacheable(const wire::Request&) noexcept;
  /// The slot of this tensor, even if its parameters have changed.
  std::optional<std::uint32_t> find(const wire::Request&) const;
  /// Whether the slot holds exactly this request of the rank at `position` in its set.
  bool matches(std::uint32_t slot, const wire::Request& request, int position) const;
  bool holds(std::uint32_t slot) const noexcept {
    return slot < slots_.size() && slots_[slot].used;
  }
  /// With the request of the set's first member. The name and the ordinal of an unnamed operation
  /// are those of an earlier use. @pre holds(slot)
  const wire::Response& at(std::uint32_t slot) const {
    HVD_EXPECT(holds(slot), "the slot is in use");
    return slots_[slot].response;
  }
  /// The request that a cache hit at `slot` stands for. @pre holds(slot)
  wire::Request expand(std::uint32_t slot, std::uint64_t ordinal, int position) const;
  static wire::Request expand(const wire::Response&, std::uint64_t ordinal, int position);

  /// Inserts or replaces a response and makes it the most recently used. Has no effect when the
  /// capacity is 0 or the kind is not cacheable.
  /// @param plan sequence number of the plan that has the response
  /// @return the slot whose former response was displaced, if one was
  /// @pre an allgather's shape is not empty and it has a first dimension for every member; `plan`
  /// is not before that of the last call
  std::optional<std::uint32_t> put(wire::Response, std::uint64_t plan);
  /// Makes it the most recently used. @pre holds(slot)
  void touch(std::uint32_t slot);

  /// The displaced response that the slot held after plan `as_of`. Null: the slot has kept its
  /// response since.
  const wire::Response* find_displaced(std::uint32_t slot, std::uint64_t as_of) const;
  /// The response that the slot held after plan `as_of`. Null: the slot is empty.
  const wire::Response* find(std::uint32_t slot, std::uint64_t as_of) const;
  /// Forgets the responses that were displaced by this plan or earlier ones.
  void forget_before(std::uint64_t plan);
  /// Number of displaced responses that are kept.
  std::size_t displaced() const noexcept { return displaced_count_; }
  /// The slots that hold operations of process sets other than 0.
  const wire::SlotSet& slots_of_other_sets() const noexcept { return slots_of_other_sets_; }

  std::size_t size() const noexcept { return by_key_.size(); }
  std::size_t capacity() const noexcept { return capacity_; }

 private:
  struct Slot {
    bool used = false;
    std::string key = {};
    wire::Response response = {};
    std::list<std::uint32_t>::iterator recency = {};
  };
  static std::string key_of(const wire::Request&);
  void displace(std::uint32_t slot, std::uint64_t plan);

  std::size_t capacity_;
  std::vector<Slot> slots_;
  std::unordered_map<std::string, std::uint32_t> by_key_;
  std::list<std::uint32_t> recency_;  ///< least recently used first
  struct Displaced {
    wire::Response response = {};
    std::uint64_t by_plan = 0;
  };
  std::map<std::uint32_t, std::deque<Displaced>>
      displaced_;  // by slot, oldest first; no entry is empty
  std::size_t displaced_count_ = 0;
  wire::SlotSet slots_of_other_sets_;
};

}  // namespace hvd::control
