#pragma once

#include <chrono>

namespace hvd {

/// Time since an arbitrary start. Pure classes receive it as an argument; only the runtime reads a
/// clock.
using TimePoint = std::chrono::nanoseconds;
using Duration = std::chrono::nanoseconds;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint now() const noexcept = 0;
};

/// CLOCK_MONOTONIC: comparable between the processes of one host.
class SteadyClock final : public Clock {
 public:
  TimePoint now() const noexcept override {
    return std::chrono::duration_cast<TimePoint>(
        std::chrono::steady_clock::now().time_since_epoch());
  }
};

}  // namespace hvd
