#pragma once

#include <sched.h>

#include <chrono>
#include <thread>

namespace hvd {

using Deadline = std::chrono::steady_clock::time_point;

/// Calls `done` until it returns true or the deadline has passed, and returns whether it did.
/// Yields the core between attempts. For the start and the end of a job only, where the thread has
/// no other work.
template <typename Done>
bool poll_until(Deadline deadline, Done&& done) {
  constexpr int kYields = 200;
  auto pause = std::chrono::microseconds(20);
  for (int attempt = 0;; ++attempt) {
    if (done()) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    if (attempt < kYields) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(pause);
      if (pause < std::chrono::milliseconds(1)) pause *= 2;
    }
  }
}

}  // namespace hvd
