#include "base/rank_set.h"

#include <algorithm>

namespace hvd {
namespace {

// The first range that ends at or after `rank`.
RankSpan::iterator find_end_from(RankSpan set, int rank) noexcept {
  return std::partition_point(set.begin(), set.end(),
                              [rank](const RankRange& range) { return range.last < rank; });
}

}  // namespace

int count(RankSpan set) noexcept {
  int ranks = 0;
  for (const RankRange range : set) ranks += range.last - range.first + 1;
  return ranks;
}

bool contains(RankSpan set, int rank) noexcept {
  const auto found = find_end_from(set, rank);
  return found != set.end() && found->first <= rank;
}

bool contains(RankSpan set, RankSpan part) noexcept {
  for (const RankRange range : part) {
    const auto found = find_end_from(set, range.first);
    if (found == set.end() || found->first > range.first || found->last < range.last) return false;
  }
  return true;
}

bool intersects(RankSpan a, RankSpan b) noexcept {
  if (a.size() > b.size()) std::swap(a, b);
  for (const RankRange range : a) {
    const auto found = find_end_from(b, range.first);
    if (found != b.end() && found->first <= range.last) return true;
  }
  return false;
}

RankSet RankSet::of(std::span<const int> ranks) {
  RankSet set;
  for (const int rank : ranks) set.append({rank, rank});
  return set;
}

std::vector<int> RankSet::to_vector() const {
  std::vector<int> ranks;
  ranks.reserve(static_cast<std::size_t>(count(ranges_)));
  for_each_rank(ranges_, [&](int rank) { ranks.push_back(rank); });
  return ranks;
}

void RankSet::append(RankRange range) {
  if (!ranges_.empty() && ranges_.back().last + 1 >= range.first) {
    ranges_.back().last = std::max(ranges_.back().last, range.last);
  } else {
    ranges_.push_back(range);
  }
}

void RankSet::add(RankSpan other) {
  if (other.empty()) return;
  if (ranges_.empty() || ranges_.back().last < other.front().first) {
    for (const RankRange range : other) append(range);
    return;
  }
  if (other.size() == 1) {  // in place: merges the ranges that it overlaps or touches
    const RankRange added = other.front();
    const auto first =
        std::partition_point(ranges_.begin(), ranges_.end(),
                             [&](const RankRange& r) { return r.last + 1 < added.first; });
    auto last = first;
    RankRange joined = added;
    for (; last != ranges_.end() && last->first <= added.last + 1; ++last) {
      joined = {std::min(joined.first, last->first), std::max(joined.last, last->last)};
    }
    if (first == last) {
      ranges_.insert(first, joined);
    } else {
      *first = joined;
      ranges_.erase(first + 1, last);
    }
    return;
  }
  RankSet both;
  both.ranges_.reserve(ranges_.size() + other.size());
  auto own = ranges_.begin();
  auto their = other.begin();
  while (own != ranges_.end() || their != other.end()) {
    const bool mine = their == other.end() || (own != ranges_.end() && own->first <= their->first);
    both.append(mine ? *own++ : *their++);
  }
  ranges_ = std::move(both.ranges_);
}

void RankSet::remove(RankSpan other) {
  if (intersects(ranges_, other)) *this = difference(ranges_, other);
}

RankSet intersection(RankSpan a, RankSpan b) {
  RankSet both;
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    const int first = std::max(x->first, y->first);
    const int last = std::min(x->last, y->last);
    if (first <= last) both.append({first, last});
    x->last < y->last ? ++x : ++y;
  }
  return both;
}

RankSet difference(RankSpan a, RankSpan b) {
  RankSet rest;
  auto hole = b.begin();
  for (RankRange range : a) {
    while (hole != b.end() && hole->last < range.first) ++hole;
    for (auto next = hole; next != b.end() && next->first <= range.last; ++next) {
      if (next->first > range.first) rest.append({range.first, next->first - 1});
      range.first = next->last + 1;
    }
    if (range.first <= range.last) rest.append(range);
  }
  return rest;
}

}  // namespace hvd
