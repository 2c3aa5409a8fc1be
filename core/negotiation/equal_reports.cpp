#include "negotiation/equal_reports.h"

#include <utility>

#include "base/expect.h"

namespace hvd::control {

void EqualReports::begin(wire::Report::Group&& group, TimePoint now) {
  HVD_EXPECT(empty() && !group.known, "no reports are kept, and the group has its items");
  items_ = wire::encode_items(group);
  group_ = std::move(group);
  since_ = now;
}

bool EqualReports::add(const wire::Report::Group& group) {
  if (empty() || intersects(group_->ranks, group.ranks)) return false;
  if (!group.known && wire::encode_items(group) != items_) return false;
  group_->ranks.add(group.ranks);
  return true;
}

void EqualReports::restore(wire::Report::Group& restored) const {
  HVD_EXPECT(!restored.known || !empty(), "the known items are kept");
  if (!restored.known) return;
  RankSet ranks = std::move(restored.ranks);
  restored = group();
  restored.ranks = std::move(ranks);
}

const wire::Report::Group& EqualReports::group() const noexcept {
  HVD_EXPECT(!empty(), "reports are kept");
  return *group_;
}

TimePoint EqualReports::since() const noexcept {
  HVD_EXPECT(!empty(), "reports are kept");
  return since_;
}

wire::Report::Group EqualReports::take() {
  HVD_EXPECT(!empty(), "reports are kept");
  wire::Report::Group taken = std::move(*group_);
  clear();
  return taken;
}

void EqualReports::clear() noexcept {
  group_.reset();
  items_.clear();
}

}  // namespace hvd::control
