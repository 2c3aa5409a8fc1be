#pragma once

#include <algorithm>
#include <chrono>
#include <climits>

#include "base/clock.h"

namespace hvd::launcher {

inline TimePoint time_now() { return SteadyClock().now(); }

/// Converts a time to the type that the timers of the event loop use.
inline Deadline as_deadline(TimePoint time) {
  return Deadline(std::chrono::duration_cast<Deadline::duration>(time));
}

/// Seconds of an option in whole milliseconds.
inline int whole_ms(double seconds) {
  return static_cast<int>(std::min(seconds * 1000, static_cast<double>(INT_MAX)));
}

}  // namespace hvd::launcher
