#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "base/expect.h"

namespace hvd {

/// The ranks from first to last, both included.
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

  /// Appends a range that does not begin below the last one. Merges the two if they are adjacent or
  /// overlap.
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

/// A value for each of the ranks 0 to size-1, stored once per run of equal neighbours.
template <class T>
class RankMap {
 public:
  struct Entry {
    RankRange ranks = {};
    T value = {};
  };

  explicit RankMap(std::size_t size) {
    if (size > 0) entries_.push_back({{0, static_cast<int>(size) - 1}, T{}});
  }

  /// @pre the rank exists, here and below (checked by find())
  const T& at(int rank) const { return entries_[find(rank)].value; }
  void assign(RankSpan ranks, const T& value) {
    for (const RankRange range : ranks) assign(range, value);
  }
  /// Calls visit(RankRange, value) for each range within `ranks` whose ranks have the same value.
  template <class Visit>
  void for_each(RankSpan ranks, Visit&& visit) const {
    for (const RankRange range : ranks) {
      for (std::size_t i = find(range.first);
           i < entries_.size() && entries_[i].ranks.first <= range.last; ++i) {
        visit(RankRange{std::max(entries_[i].ranks.first, range.first),
                        std::min(entries_[i].ranks.last, range.last)},
              entries_[i].value);
      }
    }
  }
  const std::vector<Entry>& entries() const noexcept { return entries_; }

 private:
  std::size_t find(int rank) const {
    HVD_EXPECT(!entries_.empty() && rank >= 0 && rank <= entries_.back().ranks.last,
               "the rank exists");
    const auto found =
        std::partition_point(entries_.begin(), entries_.end(),
                             [rank](const Entry& entry) { return entry.ranks.last < rank; });
    return static_cast<std::size_t>(found - entries_.begin());
  }

  void assign(RankRange range, const T& value) {
    std::size_t first = find(range.first);
    std::size_t last = find(range.last);
    if (first == last && entries_[first].value == value) return;
    // Merges the neighbours that already have the value.
    if (entries_[first].ranks.first == range.first && first > 0) --first;
    if (entries_[last].ranks.last == range.last && last + 1 < entries_.size()) ++last;
    std::vector<Entry> changed;
    const auto put = [&](RankRange ranks, const T& what) {
      if (ranks.first > ranks.last) return;
      if (!changed.empty() && changed.back().value == what) {
        changed.back().ranks.last = ranks.last;
      } else {
        changed.push_back({ranks, what});
      }
    };
    put({entries_[first].ranks.first, std::min(entries_[first].ranks.last, range.first - 1)},
        entries_[first].value);
    put(range, value);
    put({std::max(entries_[last].ranks.first, range.last + 1), entries_[last].ranks.last},
        entries_[last].value);
    const auto from = entries_.begin() + static_cast<std::ptrdiff_t>(first);
    const std::size_t replaced = last - first + 1;
    const std::size_t kept = std::min(replaced, changed.size());
    std::move(changed.begin(), changed.begin() + static_cast<std::ptrdiff_t>(kept), from);
    const auto rest = from + static_cast<std::ptrdiff_t>(kept);
    if (replaced > kept) {
      entries_.erase(rest, from + static_cast<std::ptrdiff_t>(replaced));
    } else {
      entries_.insert(rest, changed.begin() + static_cast<std::ptrdiff_t>(kept), changed.end());
    }
  }

  std::vector<Entry> entries_;  // ascending, without gaps
};

}  // namespace hvd
