#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "base/clock.h"
#include "base/rank_set.h"
#include "negotiation/messages.h"

namespace hvd::control {

// Note [Equal reports]
// In most steps all ranks request the same operations in the same order, so their reports differ
// only in the ranks. An aggregator keeps such reports together: the first one is decoded, and the
// others cost a comparison of bytes and a change of a set of ranks. As soon as a report differs,
// the aggregator adds the operations to HeldReports, one by one, as if the equal reports had
// arrived in one message.

/// Items that several ranks have reported in the same way, and these ranks. Pure; not thread-safe.
class EqualReports {
 public:
  bool empty() const noexcept { return !group_; }
  /// Keeps a first report. @pre empty(), and the group's items are not `known` ones and have no
  /// first dimensions
  void begin(wire::Report::Group&&, TimePoint now);
  /// Adds the ranks of a group with the same items.
  /// @return false when the items differ, or when one of the ranks has reported them before
  bool add(const wire::Report::Group&);
  /// Gives a group whose items are `known` ones its items. @pre not empty() if they are
  void restore(wire::Report::Group&) const;

  /// The items and all ranks that have reported them. @pre not empty()
  const wire::Report::Group& group() const noexcept;
  /// When the first report arrived. @pre not empty()
  TimePoint since() const noexcept;
  /// The bytes of the items, for wire::decode(). Empty if there are none.
  std::span<const std::byte> known_items() const noexcept { return items_; }
  /// Returns group() and leaves the object empty. @pre not empty()
  wire::Report::Group take();
  void clear() noexcept;

 private:
  std::optional<wire::Report::Group> group_;
  wire::Bytes items_;
  TimePoint since_{};
};

}  // namespace hvd::control
