#include "negotiation/held_reports.h"

#include <algorithm>

#include "base/expect.h"

namespace hvd::control {
namespace {

void append_dims(std::vector<wire::DimRun>& runs, std::int64_t dim, int ranks) {
  if (!runs.empty() && runs.back().dim == dim) {
    runs.back().ranks += ranks;
  } else {
    runs.push_back({dim, ranks});
  }
}

class DimReader {
 public:
  explicit DimReader(const std::vector<wire::DimRun>& runs) : runs_(runs) {}
  std::int64_t next() {
    const std::int64_t dim = runs_[run_].dim;
    if (++used_ == runs_[run_].ranks) {
      ++run_;
      used_ = 0;
    }
    return dim;
  }

 private:
  const std::vector<wire::DimRun>& runs_;
  std::size_t run_ = 0;
  int used_ = 0;
};

// @pre a and b have no rank in common
std::vector<wire::DimRun> merge_dims(RankSpan a, const std::vector<wire::DimRun>& dims_of_a,
                                     RankSpan b, const std::vector<wire::DimRun>& dims_of_b) {
  HVD_EXPECT(!intersects(a, b), "the ranks are others");
  if (dims_of_a.empty()) return {};
  if (dims_of_a.size() == 1 && dims_of_b.size() == 1 && dims_of_a[0].dim == dims_of_b[0].dim) {
    return {{dims_of_a[0].dim, dims_of_a[0].ranks + dims_of_b[0].ranks}};
  }
  RankSet both(a);
  both.add(b);
  DimReader from_a(dims_of_a);
  DimReader from_b(dims_of_b);
  std::vector<wire::DimRun> merged;
  for_each_rank(both, [&](int rank) {
    append_dims(merged, (contains(a, rank) ? from_a : from_b).next(), 1);
  });
  return merged;
}

// The first dimension of what gathers is each rank's own.
bool same_request(const wire::Request& a, const wire::Request& b) {
  if (!wire::gathers(a.kind) || a.shape.empty() || b.shape.empty()) return a == b;
  wire::Request alike = b;
  alike.shape[0] = a.shape[0];
  return a == alike;
}

wire::Report::Group& group_of(wire::Report::Section& section, const RankSet& ranks) {
  constexpr std::size_t kMostCompared = 16;
  const std::size_t compared = std::min(kMostCompared, section.groups.size());
  const auto found = std::find_if(section.groups.rbegin(),
                                  section.groups.rbegin() + static_cast<std::ptrdiff_t>(compared),
                                  [&](const auto& group) { return group.ranks == ranks; });
  if (found != section.groups.rbegin() + static_cast<std::ptrdiff_t>(compared)) return *found;
  section.groups.push_back({ranks});
  return section.groups.back();
}

}  // namespace

RankSpan SubtreeMembers::of(int process_set) {
  if (process_set == 0) return subtree_;
  const auto known = of_set_.find(process_set);
  if (known != of_set_.end()) return known->second;
  // Of a set that is no more nothing is worth waiting for.
  RankSet members =
      sets_.contains(process_set) ? intersection(sets_.rank_set(process_set), subtree_) : RankSet();
  return of_set_.emplace(process_set, std::move(members)).first->second;
}

std::optional<TimePoint> HeldReports::oldest() const {
  std::optional<TimePoint> oldest;
  for (const Hits& hits : hits_) oldest = std::min(oldest.value_or(hits.since), hits.since);
  for (const Named& named : named_) oldest = std::min(oldest.value_or(named.since), named.since);
  return oldest;
}

// Hits fall into classes of slots that the same ranks have reported; a report that has only some of
// a class's slots splits it.
bool HeldReports::add_hits(wire::SlotSet slots, RankSpan ranks, std::uint64_t report_number,
                           int process_set, TimePoint now, SubtreeMembers& members) {
  bool complete = false;
  const auto add_to = [&](Hits& hits) {
    if (ranks.front().first < hits.ranks.lowest()) hits.report_number = report_number;
    hits.ranks.add(ranks);
    complete = complete || members.complete(hits.ranks, hits.process_set);
  };
  const std::size_t classes = hits_.size();
  for (std::size_t i = 0; i < classes && !slots.empty(); ++i) {
    if (hits_[i].process_set != process_set || intersects(hits_[i].ranks, ranks)) continue;
    if (hits_[i].slots == slots) {
      add_to(hits_[i]);
      return complete;
    }
    wire::SlotSet common = hits_[i].slots;
    common.intersect(slots);
    if (common.empty()) continue;
    slots.remove(common);
    if (common == hits_[i].slots) {
      add_to(hits_[i]);
      continue;
    }
    hits_[i].slots.remove(common);
    Hits part = hits_[i];
    part.slots = std::move(common);
    add_to(part);
    hits_.push_back(std::move(part));
  }
  if (slots.empty()) return complete;
  hits_.push_back({std::move(slots), RankSet(ranks), report_number, process_set, now});
  return complete || members.complete(ranks, process_set);
}

bool HeldReports::add_named(std::string key, int process_set, Variant variant, TimePoint now,
                            SubtreeMembers& members) {
  const auto [found, is_new] = by_key_.try_emplace(std::move(key), named_.size());
  if (is_new) named_.push_back({found->first, process_set, {}, {}, now});
  Named& named = named_[found->second];
  named.said.add(variant.ranks);
  const auto same =
      std::find_if(named.variants.begin(), named.variants.end(), [&](const Variant& known) {
        return known.hit == variant.hit &&
               same_request(known.asked.request, variant.asked.request) &&
               !intersects(known.ranks, variant.ranks);
      });
  if (same == named.variants.end()) {
    named.variants.push_back(std::move(variant));
  } else {
    auto dims =
        merge_dims(same->ranks, same->asked.first_dims, variant.ranks, variant.asked.first_dims);
    if (variant.ranks.lowest() < same->ranks.lowest()) same->asked = std::move(variant.asked);
    same->asked.first_dims = std::move(dims);
    same->ranks.add(variant.ranks);
  }
  return members.complete(named.said, process_set);
}

void HeldReports::move_out(Hits& hits, wire::Report::Section& section) {
  group_of(section, hits.ranks).hits.push_back({hits.report_number, std::move(hits.slots)});
}

void HeldReports::move_out(Named& named, wire::Report::Section& section) {
  for (Variant& variant : named.variants) {
    auto& group = group_of(section, variant.ranks);
    if (variant.hit) {
      group.unnamed_hits.push_back({variant.asked.stamp, *variant.hit});
    } else {
      group.requests.push_back(std::move(variant.asked));
    }
  }
}

void HeldReports::move_complete(wire::Report::Section& section, SubtreeMembers& members) {
  std::erase_if(hits_, [&](Hits& hits) {
    const bool goes = members.complete(hits.ranks, hits.process_set);
    if (goes) move_out(hits, section);
    return goes;
  });
  const std::size_t before = named_.size();
  std::erase_if(named_, [&](Named& named) {
    const bool goes = members.complete(named.said, named.process_set);
    if (goes) move_out(named, section);
    return goes;
  });
  if (named_.size() == before) return;
  by_key_.clear();
  for (std::size_t i = 0; i < named_.size(); ++i) by_key_.emplace(named_[i].key, i);
}

HeldReports::InParts HeldReports::move_all(wire::Report::Section& section,
                                           SubtreeMembers* members) {
  InParts in_parts;
  for (Hits& hits : hits_) {
    if (members == nullptr || !members->complete(hits.ranks, hits.process_set))
      in_parts.slots.add(hits.slots);
    move_out(hits, section);
  }
  for (Named& named : named_) {
    if (members == nullptr || !members->complete(named.said, named.process_set))
      in_parts.keys.push_back(named.key);
    move_out(named, section);
  }
  hits_.clear();
  named_.clear();
  by_key_.clear();
  return in_parts;
}

}  // namespace hvd::control
