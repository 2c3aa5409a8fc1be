#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/expect.h"

namespace hvd {

/// first to last, both included.
struct RankRange {
  int first = 0;
  int last = 0;
  friend bool operator==(const RankRange&, const RankRange&) = default;
};

/// A set of ranks as ranges: ascending, disjoint, and not adjacent to each other.
using RankSpan = std::span<const RankRange>;

int count(RankSpan) noexcept;
bool contains(RankSpan set, int rank) noexcept;
bool contains(RankSpan set, RankSpan part) noexcept;
bool intersects(RankSpan, RankSpan) noexcept;

template <class Visit>
void for_each_rank(RankSpan set, Visit&& visit) {
  for (const RankRange range : set) {
    for (int rank = range.first; rank <= range.last; ++rank) visit(rank);
  }
}

/// A set of ranks stored as ranges, so that ten thousand neighbouring ranks cost as much as one.
/// Every operation is linear in the number of ranges.
class RankSet {
 public:
  RankSet() = default;
  explicit RankSet(int rank) : ranges_{{rank, rank}} {}
  RankSet(int first, int last) : ranges_{{first, last}} {}
  explicit RankSet(RankSpan ranges) : ranges_(ranges.begin(), ranges.end()) {}
  /// @param ranks ascending, without duplicates
  static RankSet of(std::span<const int> ranks);

  // NOLINTNEXTLINE(google-explicit-constructor): a set is its ranges
  operator RankSpan() const noexcept { return ranges_; }
  const std::vector<RankRange>& ranges() const noexcept { return ranges_; }
  bool empty() const noexcept { return ranges_.empty(); }
  /// @pre !empty()
  int lowest() const noexcept {
    HVD_EXPECT(!empty(), "there is a rank");
    return ranges_.front().first;
  }
  int highest() const noexcept {
    HVD_EXPECT(!empty(), "there is a rank");
    return ranges_.back().last;
  }
  std::vector<int> to_vector() const;

  /// Appends a range that begins at or above the last one. Adjacent and overlapping ranges are
  /// merged.
  void append(RankRange range);
  void add(RankSpan);
  void remove(RankSpan);
  void clear() noexcept { ranges_.clear(); }
  friend bool operator==(const RankSet&, const RankSet&) = default;

 private:
  std::vector<RankRange> ranges_;
};

RankSet intersection(RankSpan, RankSpan);
RankSet difference(RankSpan, RankSpan);

}  // namespace hvd
