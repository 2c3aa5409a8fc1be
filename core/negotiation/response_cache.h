#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/expect.h"
#include "negotiation/messages.h"

namespace hvd::control {

/// Remembers what the ranks agreed on for a tensor, so that asking for it again takes one bit.
///
/// Every rank holds an identical copy: it changes only by put() and touch(), called in the order of
/// the plan. Slots are numbers below the capacity; the least recently used entry gives its slot up.
/// Not thread-safe.
class ResponseCache {
 public:
  /// What a put() displaced: the response that no longer is in `slot`.
  struct Displaced {
    std::uint32_t slot = 0;
    wire::Response response = {};
  };

  /// Slots that a report cannot name are of no use: at most wire::kMaxSlots.
  explicit ResponseCache(std::size_t capacity) : capacity_(std::min(capacity, wire::kMaxSlots)) {}

  /// Whether results of this kind are remembered at all (join and the changes of process sets are
  /// rare, and mean something else each time).
  static bool cacheable(const wire::Request&) noexcept;
  /// The slot of this tensor, whatever its parameters are now.
  std::optional<std::uint32_t> find(const wire::Request&) const;
  /// Whether `request`, of the rank at `position` in its set, asks for exactly what the slot holds.
  bool matches(std::uint32_t slot, const wire::Request& request, int position) const;
  bool holds(std::uint32_t slot) const noexcept {
    return slot < slots_.size() && slots_[slot].used;
  }
  /// As the set's first member asked. Of an unnamed operation the name and the ordinal mean
  /// nothing. @pre holds(slot)
  const wire::Response& at(std::uint32_t slot) const {
    HVD_EXPECT(holds(slot), "the slot is in use");
    return slots_[slot].response;
  }
  /// The request that a cache hit at `slot` stands for. @pre holds(slot)
  wire::Request expand(std::uint32_t slot, std::uint64_t ordinal, int position) const;
  static wire::Request expand(const wire::Response&, std::uint64_t ordinal, int position);

  /// Inserts or replaces, and makes it the most recently used. Does nothing when the capacity is 0
  /// or the kind is not cacheable.
  /// @pre an allgather's shape is not empty and it has a first dimension for every member
  std::optional<Displaced> put(wire::Response);
  /// Makes it the most recently used. @pre holds(slot)
  void touch(std::uint32_t slot);

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

  std::size_t capacity_;
  std::vector<Slot> slots_;
  std::unordered_map<std::string, std::uint32_t> by_key_;
  std::list<std::uint32_t> recency_;  ///< least recently used first
};

}  // namespace hvd::control
