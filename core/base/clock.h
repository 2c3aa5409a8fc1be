#pragma once

#include <sched.h>

#include <chrono>
#include <ctime>

namespace hvd {

/// Time since an arbitrary start. Pure classes receive it as an argument; only the runtime reads a
/// clock.
using TimePoint = std::chrono::nanoseconds;
using Duration = std::chrono::nanoseconds;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint now() const noexcept = 0;
  /// now(), or up to 10 ms before it, in a quarter of the time.
  virtual TimePoint about_now() const noexcept { return now(); }
};

/// CLOCK_MONOTONIC: comparable between the processes of one host.
class SteadyClock final : public Clock {
 public:
  TimePoint now() const noexcept override {
    return std::chrono::duration_cast<TimePoint>(
        std::chrono::steady_clock::now().time_since_epoch());
  }
  TimePoint about_now() const noexcept override {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  }
};

using Deadline = std::chrono::steady_clock::time_point;

/// Calls `done` until it returns true or the deadline has passed. Returns whether `done` has
/// returned true. Yields the core or sleeps between attempts. Use it only at the start and the end
/// of a job, when the thread has no other work.
template <typename Done>
bool poll_until(Deadline deadline, Done&& done) {
  constexpr int kYields = 200;
  long pause_ns = 20'000;
  for (int attempt = 0;; ++attempt) {
    if (done()) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    if (attempt < kYields) {
      sched_yield();
    } else {
      const timespec pause = {.tv_sec = 0, .tv_nsec = pause_ns};
      ::nanosleep(&pause, nullptr);
      if (pause_ns < 1'000'000) pause_ns *= 2;
    }
  }
}

}  // namespace hvd
