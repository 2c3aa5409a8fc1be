#pragma once

#include "base/clock.h"

namespace hvd::runtime {

/// The time as the steps of an engine see it, and for how long the whole process was stopped, as
/// far as that shows: others cannot be blamed for what they did not hear from it meanwhile.
///
/// Not thread-safe: the thread that drives the engine. Nothing throws.
class StepTime {
 public:
  /// @param longest_sleep between two steps, while the process is not stopped
  StepTime(const Clock& clock, Duration longest_sleep) noexcept
      : clock_(clock), longest_sleep_(longest_sleep), step_(clock.now()) {}

  void begin_step() noexcept {
    const TimePoint now = clock_.now();
    if (now - step_ > 2 * longest_sleep_) paused_ += now - step_ - longest_sleep_;
    step_ = now;
  }
  Duration longest_sleep() const noexcept { return longest_sleep_; }
  /// When this step began.
  TimePoint step() const noexcept { return step_; }
  TimePoint now() const noexcept { return clock_.now(); }
  /// Without the time for which the process was stopped.
  TimePoint awake(TimePoint time) const noexcept { return time - paused_; }
  TimePoint awake() const noexcept { return awake(now()); }
  /// What awake() was given for this.
  TimePoint on_the_clock(TimePoint awake) const noexcept { return awake + paused_; }

 private:
  const Clock& clock_;
  const Duration longest_sleep_;
  TimePoint step_;
  Duration paused_{};
};

}  // namespace hvd::runtime
