#include "reducer/gradient_readiness.h"

#include <utility>

namespace hvd::libtorch {

GradientReadiness::GradientReadiness(std::size_t gradients, int passes_per_step,
                                     std::function<bool(std::size_t)> expected)
    : passes_per_step_(passes_per_step), expected_(std::move(expected)), gradients_(gradients) {}

void GradientReadiness::set_units(const std::vector<std::vector<std::size_t>>& units) {
  units_.clear();
  for (const std::vector<std::size_t>& members : units) {
    UnitProgress unit{.members = members};
    for (const std::size_t member : members) {
      gradients_[member].unit = units_.size();
      if (gradients_[member].phase != Phase::kIdle) ++unit.arrived;
    }
    units_.push_back(std::move(unit));
  }
  recheck_expected();
}

void GradientReadiness::recheck_expected() {
  for (UnitProgress& unit : units_) {
    unit.ready = unit.absent = 0;
    for (const std::size_t member : unit.members)
      if (!expected_(member)) ++unit.absent;
  }
}

bool GradientReadiness::count_pass(std::size_t gradient) {
  return ++gradients_[gradient].passes >= passes_per_step_;
}

void GradientReadiness::mark_ready(std::size_t gradient, bool held) {
  if (!in_cycle()) recheck_expected();
  GradientProgress& progress = gradients_[gradient];
  if (progress.phase == Phase::kIdle) ++units_[progress.unit].arrived;
  progress.phase = held ? Phase::kHeld : Phase::kReady;
  arrivals_.push_back(gradient);
}

void GradientReadiness::withdraw(std::size_t gradient) {
  GradientProgress& progress = gradients_[gradient];
  UnitProgress& unit = units_[progress.unit];
  if (progress.phase != Phase::kIdle) --unit.arrived;
  progress.phase = Phase::kIdle;
  unit.ready = 0;
}

/// A bucket may have a thousand members. They are not checked before enough gradients have arrived,
/// and each is checked once in a cycle.
bool GradientReadiness::unit_ready(std::size_t index) {
  UnitProgress& unit = units_[index];
  if (unit.arrived + unit.absent < unit.members.size()) return false;
  while (unit.ready < unit.members.size()) {
    const std::size_t member = unit.members[unit.ready];
    if (gradients_[member].phase != Phase::kReady && expected_(member)) return false;
    ++unit.ready;
  }
  return true;
}

bool GradientReadiness::last_unit(std::size_t unit) const {
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const bool submitted = gradients_[i].phase == Phase::kSubmitted || gradients_[i].unit == unit;
    if (!submitted && expected_(i)) return false;
  }
  return true;
}

void GradientReadiness::mark_submitted(std::size_t unit) {
  units_[unit].submitted = true;
  for (const std::size_t member : units_[unit].members) {
    if (!expected_(member)) continue;
    gradients_[member].phase = Phase::kSubmitted;
    submitted_.push_back(member);
  }
}

std::optional<std::size_t> GradientReadiness::likely_next(std::size_t unit,
                                                          std::size_t skipped) const {
  const UnitProgress& progress = units_[unit];
  const std::size_t position = progress.arrived + skipped;
  if (position >= progress.members.size()) return std::nullopt;
  return progress.members[position];
}

std::vector<std::size_t> GradientReadiness::units_left() const {
  std::vector<std::size_t> left;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (!units_[u].submitted) left.push_back(u);
  }
  return left;
}

std::vector<std::size_t> GradientReadiness::order_of_arrival() const {
  std::vector<std::size_t> order;
  std::vector<bool> known(gradients_.size());
  for (const std::vector<std::size_t>* const some : {&arrivals_, &submitted_}) {
    for (const std::size_t i : *some) {
      if (!known[i]) order.push_back(i);
      known[i] = true;
    }
  }
  return order;
}

void GradientReadiness::end_cycle() {
  for (GradientProgress& gradient : gradients_) {
    gradient.phase = Phase::kIdle;
    gradient.passes = 0;
  }
  for (UnitProgress& unit : units_) {
    unit.submitted = false;
    unit.ready = unit.arrived = 0;
  }
  arrivals_.clear();
  submitted_.clear();
  ++cycles_;
  reduced_ = false;
}

}  // namespace hvd::libtorch
