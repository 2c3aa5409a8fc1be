#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace hvd::libtorch {

/// Which gradients of a cycle are ready, and which units with them. Knows gradients by number only.
///
///   idle --last counted pass--> ready --its unit is complete--> submitted --end of cycle--> idle
///
/// Not thread-safe.
class GradientReadiness {
 public:
  /// @param expected whether backward is to produce this gradient; asked each time, as the answer
  /// may change
  GradientReadiness(std::size_t gradients, int passes_per_step,
                    std::function<bool(std::size_t)> expected);

  /// @param units the members of each; every gradient is in one. Gradients stay what they are.
  void set_units(const std::vector<std::vector<std::size_t>>& units);
  std::size_t unit_of(std::size_t gradient) const { return gradients_[gradient].unit; }
  /// What is expected may have become more.
  void look_again();

  int passes_per_step() const noexcept { return passes_per_step_; }
  void set_passes_per_step(int passes) { passes_per_step_ = passes; }
  /// @return whether this was the last backward pass of the step
  bool count_pass(std::size_t gradient);
  void forget_passes(std::size_t gradient) { gradients_[gradient].passes = 0; }

  /// Backward has produced it. @param held it is not submitted before synchronize()
  void note_ready(std::size_t gradient, bool held);
  /// It is not ready after all.
  void withdraw(std::size_t gradient);
  /// From note_ready() to the end of the cycle.
  bool handed_over(std::size_t gradient) const {
    return gradients_[gradient].phase != Phase::kIdle;
  }
  /// Whether every gradient of the unit that is expected is ready, and none is held.
  bool unit_ready(std::size_t unit);
  /// Whether no gradient that is expected is left over once this unit is submitted.
  bool last_unit(std::size_t unit) const;
  void note_submitted(std::size_t unit);

  /// A gradient has been handed over, though its unit may not be complete, or submitted.
  bool in_cycle() const { return !arrivals_.empty() || !submitted_.empty(); }
  std::vector<std::size_t> units_left() const;
  /// In order of submission.
  std::span<const std::size_t> submitted() const { return submitted_; }
  /// As gradients became ready; those that were submitted without one, last.
  std::vector<std::size_t> order_of_arrival() const;

  /// Ends the cycle, whatever has become of it. Passes that were counted are forgotten.
  void end_cycle();
  /// How many cycles have ended.
  std::uint64_t cycles() const noexcept { return cycles_; }
  /// The last cycle has been reduced, and no gradient has come in since.
  bool reduced() const noexcept { return reduced_; }
  void set_reduced(bool reduced) noexcept { reduced_ = reduced; }

 private:
  enum class Phase { kIdle, kHeld, kReady, kSubmitted };
  struct Gradient {
    std::size_t unit = 0;
    Phase phase = Phase::kIdle;
    int passes = 0;
  };
  struct Unit {
    std::vector<std::size_t> members;
    bool submitted = false;
    std::size_t ready = 0;  ///< as many of the first members are known to be ready, in this cycle
  };

  int passes_per_step_;
  const std::function<bool(std::size_t)> expected_;
  std::vector<Gradient> gradients_;
  std::vector<Unit> units_;
  std::vector<std::size_t> arrivals_;
  std::vector<std::size_t> submitted_;
  std::uint64_t cycles_ = 0;
  bool reduced_ = false;
};

}  // namespace hvd::libtorch
