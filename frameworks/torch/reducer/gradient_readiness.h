#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace hvd::libtorch {

/// Tracks which gradients of a cycle are ready, and which units are complete. Gradients are
/// identified by their indices, so that this class does not depend on LibTorch.
///
///   idle --last counted pass--> ready --its unit is complete--> submitted --end of cycle--> idle
///
/// Not thread-safe.
class GradientReadiness {
 public:
  /// @param expected whether backward is to produce this gradient; called each time, since the
  /// answer may change
  GradientReadiness(std::size_t gradients, int passes_per_step,
                    std::function<bool(std::size_t)> expected);

  /// @param units the gradients of each unit; every gradient is in exactly one. The gradients'
  /// phases do not change.
  void set_units(const std::vector<std::vector<std::size_t>>& units);
  std::size_t unit_of(std::size_t gradient) const { return gradients_[gradient].unit; }
  /// Call this when more gradients may be expected than before. Each cycle begins with it.
  void recheck_expected();

  int passes_per_step() const noexcept { return passes_per_step_; }
  void set_passes_per_step(int passes) { passes_per_step_ = passes; }
  /// @return whether this was the last backward pass of the step
  bool count_pass(std::size_t gradient);
  void forget_passes(std::size_t gradient) { gradients_[gradient].passes = 0; }

  /// Records that backward has produced the gradient. @param held whether the gradient must not be
  /// submitted before synchronize()
  void mark_ready(std::size_t gradient, bool held);
  /// Undoes mark_ready().
  void withdraw(std::size_t gradient);
  /// Whether mark_ready() was called in this cycle.
  bool marked_ready(std::size_t gradient) const {
    return gradients_[gradient].phase != Phase::kIdle;
  }
  /// Whether every expected gradient of the unit is ready, and not held. If fewer gradients are
  /// expected than when the cycle began, false may be returned instead of true.
  bool unit_ready(std::size_t unit);
  /// Whether all expected gradients are submitted once this unit is.
  bool last_unit(std::size_t unit) const;
  void mark_submitted(std::size_t unit);
  /// The gradient that arrives after the next `skipped` ones, if the gradients of the unit arrive
  /// in the order of its members.
  std::optional<std::size_t> likely_next(std::size_t unit, std::size_t skipped) const;

  /// Whether a gradient has been marked ready or submitted in this cycle.
  bool in_cycle() const { return !arrivals_.empty() || !submitted_.empty(); }
  std::vector<std::size_t> units_left() const;
  /// In order of submission.
  std::span<const std::size_t> submitted() const { return submitted_; }
  /// Gradients in the order in which they became ready, then those that were submitted as zeros.
  std::vector<std::size_t> order_of_arrival() const;

  /// Ends the cycle, with or without a result, and resets the counts of passes.
  void end_cycle();
  /// Number of cycles that have ended.
  std::uint64_t cycles() const noexcept { return cycles_; }
  /// Whether the last cycle was reduced, and no gradient has arrived since.
  bool reduced() const noexcept { return reduced_; }
  void set_reduced(bool reduced) noexcept { reduced_ = reduced; }

 private:
  enum class Phase { kIdle, kHeld, kReady, kSubmitted };
  struct GradientProgress {
    std::size_t unit = 0;
    Phase phase = Phase::kIdle;
    int passes = 0;
  };
  struct UnitProgress {
    std::vector<std::size_t> members;
    bool submitted = false;
    std::size_t ready = 0;    ///< how many of the first members were found ready in this cycle
    std::size_t arrived = 0;  ///< how many members are not idle
    std::size_t absent = 0;   ///< how many were not expected at the last check
  };

  int passes_per_step_;
  const std::function<bool(std::size_t)> expected_;
  std::vector<GradientProgress> gradients_;
  std::vector<UnitProgress> units_;
  std::vector<std::size_t> arrivals_;
  std::vector<std::size_t> submitted_;
  std::uint64_t cycles_ = 0;
  bool reduced_ = false;
};

}  // namespace hvd::libtorch
